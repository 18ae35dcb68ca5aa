"""Models in memory: loaded on request, kept for a while, evicted when others need the room.

Everything runs on the event loop, except planning, loading and closing models, which run on other threads.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from anyio import to_thread

from gpu_offload.errors import LlamaCppMemoryError
from localllm.errors import LocalLLMError, OutOfMemoryError
from localllm.placement.loaded_model import release_memory
from localllm.placement.placement import Placement
from localllm.server.catalog import CatalogEntry
from localllm.server.errors import ApiError
from localllm.server.load_watch import LoadListener, LoadWatch
from localllm.server.loading import MemoryLoader, Model
from localllm.server.options import FOREVER, ServerOptions
from localllm.server.served import Lease, ServedRow

log = logging.getLogger(__name__)

# A file may be loaded with more than one chat template or set of adapters, and once more for embeddings.
Key = tuple[Path, str | None, tuple[str, str], bool]

STOPPING = "the server is shutting down"


@dataclass(eq=False, slots=True)
class LoadSlot:
    """A model that waits for room, loads, is loaded (model) or is being closed. users: requests that hold it.

    placed: where it is being loaded. watch: reports and stops the load. about: read before the load, since the file may
    change or disappear afterwards.
    """

    entry: CatalogEntry
    embeds: bool
    keep_alive_s: float
    watch: LoadWatch = field(default_factory=LoadWatch)
    placed: Placement | None = None
    model: Model | None = None
    about: ServedRow | None = None
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)
    loading: "asyncio.Task[Model] | None" = None
    closing: "asyncio.Task[None] | None" = None
    timer: asyncio.TimerHandle | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds until the model is unloaded, unless a request uses it."""
        return self.last_used + self.keep_alive_s - time.monotonic() if not self.users else self.keep_alive_s


