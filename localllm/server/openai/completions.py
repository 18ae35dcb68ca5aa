"""/v1/completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.answer.event import Answer, AnswerEvent, Logprob
from localllm.answer.request import AnswerRequest
from localllm.server.answering import answer
from localllm.server.bodies import keep_alive_s
from localllm.server.errors import ApiError
from localllm.server.openai.schema import CompletionBody
from localllm.server.openai.wire import ChunkWriter, Object, OpenAIRoute, constraint_of, finish_reason
from localllm.server.service import Run, ServiceDep
from localllm.server.wire import finite, sse, warnings_of

router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])


@router.post("/v1/completions")
async def completions(body: CompletionBody, http: Request, service: ServiceDep) -> Response:
    """Continue one or several prompts."""
    body.model = await service.model_or_only(body.model)
    requests = await to_thread.run_sync(completion_requests, body)
    return await answer(
        http,
        service,
        body,
        requests,
        _Writer(body),
        stream=bool(body.stream),
        progress=body.progress or body.return_progress,
        keep_alive_s=keep_alive_s(body.keep_alive),
        choices=body.n or 1,
    )


def completion_requests(body: CompletionBody) -> list[AnswerRequest]:
    """A request for each prompt of a body. Raises ApiError 400."""
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of is not supported; leave it out or set it to n")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported; use one of them")
    prompt: Any = body.prompt
    if body.suffix and not isinstance(prompt, str):
        raise ApiError(400, "suffix requires a single prompt of text")
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    if several and not prompt:
        raise ApiError(400, "prompt is empty")
    fields = body.request_fields(body.stop, body.logprobs) | {"max_tokens": body.max_tokens} | constraint_of(body)
    prompts = prompt if several else [prompt]
    return [AnswerRequest(prompt=one, suffix=body.suffix or None, **fields) for one in prompts]


class _Writer(ChunkWriter):
    """See answering.Writer."""

    def __init__(self, body: CompletionBody) -> None:
        super().__init__(body, "cmpl", "text_completion")
        self._echo = bool(body.echo)

    def begin(self, run: Run) -> Iterator[bytes]:
        if self._echo:
            for index in range(len(run.streams)):
                yield self._chunk(index, _prompt_text(run, index))

    def event(self, _run: Run, index: int, event: AnswerEvent, _before: Answer) -> Iterator[bytes]:
        if event.parts or event.logprobs:
            yield self._chunk(index, event.content, logprobs=_logprobs(event.logprobs))
        if event.finish_reason is not None:
            yield self._chunk(index, "", finish_reason=finish_reason(event, False), **warnings_of(event))

    def whole(self, run: Run, answers: Sequence[Answer]) -> Object:
        choices = [
            _choice(
                index,
                (_prompt_text(run, index) if self._echo else "") + answer.content,
                logprobs=_logprobs(answer.logprobs),
                finish_reason=finish_reason(answer.last, False),
                **warnings_of(answer.last),
            )
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": self._usage(answers)}

    def _chunk(self, index: int, text: str, **more: object) -> bytes:
        return sse({**self._head, "choices": [_choice(index, text, **more)]})


def _prompt_text(run: Run, index: int) -> str:
    tokens = run.prompt(index).tokens
    if tokens is None:
        raise ApiError(400, "echo is not supported for models of a remote server")
    return run.lease.model.tokenizer.decode(tokens, skip_special=True)


def _choice(index: int, text: str, **more: object) -> Object:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": None, **more}


def _logprobs(logprobs: Sequence[Logprob]) -> Object | None:
    if not logprobs:
        return None
    return {
        "tokens": [entry.text for entry in logprobs],
        "token_logprobs": [finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            {token.decode("utf-8", "replace"): finite(value) for token, value in entry.top} for entry in logprobs
        ],
    }
