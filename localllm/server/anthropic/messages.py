"""/v1/messages and /v1/messages/count_tokens."""

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import Field

from localllm.answer.event import Answer, AnswerEvent, AnswerPart, PartKind
from localllm.answer.request import AnswerRequest
from localllm.answer.tool_calls import ToolCall
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError
from localllm.server.answering import answer
from localllm.server.bodies import Body, Extensions, Object, keep_alive_s
from localllm.server.contents import TEXT_ONLY, image_part, image_part_of_url, plain, text_part
from localllm.server.errors import ApiError, kind_of, known, message_of, status_of
from localllm.server.json_body import ProtocolRoute
from localllm.server.limits import MAX_INT, MAX_MESSAGES, MAX_STOPS, MAX_TOOLS
from localllm.server.service import Run, Service, ServiceDep
from localllm.server.streams import connected
from localllm.server.wire import SSE, sse

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
    def error_body(status: int, message: str, _code: str | None = None) -> Object:
        """An error, as a response or within a stream."""
        return {"type": "error", "error": {"type": kind_of(status, _KINDS), "message": message}}


router = APIRouter(route_class=AnthropicRoute, tags=["Anthropic"])


class Message(Body):
    """A message. content: text or blocks."""

    role: Literal["user", "assistant"]
    content: str | list[Object]


class Tool(Body):
    """A tool that the model may call."""

    name: str
    description: str | None = None
    input_schema: Object = Field(default_factory=dict)


class CountBody(Body):
    """/v1/messages/count_tokens; also a part of /v1/messages."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Object] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None


class MessagesBody(CountBody, Extensions):
    """/v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None


@router.post("/v1/messages")
async def messages(body: MessagesBody, http: Request, service: ServiceDep) -> Response:
    """Answer a conversation."""
    request = await to_thread.run_sync(messages_request, body)
    return await answer(
        http,
        service,
        body.model,
        [request],
        _Writer(body),
        stream=body.stream,
        progress=body.progress,
        keep_alive_s=keep_alive_s(body.keep_alive),
    )


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, http: Request, service: ServiceDep) -> Object:
    """Count the tokens of a request's prompt, including its template's."""
    return {"input_tokens": await connected(http, _count(body, service))}


async def _count(body: CountBody, service: Service) -> int:
    request = AnswerRequest(**await to_thread.run_sync(_conversation, body))
    async with service.lease(body.model) as lease:
        prompt = await to_thread.run_sync(lease.model.prepare, request)
        return len(known(prompt.tokens, "the number of tokens"))


def messages_request(body: MessagesBody) -> AnswerRequest:
    """Convert a body. Decodes images: call it off the event loop. Raises ApiError 400, PictureError."""
    fields = body.request_fields(body.stop_sequences) | {"max_tokens": body.max_tokens}
    return AnswerRequest(**_conversation(body), **fields, tool_choice=_tool_choice(body.tool_choice))


def _conversation(body: CountBody) -> Object:
    """The fields of an AnswerRequest that count_tokens has too."""
    found: list[Object] = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for message in body.messages:
        found += _messages(message)
    thinking = (body.thinking or {}).get("type")
    think = True if thinking in ("enabled", "adaptive") else False if thinking == "disabled" else None
    offers = (body.tool_choice or {}).get("type") != "none"
    return {"messages": found, "tools": [_tool(tool) for tool in body.tools or []] if offers else [], "think": think}


def _tool(tool: Tool) -> Object:
    about = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": tool.input_schema}}


def _tool_choice(choice: Object | None) -> str | None:
    """The tool that must be called; "" is any of them, None lets the model decide. Raises ApiError 400."""
    kind = (choice or {}).get("type", "auto")
    if kind in ("auto", "none"):
        return None
    if kind == "any":
        return ""
    name = (choice or {}).get("name")
    if kind != "tool" or not isinstance(name, str):
        raise ApiError(400, "tool_choice must be of type auto, any, none, or tool with a name")
    return name


