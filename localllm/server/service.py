"""The service behind the routes: the models, the limit on pending requests, and running a request."""

import asyncio
import contextlib
import logging
import math
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Annotated, Any, cast

from anyio import to_thread
from fastapi import Depends, Request

from localllm.answer.event import Answer, AnswerEvent, AnswerStream, Prompt
from localllm.answer.request import AnswerRequest
from localllm.answer.schema_check import is_checked, unmet
from localllm.engine.request import FinishReason
from localllm.errors import EngineStoppedError, LocalLLMError, QueueFullError
from localllm.library.names import BUILT_IN, plain
from localllm.remote.connection import RemoteError
from localllm.server.bodies import IGNORED
from localllm.server.contents import with_few_images
from localllm.server.errors import AdapterNotFoundError, ApiError, ModelNotFoundError
from localllm.server.fallbacks import goes_to_the_next
from localllm.server.keys import CLIENT, namespace_of
from localllm.server.limits import MAX_PREPARING
from localllm.server.load_watch import LoadListener
from localllm.server.metrics import Meter, Metrics
from localllm.server.options import ServerOptions
from localllm.server.remote_models import listed_models
from localllm.server.semantic import Hit, Question, SemanticCache, StoredPrompt
from localllm.server.served import Embedder, Lease, ServedModel, ServedModels, ServedRow
from localllm.server.streams import interruptible

log = logging.getLogger(__name__)

_AVOIDED_S = 30.0  # how long a remote model that failed goes last in its list, since detecting a failure takes time

# RFC 9218, section 4.1: urgency 7 is for background work.
_BACKGROUND = re.compile(r"(?:^|,)\s*u=7\s*(?:,|;|$)")


