"""Shared by all generating routes: run the parsed request and write the answer, whole or streamed."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request, Response
from starlette.responses import JSONResponse

from localllm.answer.event import AnswerEvent
from localllm.answer.request import AnswerRequest
from localllm.engine.request import Progress
from localllm.errors import LocalLLMError
from localllm.server.bodies import keep_alive_s
from localllm.server.errors import known, refusal_of
from localllm.server.json_body import ProtocolRoute
from localllm.server.load_watch import LoadListener
from localllm.server.semantic import hit_headers
from localllm.server.service import RunningAnswers, Service, for_user_of
from localllm.server.streams import held_lines, streamed
from localllm.server.wire import SSE, SSE_COMMENT, load_progress, prompt_progress, sse


class Asking(Protocol):
    """A request's body. progress: whether the client wants progress lines before the first token."""

    model: str
    stream: bool | None
    progress: bool
    keep_alive: float | str | None


class Writer(ABC):
    """Writes a run's answers in a protocol's format. Every method but `whole` returns lines of a stream.

    route: whose format errors have.
    """

    media_type = SSE
    route: type[ProtocolRoute] = ProtocolRoute

    def begin(self, run: RunningAnswers) -> Iterable[bytes]:
        """Before the first event. An error raised here still sets the HTTP status."""
        return ()

    @abstractmethod
    def progress(self, progress: dict[str, Any]) -> bytes:
        """Progress of the model's load or of prefill. May be called before `begin`."""

    def alive(self) -> bytes:
        """A keep-alive line, sent when there is nothing else to send. May be called before `begin`."""
        return SSE_COMMENT

    @abstractmethod
    def event(self, run: RunningAnswers, index: int, event: AnswerEvent) -> Iterable[bytes]:
        """An event of one answer, to which it is already added."""

    @abstractmethod
    def end(self, run: RunningAnswers) -> Iterable[bytes]:
        """After the last event of every answer."""

    def error(self, error: LocalLLMError) -> bytes:
        """An error after the response has begun."""
        return sse(self.error_body(error))

    def error_body(self, error: LocalLLMError) -> dict[str, Any]:
        """An error's JSON."""
        return self.route.error_body(refusal_of(error))

    @abstractmethod
    def whole(self, run: RunningAnswers) -> Any:
        """The complete answers as one JSON object."""


async def answer(
    http: Request,
    service: Service,
    body: Asking,
    requests: Sequence[AnswerRequest],
    writer: Writer,
    choices: int = 1,
    *,
    streams: bool = False,
) -> Response:
    """Run requests and respond. streams: whether to stream if the body does not say.

    If body.model names a fallback list, it is replaced by the name of the model that answers, which the response then
    reports. Raises ApiError 400 for an invalid keep_alive.
    """
    headers: dict[str, str] = {}
    for_user, options, keep_alive = for_user_of(http, requests), service.options, keep_alive_s(body.keep_alive)

    @contextlib.asynccontextmanager
    async def running(listener: LoadListener | None = None) -> AsyncGenerator[RunningAnswers, None]:
        async with service.run(body.model, for_user, keep_alive, choices=choices, listener=listener) as run:
            if options.models_of(body.model):
                body.model = run.lease.name
            headers.update(hit_headers(run.hit))
            yield run

    if not (streams if body.stream is None else body.stream):
        async with running() as run:
            await run.finish()
            return JSONResponse(writer.whole(run), headers=headers)
    state_line = (lambda state: writer.progress(load_progress(state))) if body.progress else None
    lines = held_lines(running, lambda run: _lines(run, writer, body.progress), state_line)
    response = await streamed(lines, writer.error, writer.media_type, writer.alive)
    response.headers.update(headers)
    return response


async def count_tokens(service: Service, model: str, request: AnswerRequest) -> int:
    """The tokens of a request's prompt, including its template's. Raises RemoteError 501 for a remote model."""
    prompt = await service.prompt(await service.model_or_only(model), request)
    return len(known(prompt.tokens, "the number of tokens"))


async def _lines(run: RunningAnswers, writer: Writer, progress: bool) -> AsyncGenerator[bytes, None]:
    for line in [*writer.begin(run), b""]:  # the empty line starts the response
        yield line
    told: dict[int, Progress] = {}  # the last progress of each prompt in prefill
    async with contextlib.aclosing(run.events()) as events:
        async for index, event in events:
            if event.progress and progress:
                told[index] = event.progress
                yield writer.progress(prompt_progress(event.progress))
            elif event.counts.generated and (last := told.pop(index, None)) and last.prefilled < last.total:
                yield writer.progress(prompt_progress(replace(last, queue_position=0, prefilled=last.total)))
            for line in writer.event(run, index, event):
                yield line
    for line in writer.end(run):
        yield line
