"""Anthropic's messages: /v1/messages and /v1/messages/count_tokens."""

import json
import secrets
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from localllm.engine.loaded_model import LoadedModel
from localllm.engine.request import FinishReason, SamplingParams, TokenEvent
from localllm.errors import LocalLLMError
from localllm.library.behaviour import Behaviour
from localllm.server.answers import Answer, Piece
from localllm.server.chat import TEXT_ONLY, Chat, Limits, prepare_chat, with_defaults
from localllm.server.errors import ApiError, error_body, status_of
from localllm.server.front.model import ForeignModel, not_told
from localllm.server.images import image_part, image_part_of_url, plain, text_part
from localllm.server.json_body import JsonRoute
from localllm.server.limits import MAX_INT, MAX_MESSAGES, MAX_STOPS, MAX_TOOLS
from localllm.server.ollama.translate import load_progress, progress_of
from localllm.server.openai import translate
from localllm.server.openai.schema import Extensions
from localllm.server.responses import SSE, LoadLines, connected, respond, sse, with_errors
from localllm.server.service import Prepared, Run, Service, TheService

router = APIRouter(route_class=JsonRoute, tags=["Anthropic"])

Object = dict[str, Any]


class Message(BaseModel):
    """One message; content is text or blocks."""

    role: Literal["user", "assistant"]
    content: str | list[Object]


class Tool(BaseModel):
    """A tool that the model may call."""

    name: str
    description: str | None = None
    input_schema: Object = {}


class CountBody(BaseModel):
    """What count_tokens takes, and messages too."""

    model_config = ConfigDict(protected_namespaces=())

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
async def messages(body: MessagesBody, request: Request, service: TheService) -> Response:
    """Answer a conversation."""
    asked = await to_thread.run_sync(chat_of, body)
    load_lines = LoadLines(lambda state: _ping(load_progress(state)), _error_event) if body.progress else None
    running = service.run(
        body.model,
        translate.keep_alive(body),
        lambda model, behaviour: _prepare(model, behaviour, body, asked),
        load_lines.told if load_lines else None,
    )

    async def whole(run: Run) -> Object:
        (answer,) = await run.answers()
        return {
            **_message(body.model),
            "content": _blocks(answer),
            **_stopped(body, answer),
            "usage": _usage(answer.last),
        }

    def lines(run: Run) -> AsyncGenerator[bytes, None]:
        return with_errors(_events(body, run), _error_event)

    streamed = lines if body.stream else None
    return await respond(request, running, whole=whole, lines=streamed, media_type=SSE, load_lines=load_lines)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, request: Request, service: TheService) -> Object:
    """Count the tokens that the model would read, its template's own included."""
    return {"input_tokens": await connected(request, _count(body, service))}


async def _count(body: CountBody, service: Service) -> int:
    asked = await to_thread.run_sync(chat_of, body)
    chat = with_defaults(asked, (await service.find(body.model)).behaviour)
    async with service.lease(body.model) as lease:
        model = lease.model
        if not isinstance(model, LoadedModel):
            raise not_told("the number of tokens")
        prepared = await to_thread.run_sync(prepare_chat, model, chat, Limits(SamplingParams()))
        return len(prepared.request.prompt)


def chat_of(body: CountBody) -> Chat:
    """The conversation of a body. Looks at images: off the event loop. Raises ApiError 400, PictureError."""
    found: list[Object] = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for message in body.messages:
        found += _messages(message)
    kind = (body.tool_choice or {}).get("type")
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in body.tools or []
    ]
    thinking = (body.thinking or {}).get("type")
    think = True if thinking in ("enabled", "adaptive") else False if thinking == "disabled" else None
    return Chat(body.model, found, [] if kind == "none" else tools, think)


def _prepare(
    model: LoadedModel | ForeignModel, behaviour: Behaviour, body: MessagesBody, asked: Chat
) -> list[Prepared]:
    sampled = translate.sampled_of(body, body.temperature, body.top_p)
    sampling = translate.sampling_of(sampled, None, behaviour)
    limits = translate.limits_of(body, sampling, body.max_tokens, behaviour, body.stop_sequences)
    choice = body.tool_choice or {}
    kind = choice.get("type", "auto")
    chosen = choice if kind == "tool" else str(kind)
    return [translate.prepare_chosen(model, with_defaults(asked, behaviour), limits, chosen)]


def _messages(message: Message) -> list[Object]:
    """One message as templates take it: results of tools become messages of their own, before the rest."""
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
    """A block's image. Raises ApiError 400 for one that is only referred to, which is never fetched."""
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


def _message(model: str) -> Object:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(answer: Answer) -> list[Object]:
    blocks: list[Object] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    return [*blocks, *(_tool_use(call.name, call.arguments) for call in answer.calls)]


def _tool_use(name: str, arguments: Object) -> Object:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": arguments}


def _stopped(body: MessagesBody, answer: Answer) -> Object:
    """Why the answer ended; stop strings of the model's own are ends of its turn."""
    found = answer.last.stop_string if answer.last.stop_string in (body.stop_sequences or ()) else None
    if answer.calls:
        reason = "tool_use"
    elif answer.last.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    else:
        reason = "stop_sequence" if found else "end_turn"
    return {"stop_reason": reason, "stop_sequence": found}


def _usage(last: TokenEvent) -> Object:
    counts = last.counts
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts.generated,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, event=kind)


async def _events(body: MessagesBody, run: Run) -> AsyncGenerator[bytes, None]:
    usage = {"input_tokens": len(run.prepared[0].request.prompt), "output_tokens": 0}
    yield _event("message_start", message={**_message(body.model), "usage": usage})
    yield _event("ping")
    blocks = _BlockWriter()
    answer = Answer()
    async for piece in run.pieces():
        if piece.progress and body.progress:
            yield _ping(progress_of(piece.progress))
        for line in blocks.write(piece):
            yield line
        answer.add(piece)
    for line in blocks.close():
        yield line
    yield _event("message_delta", delta=_stopped(body, answer), usage=_usage(answer.last))
    yield _event("message_stop")


def _ping(progress: Object) -> bytes:
    """How far a request has come: in an event that clients pass over, before the message or within it."""
    return _event("ping", progress=progress)


class _BlockWriter:
    """Content blocks of a stream: one after the other, each opened, filled and closed."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""

    def write(self, piece: Piece) -> list[bytes]:
        """The events of a piece."""
        lines: list[bytes] = []
        if piece.reasoning:
            lines += self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            lines.append(self._delta({"type": "thinking_delta", "thinking": piece.reasoning}))
        if piece.content:
            lines += self._switch("text", {"type": "text", "text": ""})
            lines.append(self._delta({"type": "text_delta", "text": piece.content}))
        for call in piece.calls:
            lines += self.close()
            lines += self._switch("tool_use", _tool_use(call.name, {}))
            source = json.dumps(call.arguments, ensure_ascii=False)
            lines.append(self._delta({"type": "input_json_delta", "partial_json": source}))
        return lines

    def close(self) -> list[bytes]:
        """End the open block."""
        was_open, self._open = self._open, ""
        return [_event("content_block_stop", index=self._index)] if was_open else []

    def _switch(self, kind: str, block: Object) -> list[bytes]:
        if self._open == kind:
            return []
        lines = self.close()
        self._open = kind
        self._index += 1
        return [*lines, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: Object) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _error_event(error: LocalLLMError) -> bytes:
    return sse(error_body("/v1/messages", status_of(error), str(error)), event="error")