class ModelManager:
    """Holds several models and evicts the least recently used. Loads run concurrently where memory allows."""

    def __init__(self, options: ServerOptions, loader: MemoryLoader) -> None:
        self._options = options
        self._loader = loader
        self._slots: dict[Key, LoadSlot] = {}
        self._one_plan = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False

    def slots(self) -> list[LoadSlot]:
        """The models in memory, those that are being closed included."""
        return [slot for slot in self._slots.values() if slot.model]

    def coming(self) -> list[LoadSlot]:
        """The models that are loading or wait for room."""
        return [slot for slot in self._slots.values() if not slot.model]

    @contextlib.asynccontextmanager
    async def lease(
        self,
        entry: CatalogEntry,
        keep_alive_s: float | None = None,
        *,
        embeds: bool = False,
        listener: LoadListener | None = None,
    ) -> AsyncIterator[Lease[Model]]:
        """Hold a model, loading it first if needed. keep_alive_s counts from the lease's end; None is the default.

        listener: called with the load's states. A load that no request waits for is stopped. Raises ModelFileError or
        another file error, OutOfMemoryError if the model does not fit even alone, ApiError on shutdown.
        """
        began = time.monotonic()
        slot = await self._slot(entry, embeds)
        slot.users += 1
        slot.keep_alive_s = self._options.keep_alive_s if keep_alive_s is None else keep_alive_s
        if slot.timer:
            slot.timer.cancel()
        try:
            assert slot.loading
            # Shielded: a client that leaves must not cancel the load for the others.
            with slot.watch.listening(listener):
                model = await asyncio.shield(slot.loading)
            yield Lease(entry.name, model, time.monotonic() - began, partial(self._discard, slot))
        finally:
            slot.users -= 1
            slot.last_used = time.monotonic()
            if slot.model is None and not slot.users:
                self._stop_load(slot, f"no request waits for {entry.name} any more")
            self._plan_unload(slot)
            self._changed.set()

    def expire(self, entry: CatalogEntry) -> None:
        """Unload a model as soon as no request uses it."""
        for slot in self._slots.values():
            if slot.entry.path == entry.path:
                self._expire(slot)

    def _expire(self, slot: LoadSlot) -> None:
        slot.keep_alive_s = 0.0
        self._plan_unload(slot)

    def _discard(self, slot: LoadSlot) -> None:
        slot.keep_alive_s = 0.0
        self._begin_close(slot)

    def stop_loading(self) -> None:
        """Stop all loads and grant no more leases; waiting requests get an ApiError."""
        self._closed = True
        for slot in self.coming():
            self._stop_load(slot, STOPPING)

    async def close(self) -> None:
        self.stop_loading()
        for slot in list(self._slots.values()):
            if slot.loading:
                await asyncio.wait([slot.loading])
            self._begin_close(slot)
            if slot.closing:
                await asyncio.wait([slot.closing])

    async def _slot(self, entry: CatalogEntry, embeds: bool) -> LoadSlot:
        key = _key(entry, embeds)
        while slot := self._slots.get(key):
            ending = slot.closing or (slot.loading if slot.watch.stopped else None)
            if ending is None:
                break
            await asyncio.wait([ending])
        if self._closed:
            raise ApiError(503, STOPPING)
        if slot is None:
            for replaced in self._slots.values():  # the name has a new manifest, so the old model is unreachable
                if replaced.entry.name == entry.name and replaced.embeds == embeds:
                    self._expire(replaced)
            slot = self._slots[key] = LoadSlot(entry, embeds, self._options.keep_alive_s)
            slot.loading = asyncio.create_task(self._load(key, slot))
            slot.loading.add_done_callback(_retrieve)
        return slot

    async def _load(self, key: Key, slot: LoadSlot) -> Model:
        try:
            slot.about = await to_thread.run_sync(self._loader.describe, slot.entry)
            slot.model = await self._load_with_room(slot)
        except BaseException:
            del self._slots[key]
            raise
        finally:
            slot.placed = None
            self._changed.set()
        log.info("loaded %s", slot.entry.name)
        self._plan_unload(slot)
        return slot.model

    async def _load_with_room(self, slot: LoadSlot) -> Model:
        """Load once there is room: wait for loads in progress, then unload idle models, then wait for busy ones."""
        while True:
            slot.watch.check()
            try:
                if await self._planned(slot):
                    assert slot.placed
                    model = await to_thread.run_sync(
                        self._loader.load, slot.entry, slot.embeds, slot.placed, slot.watch.progress
                    )
                    if slot.watch.stopped:  # after the load's last report
                        await to_thread.run_sync(model.close)
                        slot.watch.check()
                    return model
            except (OutOfMemoryError, LlamaCppMemoryError):
                slot.placed = None
                if not self.slots() and not self._under_way():
                    raise
            await self._make_room(slot)

    async def _planned(self, slot: LoadSlot) -> bool:
        """Plan the slot's memory, one plan at a time. Returns False if there are too many models."""
        async with self._one_plan:
            loaded, coming = self.slots(), self._under_way()
            if len(loaded) + len(coming) >= self._options.settings.max_models:
                return False
            models = [other.model for other in loaded if other.model]
            granted = [other.placed for other in coming if other.placed]
            slot.placed = await to_thread.run_sync(self._loader.plan, slot.entry, slot.embeds, models, granted)
            return True

    def _under_way(self) -> list[LoadSlot]:
        return [slot for slot in self._slots.values() if slot.placed]

    async def _make_room(self, waiting: LoadSlot) -> None:
        """Wait until planning again may succeed, unloading the least recently used idle model."""
        while (self.slots() or self._under_way()) and not waiting.watch.stopped:
            self._changed.clear()
            idle = [slot for slot in self.slots() if not slot.users]
            if idle and not self._under_way():
                slot = min(idle, key=lambda slot: slot.last_used)
                self._begin_close(slot)
                if slot.closing:
                    await asyncio.wait([slot.closing])
                return
            before = self.slots(), self._under_way()
            await self._changed.wait()
            if before != (self.slots(), self._under_way()):
                return

    def _stop_load(self, slot: LoadSlot, why: str) -> None:
        slot.watch.stop(why)
        self._changed.set()

    def _plan_unload(self, slot: LoadSlot) -> None:
        if slot.users or slot.closing or slot.model is None or slot.keep_alive_s == FOREVER:
            return
        if slot.keep_alive_s <= 0:
            self._begin_close(slot)
        else:
            loop = asyncio.get_running_loop()
            slot.timer = loop.call_later(slot.keep_alive_s, self._begin_close, slot)

    def _begin_close(self, slot: LoadSlot) -> None:
        if slot.closing is None and slot.model is not None:
            slot.closing = asyncio.create_task(self._close_slot(slot))

    async def _close_slot(self, slot: LoadSlot) -> None:
        assert slot.model is not None
        if slot.timer:
            slot.timer.cancel()
        try:
            await to_thread.run_sync(slot.model.close)
        except LocalLLMError:
            log.exception("closing %s failed", slot.entry.name)
        finally:
            del self._slots[_key(slot.entry, slot.embeds)]
            slot.model = slot.loading = None
            await to_thread.run_sync(release_memory)  # a separate call: a thread keeps its last result until the next
            self._changed.set()
        log.info("unloaded %s", slot.entry.name)


def _key(entry: CatalogEntry, embeds: bool) -> Key:
    own = entry.behaviour.settings
    if embeds:
        return entry.path, None, (str(own.get("lora", "")), ""), True
    return entry.path, entry.behaviour.template, (str(own.get("lora", "")), str(own.get("mmproj", ""))), False


def _retrieve(task: "asyncio.Task[Model]") -> None:
    """Retrieve a failure. Otherwise asyncio logs it if every waiting request has left."""
    if not task.cancelled():
        task.exception()
