"""/v1/responses, without memory: the conversation is what the request brings."""

import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.engine.loaded_model import LoadedModel
from localllm.engine.request import ContextPolicy, FinishReason
from localllm.library.behaviour import Behaviour
from localllm.server.answers import Answer
from localllm.server.chat import TEXT_ONLY, Chat, with_defaults
from localllm.server.errors import ApiError
from localllm.server.front.model import ForeignModel
from localllm.server.json_body import JsonRoute
from localllm.server.load_watch import LoadState
from localllm.server.ollama.translate import load_progress, progress_of
from localllm.server.openai import translate
from localllm.server.openai.response_items import Item, ItemWriter
from localllm.server.openai.schema import ResponsesBody
from localllm.server.responses import SSE, LoadLines, respond, with_errors
from localllm.server.service import Prepared, Run, TheService

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

STATEFUL = ("previous_response_id", "conversation", "background")


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request, service: TheService) -> Response:
    """Answer a conversation."""
    asked = await to_thread.run_sync(chat_of, body)
    writer = ItemWriter()
    begun = _begun(body)

    def load_line(state: LoadState) -> bytes:
        return b"".join([*writer.begin(begun), writer.progress(load_progress(state))])

    load_lines = LoadLines(load_line, writer.error) if body.progress else None
    running = service.run(
        body.model,
        translate.keep_alive(body),
        lambda model, behaviour: _prepare(model, behaviour, body, asked),
        load_lines.told if load_lines else None,
    )

    async def whole(run: Run) -> Item:
        (answer,) = await run.answers()
        writer.add_all(answer)
        return _ended(begun, answer, writer.items)

    def lines(run: Run) -> AsyncGenerator[bytes, None]:
        return with_errors(_events(body, run, writer, begun), writer.error)

    streamed = lines if body.stream else None
    return await respond(request, running, whole=whole, lines=streamed, media_type=SSE, load_lines=load_lines)


def chat_of(body: ResponsesBody) -> Chat:
    """The conversation of a body. Looks at images: off the event loop.

    Raises ApiError 400, also for what would need memory, and PictureError.
    """
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


def _prepare(
    model: LoadedModel | ForeignModel, behaviour: Behaviour, body: ResponsesBody, asked: Chat
) -> list[Prepared]:
    sampled = translate.sampled_of(body, body.temperature, body.top_p)
    sampling = translate.sampling_of(sampled, None, behaviour)
    limits = translate.limits_of(body, sampling, body.max_output_tokens, behaviour)
    if body.truncation == "auto":
        limits = replace(limits, policy=ContextPolicy.DROP_MESSAGES)
    return [translate.prepare_chosen(model, with_defaults(asked, behaviour), limits, body.tool_choice)]


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
        output = item.get("output")
        parts = output if isinstance(output, list) else []
        if not isinstance(output, str | list) or not all(isinstance(part, dict) for part in parts):
            raise ApiError(400, "an item of type function_call_output needs output as text")
        content = translate.text_of(output)
        return [{"role": "tool", "tool_call_id": _string(item, "call_id"), "content": content}]
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


async def _events(body: ResponsesBody, run: Run, writer: ItemWriter, begun: Item) -> AsyncGenerator[bytes, None]:
    for line in writer.begin(begun):
        yield line
    answer = Answer()
    async for piece in run.pieces():
        if piece.progress and body.progress:
            yield writer.progress(progress_of(piece.progress))
        for line in writer.add(piece):
            yield line
        answer.add(piece)
    for line in writer.close():
        yield line
    response = _ended(begun, answer, writer.items)
    yield writer.event(f"response.{response['status']}", response=response)


def _begun(body: ResponsesBody) -> Item:
    """A response before its first word."""
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "auto" if body.truncate else body.truncation or "disabled",
        "usage": None,
    }


def _ended(begun: Item, answer: Answer, items: list[Item]) -> Item:
    cut = answer.last.finish_reason is FinishReason.LENGTH
    return {
        **begun,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": _usage(answer),
    }


def _usage(answer: Answer) -> Item:
    counts = answer.last.counts
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": counts.prompt + counts.generated,
    }
