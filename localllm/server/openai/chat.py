"""/v1/chat/completions."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.engine.request import FinishReason, TokenEvent
from localllm.errors import LocalLLMError
from localllm.server.answers import Answer, Piece
from localllm.server.errors import openai_error, status_of
from localllm.server.json_body import JsonRoute
from localllm.server.ollama.translate import load_progress, logprobs_of, progress_of
from localllm.server.openai import translate
from localllm.server.openai.schema import ChatBody
from localllm.server.responses import SSE, LoadLines, respond, sse, with_errors
from localllm.server.service import Run, TheService

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "fp_localllm"


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, service: TheService) -> Response:
    """Answer a conversation."""
    asked = await to_thread.run_sync(translate.chat_of, body)
    head = _head(body.model, "chat.completion.chunk", f"chatcmpl-{secrets.token_hex(12)}")
    load_lines = load_chunks(head) if body.progress else None
    running = service.run(
        body.model,
        translate.keep_alive(body),
        lambda model, behaviour: translate.prepare_chat_body(model, behaviour, body, asked),
        load_lines.told if load_lines else None,
    )

    async def whole(run: Run) -> dict[str, Any]:
        answers = await run.answers()
        return {
            **_head(body.model, "chat.completion", f"chatcmpl-{secrets.token_hex(12)}"),
            "choices": [_choice(run, index, answer) for index, answer in enumerate(answers)],
            "usage": _usage(answers),
        }

    chunks = (lambda run: _chunks(body, head, run)) if body.stream else None
    return await respond_openai(request, running, whole, chunks, load_lines)


async def respond_openai(
    request: Request,
    running: AbstractAsyncContextManager[Run],
    whole: Callable[[Run], Awaitable[dict[str, Any]]],
    chunks: Callable[[Run], AsyncGenerator[bytes, None]] | None,
    load_lines: LoadLines | None,
) -> Response:
    """Answer with chunks as server-sent events, errors among them, or with one object where chunks is None."""
    lines = (lambda run: with_errors(chunks(run), error_event)) if chunks else None
    return await respond(request, running, whole=whole, lines=lines, media_type=SSE, load_lines=load_lines)


def load_chunks(head: dict[str, Any]) -> LoadLines:
    """Chunks without choices that tell how far the model's load is."""
    return LoadLines(lambda state: sse({**head, "choices": [], "progress": load_progress(state)}), error_event)


def _choice(run: Run, index: int, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content if not answer.calls else answer.content or None,
    }
    if answer.reasoning:
        message["reasoning"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = tool_calls(answer)
    logprobs = {"content": logprobs_of(answer.logprobs, run.model.tokenizer)} if answer.logprobs else None
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason(answer.last, bool(answer.calls)),
    }


async def _chunks(body: ChatBody, head: dict[str, Any], run: Run) -> AsyncGenerator[bytes, None]:
    answers = [Answer() for _ in run.streams]
    for index in range(len(answers)):
        yield _chunk(head, index, {"role": "assistant", "content": ""})
    async for index, piece in run.all_pieces():
        answer = answers[index]
        if piece.progress and body.progress:
            yield sse({**head, "choices": [], "progress": progress_of(piece.progress)})
        if piece.says_something:
            logprobs = {"content": logprobs_of(piece.logprobs, run.model.tokenizer)} if piece.logprobs else None
            yield _chunk(head, index, _delta(piece, len(answer.calls)), logprobs=logprobs)
        answer.add(piece)
        if piece.last:
            yield _chunk(head, index, {}, finish_reason=finish_reason(piece.last, bool(answer.calls)))
    if body.stream_options and body.stream_options.include_usage:
        yield sse({**head, "choices": [], "usage": _usage(answers)})
    yield DONE


def _chunk(head: dict[str, Any], index: int, delta: dict[str, Any], **more: Any) -> bytes:
    return sse({**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}]})


def _delta(piece: Piece, calls_before: int) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if piece.content:
        delta["content"] = piece.content
    if piece.reasoning:
        delta["reasoning"] = piece.reasoning
    if piece.calls:
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(tool_calls(piece), start=calls_before)
        ]
    return delta


def tool_calls(answer: Answer | Piece) -> list[dict[str, Any]]:
    """Calls with fresh ids, their arguments as JSON text."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in answer.calls
    ]


def finish_reason(last: TokenEvent, calls: bool) -> str:
    """Why an answer ended, in OpenAI's words."""
    if calls:
        return "tool_calls"
    return "length" if last.finish_reason is FinishReason.LENGTH else "stop"


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    reasoning = sum(answer.reasoning_tokens for answer in answers)
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}
    return {**usage([answer.last for answer in answers]), **details}


def usage(lasts: list[TokenEvent]) -> dict[str, Any]:
    """Tokens read and written; the prompt of several choices counts once.

    dropped_messages and dropped_tokens, which OpenAI lacks, tell what did not fit into the context.
    """
    counts = [last.counts for last in lasts]
    prompt, generated = counts[0].prompt, sum(count.generated for count in counts)
    dropped = {"dropped_messages": counts[0].dropped_messages, "dropped_tokens": counts[0].dropped_tokens}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": counts[0].cached},
        **{name: count for name, count in dropped.items() if count},
    }


def _head(model: str, kind: str, identity: str) -> dict[str, Any]:
    return {
        "id": identity,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def error_event(error: LocalLLMError) -> bytes:
    """An error in the middle of a stream."""
    return sse(openai_error(status_of(error), str(error)))
