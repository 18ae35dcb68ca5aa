"""/v1/completions."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from localllm.engine.request import TokenEvent, TokenLogprob
from localllm.server.front.model import ForeignModel
from localllm.server.json_body import JsonRoute
from localllm.server.ollama.translate import progress_of
from localllm.server.openai import translate
from localllm.server.openai.chat import (
    DONE,
    FINGERPRINT,
    finish_reason,
    load_chunks,
    respond_openai,
    usage,
)
from localllm.server.openai.schema import CompletionBody
from localllm.server.responses import sse
from localllm.server.service import Run, TheService

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, service: TheService) -> Response:
    """Continue one or several prompts."""
    head = _head(body.model)
    load_lines = load_chunks(head) if body.progress else None
    running = service.run(
        body.model,
        translate.keep_alive(body),
        lambda model, behaviour: translate.prepare_completion(model, behaviour, body),
        load_lines.told if load_lines else None,
    )

    async def whole(run: Run) -> dict[str, Any]:
        answers = await run.answers()
        found = [
            _choice(run, index, _echo(body, run, index) + answer.content, answer.logprobs)
            | {"finish_reason": finish_reason(answer.last, False)}
            for index, answer in enumerate(answers)
        ]
        return {**head, "choices": found, "usage": _usage(body, [answer.last for answer in answers])}

    chunks = (lambda run: _chunks(body, head, run)) if body.stream else None
    return await respond_openai(request, running, whole, chunks, load_lines)


async def _chunks(body: CompletionBody, head: dict[str, Any], run: Run) -> AsyncGenerator[bytes, None]:
    lasts: list[TokenEvent] = [TokenEvent() for _ in run.streams]
    if body.echo:
        for index in range(len(run.streams)):
            yield sse({**head, "choices": [_choice(run, index, _echo(body, run, index), ())]})
    async for index, piece in run.all_pieces():
        if piece.progress and body.progress:
            yield sse({**head, "choices": [], "progress": progress_of(piece.progress)})
        if piece.says_something:
            yield sse({**head, "choices": [_choice(run, index, piece.content, piece.logprobs)]})
        if piece.last:
            lasts[index] = piece.last
            reason = finish_reason(piece.last, False)
            yield sse({**head, "choices": [_choice(run, index, "", ()) | {"finish_reason": reason}]})
    if body.stream_options and body.stream_options.include_usage:
        yield sse({**head, "choices": [], "usage": _usage(body, lasts)})
    yield DONE


def _usage(body: CompletionBody, lasts: list[TokenEvent]) -> dict[str, Any]:
    """The usage of all prompts together."""
    choices = body.n or 1
    each = [usage(lasts[first : first + choices]) for first in range(0, len(lasts), choices)]
    total = {name: sum(one[name] for one in each) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in each)
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}


def _echo(body: CompletionBody, run: Run, index: int) -> str:
    if not body.echo or isinstance(run.model, ForeignModel):
        return ""
    return run.model.tokenizer.decode(run.prepared[index].request.prompt, skip_special=True)


def _choice(run: Run, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    told = _logprobs(run, logprobs) if logprobs else None
    return {"text": text, "index": index, "logprobs": told, "finish_reason": None}


def _logprobs(run: Run, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    def spelt(token: int) -> str:
        return run.model.tokenizer.token_bytes(token).decode("utf-8", "replace")

    return {
        "tokens": [spelt(entry.token_id) for entry in logprobs],
        "token_logprobs": [max(entry.logprob, -9999.0) for entry in logprobs],
        "top_logprobs": [{spelt(token): max(value, -9999.0) for token, value in entry.top} for entry in logprobs],
    }


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }
