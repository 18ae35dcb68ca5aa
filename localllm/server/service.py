"""What routes share: the models, the queue in front of them, and the life of one request."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, cast

from anyio import to_thread
from fastapi import Depends, Request

from localllm.engine.loaded_model import LoadedModel
from localllm.engine.request import GenerationRequest
from localllm.engine.stream import GenerationStream
from localllm.errors import EngineStoppedError, QueueFullError
from localllm.library.behaviour import Behaviour
from localllm.server.answers import Answer, AnswerReader, Piece, Splitter, collect, pieces
from localllm.server.catalog import Catalog, CatalogEntry
from localllm.server.front.catalog import ForeignCatalog, ForeignEntry, ForeignLease
from localllm.server.front.model import ForeignModel, ForeignRequest
from localllm.server.keys import current_namespace
from localllm.server.load_watch import LoadTold
from localllm.server.metrics import Metrics
from localllm.server.models_manager import Lease, ModelManager
from localllm.server.options import ServerOptions


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as a route has translated it, and how its answer is to be split. rendered: a conversation's text."""

    request: GenerationRequest | ForeignRequest
    splitter: Splitter | None = None
    rendered: str = ""


# On another thread, from the model and what its manifest adds.
Prepare = Callable[[LoadedModel | ForeignModel, Behaviour], Sequence[Prepared]]


@dataclass(frozen=True, slots=True)
class Run:
    """One or more generations under way on a model that is held for them."""

    lease: Lease | ForeignLease
    prepared: Sequence[Prepared]
    streams: Sequence[GenerationStream]
    began: float
    metrics: Metrics

    @property
    def model(self) -> LoadedModel | ForeignModel:
        """The model that answers."""
        return cast("LoadedModel | ForeignModel", self.lease.model)

    @property
    def total_s(self) -> float:
        """Seconds since the request came in."""
        return time.monotonic() - self.began

    async def pieces(self, index: int = 0) -> AsyncGenerator[Piece, None]:
        """Read one generation's answer piece by piece."""
        async with contextlib.aclosing(
            pieces(self.streams[index], AnswerReader(self.prepared[index].splitter))
        ) as read:
            async for piece in read:
                if piece.last:
                    self.metrics.observe(piece.last)
                yield piece

    async def all_pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Read all generations' answers, each piece with its generation's index, as they come."""
        ready: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(maxsize=len(self.streams))

        async def pump(index: int) -> None:
            try:
                async for piece in self.pieces(index):
                    await ready.put((index, piece))
            except Exception as error:  # raised again by the reader below
                await ready.put((index, error))

        pumps = [asyncio.create_task(pump(index)) for index in range(len(self.streams))]
        try:
            left = len(pumps)
            while left:
                index, found = await ready.get()
                if isinstance(found, Exception):
                    raise found
                left -= found.last is not None
                yield index, found
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def answers(self) -> list[Answer]:
        """Wait for all generations."""
        found = await asyncio.gather(*map(self._answer, range(len(self.streams))))
        for answer in found:
            self.metrics.observe(answer.last)
        return found

    async def _answer(self, index: int) -> Answer:
        return await collect(self.streams[index], AnswerReader(self.prepared[index].splitter))


class Service:
    """One server's models and limits."""

    def __init__(
        self, options: ServerOptions, catalog: Catalog | ForeignCatalog, manager: ModelManager, metrics: Metrics
    ) -> None:
        self.options = options
        self.catalog = catalog
        self.manager = manager
        self.metrics = metrics
        self._admitted = 0

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request that needs a model. Raises QueueFullError where there are too many already."""
        if self._admitted >= self.options.max_queue:
            raise QueueFullError("server busy, please try again. maximum pending requests exceeded")
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    @contextlib.asynccontextmanager
    async def lease(
        self, name: str, keep_alive_s: float | None = None, *, embeds: bool = False, told: LoadTold | None = None
    ) -> AsyncIterator[Lease | ForeignLease]:
        """Hold a model by name, loaded. told hears how far that is."""
        async with self._lease(await self.find(name), keep_alive_s, embeds=embeds, told=told) as lease:
            yield lease

    def entries(self) -> Sequence[CatalogEntry | ForeignEntry]:
        """All models. Looks into folders, or asks another server: off the event loop."""
        return self.catalog.entries()

    async def find(self, name: str) -> CatalogEntry | ForeignEntry:
        """The model of that name. Raises what Catalog.find raises."""
        return await to_thread.run_sync(self.catalog.find, name)

    async def expire(self, name: str) -> None:
        """Unload a model as soon as nobody uses it. Raises what Catalog.find raises."""
        entry = await self.find(name)
        if isinstance(entry, ForeignEntry):
            entry.forget()
        else:
            self.manager.expire(entry)

    @contextlib.asynccontextmanager
    async def _lease(
        self,
        entry: CatalogEntry | ForeignEntry,
        keep_alive_s: float | None,
        *,
        embeds: bool = False,
        told: LoadTold | None = None,
    ) -> AsyncIterator[Lease | ForeignLease]:
        with self.admit():
            if isinstance(entry, ForeignEntry):
                yield ForeignLease(entry.embedder if embeds else entry.model)
                return
            async with self.manager.lease(entry, keep_alive_s, embeds=embeds, told=told) as lease:
                yield lease

    @contextlib.asynccontextmanager
    async def run(
        self, name: str, keep_alive_s: float | None, prepare: Prepare, told: LoadTold | None = None
    ) -> AsyncIterator[Run]:
        """Load the model, translate the request on another thread, submit it; cancel what is left at the end.

        told hears how far the load is.
        Raises what translating, loading and submitting raise, before anything was answered.
        """
        began = time.monotonic()
        entry = await self.find(name)
        async with self._lease(entry, keep_alive_s, told=told) as lease:
            model = cast("LoadedModel | ForeignModel", lease.model)
            prepared = await to_thread.run_sync(prepare, model, entry.behaviour)
            streams = await self._submit(lease, prepared)
            try:
                yield Run(lease, prepared, streams, began, self.metrics)
            finally:
                for stream in streams:
                    stream.cancel()

    async def _submit(self, lease: Lease | ForeignLease, prepared: Sequence[Prepared]) -> Sequence[GenerationStream]:
        """Submit on another thread: fitting a long prompt takes time. Who leaves meanwhile leaves nothing behind."""
        if isinstance(lease, ForeignLease):
            assert isinstance(lease.model, ForeignModel)
            return await lease.model.submit([cast("ForeignRequest", one.request) for one in prepared])
        model = cast("LoadedModel", lease.model)
        work = asyncio.ensure_future(to_thread.run_sync(_submit_all, model, prepared))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_cancel_all)
            raise
        except EngineStoppedError:
            self.manager.discard(lease.slot)
            raise


def _submit_all(model: LoadedModel, prepared: Sequence[Prepared]) -> Sequence[GenerationStream]:
    streams: list[GenerationStream] = []
    try:
        for one in prepared:
            streams.append(model.engine.submit(_in_namespace(cast("GenerationRequest", one.request))))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


def _in_namespace(request: GenerationRequest) -> GenerationRequest:
    """The request as its user's: in this thread too, the context is that of the HTTP request."""
    namespace = current_namespace()
    return replace(request, namespace=namespace) if namespace else request


def _cancel_all(work: "asyncio.Future[Sequence[GenerationStream]]") -> None:
    """Cancel what was submitted after its reader had left."""
    if not work.cancelled() and work.exception() is None:
        for stream in work.result():
            stream.cancel()


def service_of(request: Request) -> Service:
    """The service that the application was made with."""
    return cast("Service", request.app.state.service)


TheService = Annotated[Service, Depends(service_of)]
