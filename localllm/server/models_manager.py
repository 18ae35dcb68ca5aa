"""Which models are in memory: loaded when asked for, kept for a while, unloaded when others need the room.

Everything here runs on the event loop, except that models load and close on other threads.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from anyio import to_thread

from gpu_offload.errors import LlamaCppMemoryError
from localllm.engine.loaded_model import LoadedModel
from localllm.errors import LocalLLMError, OutOfMemoryError
from localllm.server.catalog import CatalogEntry
from localllm.server.embedding_model import EmbeddingModel
from localllm.server.errors import ApiError
from localllm.server.options import FOREVER, ServerOptions

log = logging.getLogger(__name__)

Model = LoadedModel | EmbeddingModel

# A file may be loaded with more than one chat template or set of adapters, and once more for embeddings.
Key = tuple[Path, str | None, str, bool]


class Loader(Protocol):
    """Loads a model beside others. Blocks; raises OutOfMemoryError where those others leave too little room."""

    def __call__(self, entry: CatalogEntry, embeds: bool, beside: list[Model]) -> Model: ...


@dataclass(eq=False, slots=True)
class Slot:
    """A model that is loading, loaded or being closed. users are requests that hold it."""

    entry: CatalogEntry
    embeds: bool
    keep_alive_s: float
    model: Model | None = None
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)
    loading: "asyncio.Task[Model] | None" = None
    closing: "asyncio.Task[None] | None" = None
    timer: asyncio.TimerHandle | None = None

    @property
    def seconds_left(self) -> float:
        """Until the model is unloaded, if nobody asks for it."""
        return self.last_used + self.keep_alive_s - time.monotonic() if not self.users else self.keep_alive_s


@dataclass(frozen=True, slots=True)
class Lease:
    """A model that stays loaded while it is held. load_s is how long its user waited for it."""

    slot: Slot
    model: Model
    load_s: float


class ModelManager:
    """Several models at once, least recently used out first."""

    def __init__(self, options: ServerOptions, load: Loader) -> None:
        self._options = options
        self._load_model = load
        self._slots: dict[Key, Slot] = {}
        self._one_load = asyncio.Lock()
        self._released = asyncio.Event()
        self._closed = False

    def slots(self) -> list[Slot]:
        """What is loaded now."""
        return [slot for slot in self._slots.values() if slot.model]

    @contextlib.asynccontextmanager
    async def lease(
        self, entry: CatalogEntry, keep_alive_s: float | None = None, *, embeds: bool = False
    ) -> AsyncIterator[Lease]:
        """Hold a model, loading it first where needed. keep_alive_s counts from the end; None is the default.

        Raises ModelFileError and its kin, OutOfMemoryError where it cannot fit even alone, ApiError on shutdown.
        """
        began = time.monotonic()
        slot = await self._slot(entry, embeds)
        slot.users += 1
        slot.keep_alive_s = self._options.keep_alive_s if keep_alive_s is None else keep_alive_s
        if slot.timer:
            slot.timer.cancel()
        try:
            assert slot.loading
            # Shielded: that one client leaves is no reason for the others to wait anew.
            model = await asyncio.shield(slot.loading)
            yield Lease(slot, model, time.monotonic() - began)
        finally:
            slot.users -= 1
            slot.last_used = time.monotonic()
            self._plan_unload(slot)
            self._released.set()

    def expire(self, entry: CatalogEntry) -> None:
        """Unload a model as soon as nobody uses it."""
        for slot in self._slots.values():
            if slot.entry.path == entry.path:
                slot.keep_alive_s = 0.0
                if slot.timer:
                    slot.timer.cancel()
                self._plan_unload(slot)

    def discard(self, slot: Slot) -> None:
        """Stop handing out a model that has broken; the next request loads it anew."""
        slot.keep_alive_s = 0.0
        self._begin_close(slot)

    async def close(self) -> None:
        """Unload everything."""
        self._closed = True
        for slot in list(self._slots.values()):
            if slot.loading:
                await asyncio.wait([slot.loading])
            self._begin_close(slot)
            if slot.closing:
                await asyncio.wait([slot.closing])

    async def _slot(self, entry: CatalogEntry, embeds: bool) -> Slot:
        key = _key(entry, embeds)
        while (slot := self._slots.get(key)) and slot.closing:
            await asyncio.wait([slot.closing])
        if self._closed:
            raise ApiError(503, "the server is shutting down")
        if slot is None:
            slot = self._slots[key] = Slot(entry, embeds, self._options.keep_alive_s)
            slot.loading = asyncio.create_task(self._load(key, slot))
            slot.loading.add_done_callback(_retrieve)
        return slot

    async def _load(self, key: Key, slot: Slot) -> Model:
        try:
            async with self._one_load:
                slot.model = await self._load_with_room(slot)
        except BaseException:
            del self._slots[key]
            raise
        log.info("loaded %s", slot.entry.name)
        self._plan_unload(slot)
        return slot.model

    async def _load_with_room(self, slot: Slot) -> Model:
        """Load, unloading idle models while there are too many or memory does not suffice; wait for busy ones."""
        while True:
            others = [other.model for other in self.slots() if other.model]
            if len(others) < self._options.max_models:
                try:
                    return await to_thread.run_sync(self._load_model, slot.entry, slot.embeds, others)
                except (OutOfMemoryError, LlamaCppMemoryError):
                    if not others:
                        raise
            await self._unload_one()

    async def _unload_one(self) -> None:
        while self.slots():
            self._released.clear()
            idle = [slot for slot in self.slots() if not slot.users]
            if idle:
                slot = min(idle, key=lambda slot: slot.last_used)
                self._begin_close(slot)
                if slot.closing:
                    await asyncio.wait([slot.closing])
                return
            await self._released.wait()

    def _plan_unload(self, slot: Slot) -> None:
        if slot.users or slot.closing or slot.model is None or slot.keep_alive_s == FOREVER:
            return
        if slot.keep_alive_s <= 0:
            self._begin_close(slot)
        else:
            loop = asyncio.get_running_loop()
            slot.timer = loop.call_later(slot.keep_alive_s, self._begin_close, slot)

    def _begin_close(self, slot: Slot) -> None:
        if slot.closing is None and slot.model is not None:
            slot.closing = asyncio.create_task(self._close_slot(slot, slot.model))

    async def _close_slot(self, slot: Slot, model: Model) -> None:
        if slot.timer:
            slot.timer.cancel()
        try:
            await to_thread.run_sync(model.close)
        except LocalLLMError:
            log.exception("%s could not be closed in good order", slot.entry.name)
        finally:
            del self._slots[_key(slot.entry, slot.embeds)]
            slot.model = None
            self._released.set()
        log.info("unloaded %s", slot.entry.name)


def _key(entry: CatalogEntry, embeds: bool) -> Key:
    if embeds:
        return entry.path, None, "", True
    return entry.path, entry.behaviour.template, str(entry.behaviour.settings.get("lora", "")), False


def _retrieve(task: "asyncio.Task[Model]") -> None:
    """Take note of a failure that all who waited for have left."""
    if not task.cancelled():
        task.exception()
