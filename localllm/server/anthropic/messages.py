"""/v1/messages and /v1/messages/count_tokens."""

import secrets
from collections.abc import Iterator
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.answer.event import Answer, AnswerEvent, AnswerPart, PartKind
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError
from localllm.server import answering
from localllm.server.anthropic.requests import LIFETIMES_S, CountBody, MessagesBody, conversation, messages_request
from localllm.server.bodies import Object
from localllm.server.errors import TOO_LONG_ANTHROPIC, Refusal, kind_of
from localllm.server.json_body import ProtocolRoute
from localllm.server.service import RunningAnswers, ServiceDep
from localllm.server.wire import Framed, notes_of, sse, timings

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class AnthropicRoute(ProtocolRoute):
    """A route of Anthropic's."""

    @staticmethod
    def error_body(refusal: Refusal) -> Object:
        message = refusal.worded(TOO_LONG_ANTHROPIC)
        error = {"type": kind_of(refusal.status, _KINDS), "message": message}
        return {"type": "error", "error": error, "request_id": f"req_{secrets.token_hex(12)}"}


router = APIRouter(route_class=AnthropicRoute, tags=["Anthropic"])


@router.post("/v1/messages")
async def messages(body: MessagesBody, http: Request, service: ServiceDep) -> Response:
    """Answer a conversation."""
    body.model = await service.model_or_only(body.model)
    request = await to_thread.run_sync(messages_request, body)
    return await answering.answer(http, service, body, [request], _Writer(body))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, service: ServiceDep) -> Object:
    """Count the tokens of a request's prompt, including its template's."""
    request = AnswerRequest(**await to_thread.run_sync(conversation, body))
    return {"input_tokens": await answering.count_tokens(service, body.model, request)}


class _Writer(answering.Writer):
    """Content blocks are opened, filled and closed in turn."""

    route = AnthropicRoute

    def __init__(self, body: MessagesBody) -> None:
        self._body = body
        self._index = -1
        self._open: PartKind | None = None
        self._text: Framed  # deltas of the open block of text

    def begin(self, run: RunningAnswers) -> Iterator[bytes]:
        usage = {"input_tokens": len(run.prompts[0].tokens or ()), "output_tokens": 0}
        yield _event("message_start", message={**self._message(), "usage": usage})
        yield _event("ping")

    def progress(self, progress: Object) -> bytes:
        return _event("ping", progress=progress)

    def alive(self) -> bytes:
        return _event("ping")

    def event(self, _run: RunningAnswers, _index: int, event: AnswerEvent) -> Iterator[bytes]:
        for part in event.parts:
            yield from self._part(part)

    def end(self, run: RunningAnswers) -> Iterator[bytes]:
        yield from self._close()
        last = run.answers[0].last
        delta = self._stopped(run.answers[0])
        yield _event("message_delta", delta=delta, usage=_usage(last), timings=timings(last), **notes_of(last))
        yield _event("message_stop")

    def error(self, error: LocalLLMError) -> bytes:
        return sse(self.error_body(error), event="error")

    def whole(self, run: RunningAnswers) -> Object:
        answer = run.answers[0]
        blocks = [_block(PartKind.REASONING, answer.reasoning)] if answer.reasoning else []
        if answer.content or not answer.calls:
            blocks.append(_block(PartKind.CONTENT, answer.content))
        blocks += (_tool_use(call.name, call.arguments) for call in answer.calls)
        last = answer.last
        ended = {**self._stopped(answer), "usage": _usage(last), "timings": timings(last), **notes_of(last)}
        return {**self._message(), "content": blocks, **ended}

    def _message(self) -> Object:
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stopped(self, answer: Answer) -> Object:
        """Why the answer ended. A stop string that the request did not name, the model's own, counts as end_turn."""
        last = answer.last
        found = last.stop_string if last.stop_string in (self._body.stop_sequences or ()) else None
        if answer.calls and not last.is_cut_call:
            reason = "tool_use"
        elif last.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        else:
            reason = "stop_sequence" if found else "end_turn"
        return {"stop_reason": reason, "stop_sequence": found}

    def _part(self, part: AnswerPart) -> Iterator[bytes]:
        if part.kind is PartKind.TOOL_CALLS:
            for delta in part.deltas:
                if delta.name:
                    yield from self._begin_block(part.kind, _tool_use(delta.name, {}))
                if delta.arguments:
                    yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})
            return
        if self._open is not part.kind:
            yield from self._begin_block(part.kind, _block(part.kind, ""))
            kind = _BLOCKS[part.kind]
            self._text = Framed(lambda text: self._delta({"type": f"{kind}_delta", kind: text}))
        yield self._text.line(part.text)

    def _begin_block(self, kind: PartKind, block: Object) -> Iterator[bytes]:
        yield from self._close()
        self._open = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        """Close the open block."""
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._index)

    def _delta(self, delta: Object) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


_BLOCKS = {PartKind.REASONING: "thinking", PartKind.CONTENT: "text"}


def _block(kind: PartKind, text: str) -> Object:
    name = _BLOCKS[kind]
    return {"type": name, name: text, **({"signature": ""} if kind is PartKind.REASONING else {})}


def _tool_use(name: str, arguments: Object) -> Object:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": arguments}


def _usage(last: AnswerEvent) -> Object:
    counts = last.counts
    written = dict(counts.pinned_for)
    return {
        "input_tokens": counts.prompt - counts.cached - counts.pinned,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": counts.pinned,
        "cache_creation": {f"ephemeral_{ttl}_input_tokens": written.get(LIFETIMES_S[ttl], 0) for ttl in LIFETIMES_S},
        "output_tokens": counts.generated,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, event=kind)