@dataclass(frozen=True, slots=True)
class RunningAnswers:
    """One or more answers in progress, on a leased model. choices: answers to each request.

    prompts: one for each request. streams, meters, answers: one for each answer; the answers are what `events` has
    read, with several streams perhaps a little more than it has yielded.
    """

    lease: Lease[ServedModel]
    requests: Sequence[AnswerRequest]
    prompts: Sequence[Prompt]
    choices: int
    streams: Sequence[AnswerStream]
    began: float
    meters: Sequence[Meter]
    answers: Sequence[Answer]
    hit: Hit | None = None  # the stored answer that is sent instead

    @property
    def total_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.began

    def prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.choices]

    def events(self) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
        """The events of all answers as they arrive, each with its answer's index. Raises an answer's error."""
        return self._events(0) if len(self.streams) == 1 else self._together()

    async def _together(self) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
        ready: asyncio.Queue[tuple[int, AnswerEvent | Exception]] = asyncio.Queue(maxsize=len(self.streams))

        async def pump(index: int) -> None:
            try:
                async with contextlib.aclosing(self._events(index)) as events:
                    async for event in events:
                        await ready.put(event)
            except Exception as error:  # raised again by the reader below
                await ready.put((index, error))

        pumps = [asyncio.create_task(pump(index)) for index in range(len(self.streams))]
        try:
            left = len(pumps)
            while left:
                index, found = await ready.get()
                if isinstance(found, Exception):
                    raise found
                left -= found.finish_reason is not None
                yield index, found
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def finish(self) -> None:
        """Read all events. Raises an answer's error."""
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass

    async def _events(self, index: int) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
        request, answer = self.requests[index // self.choices], self.answers[index]
        async with contextlib.aclosing(self.streams[index].__aiter__()) as events:
            async for event in events:
                check_ending(event)
                self.meters[index].add(event)
                answer.add(event)
                if event.finish_reason is FinishReason.STOP and is_checked(request):
                    warnings = await interruptible(partial(unmet, request, answer), MAX_PREPARING)
                    if warnings:
                        log.warning("an answer does not fit a JSON Schema that is not enforced in full")
                    event = replace(event, warnings=(*event.warnings, *warnings))  # noqa: PLW2901
                if event.finish_reason is not None:
                    ignored = tuple(f"Ignored: {what}." for what in IGNORED.get() or ())
                    answer.last = replace(event, warnings=(*ignored, *event.warnings))
                yield index, answer.last


def check_ending(event: AnswerEvent) -> None:
    """Raise the error with which an answer ended, or ApiError if it is unknown or the server cancelled the answer."""
    if event.finish_reason is FinishReason.ERROR:
        if isinstance(event.cause, LocalLLMError):
            raise event.cause
        raise ApiError(500, event.error or "the engine stopped without a reason")
    if event.finish_reason is FinishReason.CANCELLED:
        raise ApiError(503, "the generation was cancelled because the model or the server stops")


class Service:
    """A server's models and limits."""

    def __init__(
        self, options: ServerOptions, models: ServedModels, metrics: Metrics, semantic: SemanticCache | None = None
    ) -> None:
        """semantic: None computes every answer."""
        self.options = options
        self._semantic = semantic
        self.models = models
        self._listed = listed_models(options)
        self.metrics = metrics
        self.admitted = Counter[str]()
        self._numbers = count(1)
        self._failed: dict[str, float] = {}  # by name: when a remote model of a list was last unreachable, or failed

    @contextlib.contextmanager
    def admit(self, answers: int = 1) -> Iterator[None]:
        """Count a client's answers that need a model. Raises QueueFullError if too many are pending.

        Each client may have at most as many pending answers as remain free out of 2 * max_queue: a single client gets
        max_queue, two get two thirds of that each, and there is always room for one more client (dynamic thresholds:
        Choudhury and Hahne, 1998).
        """
        client, answers = CLIENT.get(), min(answers, self.options.settings.max_queue)
        left = 2 * self.options.settings.max_queue - self.admitted.total() - answers
        if self.admitted[client] + answers > left:
            raise QueueFullError("server busy, please try again. maximum pending requests exceeded")
        self.admitted[client] += answers
        try:
            yield
        finally:
            self.admitted[client] -= answers
            self.admitted += Counter()  # drops clients that have none

    def choices(self, name: str) -> Sequence[str]:
        """The models that may answer for a name; those that recently failed or missed the SLO come last."""
        since = time.monotonic() - _AVOIDED_S

        def rank(model: str) -> tuple[bool, bool]:
            return self._failed.get(model, -math.inf) > since, self.metrics.is_slow(model)

        return sorted(self.options.models_of(name) or (name,), key=rank)

    async def find(self, name: str) -> tuple[ServedModels, Any]:
        """Find a model by name; see ServedModels.find. For a fallback list, the first of its models that is found.

        Returns the collection that has the model, and its entry there.
        """
        return await to_thread.run_sync(self._find, name)

    def _find(self, name: str) -> tuple[ServedModels, Any]:
        *others, last = self.choices(name)
        for other in others:
            try:
                return self._find_one(other)
            except LocalLLMError as error:
                self.pass_on(other, error)
        return self._find_one(last)

    def _find_one(self, name: str) -> tuple[ServedModels, Any]:
        models = self._listed.get(name, self.models)
        return models, models.find(name)

    def pass_on(self, model: str, error: LocalLLMError) -> None:
        """Note that a model of a list cannot answer. Raises the error if the next model should not be tried."""
        if not goes_to_the_next(error):
            raise error
        if isinstance(error, RemoteError):
            self._failed[model] = time.monotonic()
            log.warning("%s cannot answer, so the next model of its list does: %s", model, error)

    def about(self, name: str) -> ServedRow:
        """A model's row in lists; a fallback list's has the list's name. Blocks. Raises what `find` raises."""
        models, entry = self._find(name)
        about = models.about(entry)
        return replace(about, name=name.removesuffix(":latest")) if self.options.models_of(name) else about

    def listed(self) -> list[tuple[ServedModels, Any, ServedRow]]:
        """All models, and fallback lists, as in `find`, each with its row; without those whose files cannot be read.

        Blocks.
        """
        found = []
        lists = set(map(plain, self.options.fallbacks))
        for entry in self.models.entries():
            if plain(entry.name) in lists:  # a request for that name goes to the list
                continue
            with contextlib.suppress(OSError, LocalLLMError):
                found.append((self.models, entry, self.models.about(entry)))
        for name in self.options.fallbacks:
            with contextlib.suppress(OSError, LocalLLMError):
                models, entry = self._find(name)
                found.append((models, entry, replace(models.about(entry), name=name)))
        return found

    async def rows(self) -> list[tuple[ServedRow, int]]:
        """The rows of `listed`, each with the model's context, and those of the models' adapters."""
        found = [about for *_, about in await to_thread.run_sync(self.listed)]
        rows = []
        for about, context in zip(found, await self.contexts(found), strict=True):
            named = [replace(about, name=f"{about.name}:{one}", parent=about.name) for one in about.adapters]
            rows += [(row, context) for row in (about, *named)]
        return rows

    async def contexts(self, models: Sequence[ServedRow]) -> list[int]:
        """The most tokens of prompt and answer together: those of loaded models, else what a load would ask for.

        0 is unknown.
        """
        loaded = {one.about.name: one.context for one in await self.models.resident()}
        most = self.options.settings.ctx or math.inf
        return [loaded.get(one.name) or (int(min(one.context, most)) if one.context else 0) for one in models]

    async def model_or_only(self, name: str) -> str:
        """The model that a request means; `name` may be empty.

        Without a name, it is the only model in memory, else the only one besides the built-in. A name that no model has
        means the only one besides the built-in, unless the settings say otherwise. Raises ApiError 400 or 404.
        """
        if name in self.models.loaded():
            return name
        if name:
            try:
                await self.find(name)
            except AdapterNotFoundError:
                raise
            except ModelNotFoundError:
                # Not `listed`: a file that cannot be read at this moment must not make another model the only one.
                known = {*await to_thread.run_sync(self.models.names), *self.options.fallbacks} - {BUILT_IN}
                if len(known) != 1 or not self.options.settings.any_name:
                    raise
                return known.pop()
            return name
        resident = [one.about.name for one in await self.models.resident()]
        listed = [about.name for *_, about in await to_thread.run_sync(self.listed)]
        names = resident or [name for name in listed if name != BUILT_IN] or listed
        if len(names) != 1:
            raise ApiError(400, f"model is required, since there are {len(names)} of them; GET /v1/models lists them")
        return names[0]

    @contextlib.asynccontextmanager
    async def lease(
        self, name: str, keep_alive_s: float | None = None, listener: LoadListener | None = None, answers: int = 1
    ) -> AsyncIterator[Lease[ServedModel]]:
        """Hold a generating model by name. listener: called with the load's states. answers: see admit."""
        models, entry = await self.find(name)
        with self.admit(answers):
            async with models.lease(entry, keep_alive_s, listener) as lease:
                yield lease

    @contextlib.asynccontextmanager
    async def lease_embedder(self, name: str, keep_alive_s: float | None = None) -> AsyncIterator[Lease[Embedder]]:
        """Hold an embedding model or reranker by name."""
        models, entry = await self.find(name)
        with self.admit():
            async with models.lease_embedder(entry, keep_alive_s) as lease:
                yield lease

    async def prompt(self, name: str, request: AnswerRequest, keep_alive_s: float | None = None) -> Prompt:
        """A request's prompt, of which nothing is generated. Raises as `run` does."""
        request = with_few_images(request)
        async with self.lease(name, keep_alive_s) as lease:
            return await interruptible(partial(lease.model.prepare, request), MAX_PREPARING)

    @contextlib.asynccontextmanager
    async def run(
        self,
        name: str,
        requests: Sequence[AnswerRequest],
        keep_alive_s: float | None = None,
        *,
        choices: int = 1,
        listener: LoadListener | None = None,
    ) -> AsyncIterator[RunningAnswers]:
        """Load the model, prepare the requests on other threads and submit them; cancel them at the end.

        The engine's queue treats each HTTP request as a client, or each user if users have keys. choices: answers to
        each request. For a fallback list, the first model that can takes the requests. Errors of loading, preparing
        and submitting are raised before any event.
        """
        began = time.monotonic()
        number = f"request {next(self._numbers)}"
        requests = [replace(with_few_images(request), client=request.namespace or number) for request in requests]
        count = len(requests) * choices
        question, hit = await self._known(name, requests) if count == 1 else (None, None)
        if hit is not None:
            prompt, meter = StoredPrompt(hit), self.metrics.meter(hit.stored.model, requests[0].namespace)
            lease: Lease[Any] = Lease(hit.stored.model, None)
            yield RunningAnswers(lease, requests, [prompt], 1, [prompt.submit()], began, [meter], [Answer()], hit)
            return

        @contextlib.asynccontextmanager
        async def begun(model: str) -> AsyncIterator[RunningAnswers]:
            async with self.lease(model, keep_alive_s, listener, count) as lease:
                if count > lease.model.most_choices:
                    raise ApiError(400, f"one request cannot have {count} answers; send several requests")
                prompts = [
                    await interruptible(partial(lease.model.prepare, request), MAX_PREPARING) for request in requests
                ]
                streams = await self._submit(lease, prompts, choices)
                meters = [self.metrics.meter(lease.name, requests[0].namespace) for _ in streams]
                answers = [Answer() for _ in streams]
                try:
                    yield RunningAnswers(lease, requests, prompts, choices, streams, began, meters, answers)
                finally:
                    _cancel(streams)

        *first, last = self.choices(name)
        async with contextlib.AsyncExitStack() as stack:
            for model in first:
                try:
                    run = await stack.enter_async_context(begun(model))
                    break
                except LocalLLMError as error:
                    self.pass_on(model, error)
            else:
                run = await stack.enter_async_context(begun(last))
            yield run
            if question is not None and self._semantic is not None:
                await self._semantic.keep(question, run.lease.name, run.answers[0])

    async def _known(self, name: str, requests: Sequence[AnswerRequest]) -> tuple[Question | None, Hit | None]:
        """The question for the semantic cache, and a stored answer; None where there is none, or the cache fails."""
        semantic = self._semantic
        text = None if semantic is None else semantic.question_of(requests[0])
        if semantic is None or text is None:
            return None, None
        try:
            identity = [plain(name), await self._identity(name), semantic.model, await self._identity(semantic.model)]
            async with self.lease_embedder(semantic.model) as lease:
                embed = partial(lease.model.embed, [text], truncate=True, dimensions=None)
                (row,), _ = await interruptible(embed)
            question, hit = await to_thread.run_sync(semantic.find, requests[0], text, row, " ".join(identity))
        except LocalLLMError as error:
            log.warning("The semantic cache does not answer: %s", error)
            return None, None
        self.metrics.semantic.labels("miss" if hit is None else "hit").inc()
        return question, hit

    async def _identity(self, name: str) -> str:
        """What a model's answers or vectors depend on besides the request."""
        models, entry = await self.find(name)
        return await to_thread.run_sync(models.identity, entry)

    async def _submit(
        self, lease: Lease[ServedModel], prompts: Sequence[Prompt], choices: int
    ) -> Sequence[AnswerStream]:
        """Submit on another thread, since fitting a long prompt takes time; wait until all are accepted.

        If one is refused or the client leaves meanwhile, all are cancelled.
        """
        work = asyncio.ensure_future(to_thread.run_sync(_submit_all, prompts, choices))
        try:
            streams = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_cancel_submitted)
            raise
        except EngineStoppedError:
            lease.discard()
            raise
        try:
            for stream in streams:
                await asyncio.wrap_future(stream.accepted)
        except BaseException:
            _cancel(streams)
            raise
        return streams


