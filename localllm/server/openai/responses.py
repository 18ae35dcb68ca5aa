"""/v1/responses, without memory: the conversation is what the request brings."""

import secrets
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response

from localllm.engine.loaded_model import LoadedModel
from localllm.engine.request import FinishReason, TokenEvent
from localllm.errors import LocalLLMError
from localllm.library.behaviour import Behaviour
from localllm.server.answers import Answer
from localllm.server.chat import TEXT_ONLY, Chat, with_defaults
from localllm.server.errors import ApiError, openai_error, status_of
from localllm.server.front.model import ForeignModel
from localllm.server.json_body import JsonRoute
from localllm.server.openai import translate
from localllm.server.openai.response_items import Item, ItemWriter
from localllm.server.openai.schema import ResponsesBody, Sampled
from localllm.server.responses import SSE, respond, sse, with_errors
from localllm.server.service import Prepared, Run, TheService

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

STATEFUL = ("previous_response_id", "conversation", "background")


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request, service: TheService) -> Response:
    """Answer a conversation."""
    chat_of(body)
    running = service.run(
        body.model, translate.keep_alive(body), lambda model, behaviour: _prepare(model, behaviour, body)
    )

    async def whole(run: Run) -> Item:
        (answer,) = await run.answers()
        writer = ItemWriter()
        writer.add_all(answer)
        return _response(body, _identity(), answer.last, writer.items)

    def lines(run: Run) -> AsyncGenerator[bytes, None]:
        return with_errors(_events(body, run), _error_event)

    return await respond(request, running, whole=whole, lines=lines if body.stream else None, media_type=SSE)


def chat_of(body: ResponsesBody) -> Chat:
    """The conversation of a body. Raises ApiError 400, also for what would need memory."""
    for name in STATEFUL:
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: responses are not stored; send the whole conversation")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages += [message for item in given for message in _messages(item)]
    if not given or given == [{"role": "user", "content": ""}]:
        raise ApiError(400, "input is empty")
    return Chat(
        name=body.model,
        messages=messages,
        tools=[] if body.tool_choice == "none" else [_tool(tool) for tool in body.tools or []],
        think=translate.think_of(body.reasoning.effort if body.reasoning else None),
        format=translate.format_of((body.text or {}).get("format")),
    )


def _prepare(model: LoadedModel | ForeignModel, behaviour: Behaviour, body: ResponsesBody) -> list[Prepared]:
    sampled = Sampled(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repeat_penalty=body.repeat_penalty,
    )
    sampling = translate.sampling_of(sampled, None, behaviour)
    limits = translate.limits_of(body, sampling, body.max_output_tokens, behaviour)
    return [translate.prepare_chosen(model, with_defaults(chat_of(body), behaviour), limits, body.tool_choice)]


def _messages(item: Item) -> list[Item]:
    """An input item as templates take it; items of reasoning stand for nothing."""
    kind = item.get("type", "message")
    if kind == "message":
        content, role = item.get("content"), item.get("role")
        if not isinstance(role, str) or not isinstance(content, str | list):
            raise ApiError(400, "an input message needs a role and content")
        if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
            raise ApiError(400, TEXT_ONLY)
        return [{"role": role, "content": translate.content_of(content, role)}]
    if kind == "function_call":
        function = {"name": _string(item, "name"), "arguments": _string(item, "arguments")}
        call = {"id": _string(item, "call_id"), "type": "function", "function": function}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        return [{"role": "tool", "tool_call_id": _string(item, "call_id"), "content": _string(item, "output")}]
    if kind == "reasoning":
        return []
    raise ApiError(400, f"input items of type {str(kind)[:32]!r} are not supported")


def _tool(tool: Item) -> Item:
    if tool.get("type") != "function":
        raise ApiError(400, "only tools of type function are supported")
    kept = {key: tool[key] for key in ("description", "parameters") if tool.get(key)}
    return {"type": "function", "function": {"name": _string(tool, "name"), **kept}}


def _string(item: Item, key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"an item of type {str(item.get('type'))[:32]} needs {key} as text")
    return value


async def _events(body: ResponsesBody, run: Run) -> AsyncGenerator[bytes, None]:
    identity = _identity()
    writer = ItemWriter()
    begun = _response(body, identity, None, [])
    yield writer.event("response.created", response=begun)
    yield writer.event("response.in_progress", response=begun)
    answer = Answer()
    async for piece in run.pieces():
        for line in writer.add(piece):
            yield line
        answer.add(piece)
    for line in writer.close():
        yield line
    response = _response(body, identity, answer.last, writer.items)
    yield writer.event(f"response.{response['status']}", response=response)


def _identity() -> str:
    return f"resp_{secrets.token_hex(16)}"


def _response(body: ResponsesBody, identity: str, last: TokenEvent | None, items: list[Item]) -> Item:
    cut = last is not None and last.finish_reason is FinishReason.LENGTH
    return {
        "id": identity,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if last is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "auto" if body.truncate else "disabled",
        "usage": None if last is None else _usage(last),
    }


def _usage(last: TokenEvent) -> Item:
    counts = last.counts
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.generated,
    }


def _error_event(error: LocalLLMError) -> bytes:
    return sse({"type": "error", **openai_error(status_of(error), str(error))["error"]}, event="error")