def _messages(message: Message) -> list[Object]:
    """A message as chat templates expect it. Tool results become messages of their own, before the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts: list[Object] = []
    results: list[Object] = []
    fields: Object = {"role": message.role}
    for block in message.content:
        kind = block.get("type")
        if kind == "text":
            parts.append(text_part(_string(block, "text")))
        elif kind == "image" and message.role == "user":
            parts.append(_image(block.get("source")))
        elif kind == "thinking":
            fields["reasoning_content"] = _string(block, "thinking")
        elif kind == "tool_use":
            call = {"name": _string(block, "name"), "arguments": block.get("input") or {}}
            calls = fields.setdefault("tool_calls", [])
            calls.append({"id": _string(block, "id"), "type": "function", "function": call})
        elif kind == "tool_result":
            content = _text(block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": content})
        elif kind != "redacted_thinking":
            raise ApiError(400, TEXT_ONLY)
    rest = [{**fields, "content": plain(parts)}] if parts or "tool_calls" in fields or not results else []
    return [*results, *rest]


def _image(source: Any) -> Object:
    """A block's image. Raises ApiError 400 for a URL to fetch: nothing is fetched."""
    if not isinstance(source, dict) or source.get("type") != "base64":
        return image_part_of_url(source.get("url") if isinstance(source, dict) else None)
    return image_part(source.get("data"))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(b, dict) and b.get("type") == "text" for b in content):
        raise ApiError(400, TEXT_ONLY)
    return "\n".join(_string(block, "text") for block in content)


def _string(block: Object, key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"a block of type {str(block.get('type'))[:32]} needs {key} as text")
    return value


class _Writer:
    """See answering.Writer. Content blocks are opened, filled and closed in turn."""

    media_type = SSE

    def __init__(self, body: MessagesBody) -> None:
        self._body = body
        self._index = -1
        self._open: PartKind | None = None

    def begin(self, run: Run) -> Iterator[bytes]:
        usage = {"input_tokens": len(run.prompts[0].tokens or ()), "output_tokens": 0}
        yield _event("message_start", message={**self._message(), "usage": usage})
        yield _event("ping")

    def progress(self, progress: Object) -> bytes:
        return _event("ping", progress=progress)

    def event(self, _run: Run, _index: int, event: AnswerEvent, _before: Answer) -> Iterator[bytes]:
        for part in event.parts:
            yield from self._part(part)

    def end(self, _run: Run, answers: Sequence[Answer]) -> Iterator[bytes]:
        yield from self._close()
        yield _event("message_delta", delta=self._stopped(answers[0]), usage=_usage(answers[0].last))
        yield _event("message_stop")

    def error(self, error: LocalLLMError) -> bytes:
        return sse(AnthropicRoute.error_body(status_of(error), message_of(error)), event="error")

    def whole(self, _run: Run, answers: Sequence[Answer]) -> Object:
        answer = answers[0]
        blocks = [_block(PartKind.REASONING, answer.reasoning)] if answer.reasoning else []
        if answer.content or not answer.calls:
            blocks.append(_block(PartKind.CONTENT, answer.content))
        blocks += (_tool_use(call, call.arguments) for call in answer.calls)
        return {**self._message(), "content": blocks, **self._stopped(answer), "usage": _usage(answer.last)}

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
        """Why the answer ended. One of the model's own stop strings counts as the end of its turn."""
        last = answer.last
        found = last.stop_string if last.stop_string in (self._body.stop_sequences or ()) else None
        if answer.calls:
            reason = "tool_use"
        elif last.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        else:
            reason = "stop_sequence" if found else "end_turn"
        return {"stop_reason": reason, "stop_sequence": found}

    def _part(self, part: AnswerPart) -> Iterator[bytes]:
        if part.kind is PartKind.TOOL_CALLS:
            for call in part.tool_calls:
                yield from self._begin_block(part.kind, _tool_use(call, {}))
                source = json.dumps(call.arguments, ensure_ascii=False)
                yield self._delta({"type": "input_json_delta", "partial_json": source})
            return
        if self._open is not part.kind:
            yield from self._begin_block(part.kind, _block(part.kind, ""))
        kind = _BLOCKS[part.kind]
        yield self._delta({"type": f"{kind}_delta", kind: part.text})

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


def _tool_use(call: ToolCall, arguments: Object) -> Object:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": call.name, "input": arguments}


def _usage(last: AnswerEvent) -> Object:
    counts = last.counts
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts.generated,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, event=kind)