def _submit_all(prompts: Sequence[Prompt], choices: int) -> Sequence[AnswerStream]:
    streams: list[AnswerStream] = []
    try:
        for prompt in prompts:
            streams += (prompt.submit(choice) for choice in range(choices))
    except BaseException:
        _cancel(streams)
        raise
    return streams


def _cancel_submitted(work: "asyncio.Future[Sequence[AnswerStream]]") -> None:
    """Cancel the streams that were submitted after the client left."""
    if not work.cancelled() and work.exception() is None:
        _cancel(work.result())


def _cancel(streams: Sequence[AnswerStream]) -> None:
    for stream in streams:
        stream.cancel()


def for_user_of(http: Request, requests: Sequence[AnswerRequest]) -> list[AnswerRequest]:
    """The requests with the cache namespace of the HTTP request's user, and in the background if its headers say so.

    Raises ApiError 403 for a negative priority, which goes before others', on a server with several users.
    """
    namespace = namespace_of(http.scope)
    if namespace and any(request.priority < 0 for request in requests):
        raise ApiError(403, "priority must not be negative on a server with several users")
    background = _BACKGROUND.search(http.headers.get("priority", "")) is not None
    return [replace(request, namespace=namespace, background=background or request.background) for request in requests]


async def service_of(request: Request) -> Service:
    """The application's service. Async, since FastAPI calls other functions on a thread."""
    return cast("Service", request.app.state.service)


ServiceDep = Annotated[Service, Depends(service_of)]
