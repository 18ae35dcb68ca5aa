"""Loads: concurrent, observed, and stopped if no request waits or the server stops."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.errors import OutOfMemoryError
from localllm.library.entry import LibraryModel, Source
from localllm.server.catalog import CatalogEntry
from localllm.server.errors import ApiError
from localllm.server.load_watch import LoadState
from localllm.server.models_manager import ModelManager
from localllm.server.options import ServerOptions
from localllm.settings import Settings
from tests.waiting import PATIENCE_S


class FakeLoader:
    """Loads every requested model, each when the test lets it; `room` models and plans fit at once."""

    def __init__(self, room: int = 9) -> None:
        self.room = room
        self.planned: list[str] = []
        self.begun: dict[str, threading.Event] = {}
        self.let: dict[str, threading.Event] = {}
        self.closed: list[str] = []
        self.together = 0

    def of(self, name: str) -> None:
        self.begun[name], self.let[name] = threading.Event(), threading.Event()

    def describe(self, entry: CatalogEntry) -> dict[str, Any]:
        return {"size": len(entry.name)}

    def plan(self, entry: CatalogEntry, _embeds: bool, beside: Any, coming: Any) -> Any:
        self.planned.append(entry.name)
        if len(beside) + len(coming) >= self.room:
            raise OutOfMemoryError("the sums")
        self.together = max(self.together, 1 + len(coming))
        return SimpleNamespace()

    def load(self, entry: CatalogEntry, _embeds: bool, _placed: Any, progress: Callable[[str, float], None]) -> Any:
        name = entry.name
        progress("loading weights", 0.0)
        self.begun[name].set()
        while not self.let[name].wait(0.005):
            progress("loading weights", 0.5)
        return SimpleNamespace(name=name, close=lambda: self.closed.append(name))


def entry(name: str) -> CatalogEntry:
    return CatalogEntry(name, LibraryModel((name,), Source.PATH, Path(f"/{name}.gguf")))


def played(
    scene: Callable[[ModelManager, FakeLoader], Coroutine[Any, Any, None]], room: int = 9, **options: Any
) -> None:
    """Run a scenario with models a, b and c."""
    loader = FakeLoader(room)
    for name in "abc":
        loader.of(name)

    async def play() -> None:
        manager = ModelManager(ServerOptions(Settings(**options)), loader)
        await scene(manager, loader)
        await manager.close()
        assert not manager.slots() and not manager.coming()

    asyncio.run(asyncio.wait_for(play(), PATIENCE_S))


async def held(manager: ModelManager, name: str, listener: Any = None) -> float:
    async with manager.lease(entry(name), listener=listener) as lease:
        return lease.load_s


async def begun(loader: FakeLoader, name: str) -> None:
    assert await asyncio.to_thread(loader.begun[name].wait, PATIENCE_S)


def test_models_load_side_by_side() -> None:
    async def scene(manager: ModelManager, loader: FakeLoader) -> None:
        waiting = [asyncio.create_task(held(manager, name)) for name in "ab"]
        await begun(loader, "a")
        await begun(loader, "b")
        assert [slot.entry.name for slot in manager.coming()] == ["a", "b"] and loader.together == 2
        loader.let["b"].set()
        await waiting[1]
        assert [slot.entry.name for slot in manager.slots()] == ["b"]
        loader.let["a"].set()
        await waiting[0]

    played(scene)


def test_what_does_not_fit_beside_a_load_waits_for_it_and_takes_the_place_of_the_idle() -> None:
    async def scene(manager: ModelManager, loader: FakeLoader) -> None:
        first = asyncio.create_task(held(manager, "a"))
        await begun(loader, "a")
        second = asyncio.create_task(held(manager, "b"))
        while "b" not in loader.planned:
            await asyncio.sleep(0.001)
        assert not loader.begun["b"].is_set()
        loader.let["a"].set()
        loader.let["b"].set()
        await asyncio.gather(first, second)
        assert loader.closed == ["a"] and [slot.entry.name for slot in manager.slots()] == ["b"]

    played(scene, room=1)


def test_what_fits_nowhere_is_refused_with_the_sums() -> None:
    async def scene(manager: ModelManager, _loader: FakeLoader) -> None:
        with pytest.raises(OutOfMemoryError, match="sums"):
            await held(manager, "a")

    played(scene, room=0)


def test_no_more_models_than_are_allowed() -> None:
    async def scene(manager: ModelManager, loader: FakeLoader) -> None:
        for name in "abc":
            loader.let[name].set()
        await asyncio.gather(*(held(manager, name) for name in "abc"))
        assert len(manager.slots()) == 2 and len(loader.closed) == 1 and loader.together <= 2

    played(scene, max_models=2)


def test_all_who_wait_get_the_one_load_and_hear_of_it() -> None:
    async def scene(manager: ModelManager, loader: FakeLoader) -> None:
        heard: list[LoadState] = []
        waiting = [asyncio.create_task(held(manager, "a", heard.append)) for _ in range(3)]
        await begun(loader, "a")
        while LoadState("loading weights", 0.5) not in heard:
            await asyncio.sleep(0.001)
        assert manager.coming()[0].watch.state.share == 0.5
        waiting[0].cancel()  # the others keep waiting
        await asyncio.sleep(0.02)
        loader.let["a"].set()
        await asyncio.gather(*waiting[1:])
        assert loader.planned == ["a"]

    played(scene)


def test_an_abandoned_load_stops_and_can_be_requested_again() -> None:
    async def scene(manager: ModelManager, loader: FakeLoader) -> None:
        waiting = asyncio.create_task(held(manager, "a"))
        await begun(loader, "a")
        waiting.cancel()
        await asyncio.wait([waiting])
        again = asyncio.create_task(held(manager, "a"))
        while loader.planned != ["a", "a"]:
            await asyncio.sleep(0.001)
        loader.let["a"].set()
        await again

    played(scene)


def test_waiting_clients_get_an_error_when_the_server_stops() -> None:
    async def scene(manager: ModelManager, loader: FakeLoader) -> None:
        loader.let["c"].set()
        await held(manager, "c")
        waiting = [asyncio.create_task(held(manager, "a"))]
        await begun(loader, "a")
        waiting.append(asyncio.create_task(held(manager, "b")))  # waits for room: either of two may be first
        while "b" not in loader.planned:
            await asyncio.sleep(0.001)
        manager.stop_loading()
        for task in waiting:
            with pytest.raises(ApiError, match="shutting down"):
                await task
        with pytest.raises(ApiError, match="shutting down"):
            await held(manager, "b")
        assert loader.closed == []  # loaded models stay until close

    played(scene, room=2)


def test_a_load_that_ends_as_it_is_stopped_leaves_no_model() -> None:
    class Deaf(FakeLoader):
        def load(self, entry: CatalogEntry, embeds: bool, placed: Any, _progress: Any) -> Any:
            return super().load(entry, embeds, placed, lambda _phase, _share: None)

    loader = Deaf()
    loader.of("a")

    async def play() -> None:
        manager = ModelManager(ServerOptions(), loader)
        waiting = asyncio.create_task(held(manager, "a"))
        await begun(loader, "a")
        manager.stop_loading()
        loader.let["a"].set()
        with pytest.raises(ApiError):
            await waiting
        assert loader.closed == ["a"] and not manager.slots()

    asyncio.run(asyncio.wait_for(play(), PATIENCE_S))


def test_a_load_that_ends_as_its_last_request_leaves_can_be_asked_for_again() -> None:
    class Last(FakeLoader):
        """The first request leaves between the end of its load and the event loop's news of it."""

        leaves: Callable[[], object] | None = None

        def load(self, entry: CatalogEntry, embeds: bool, placed: Any, progress: Any) -> Any:
            model = super().load(entry, embeds, placed, progress)
            leave, self.leaves = self.leaves, None
            if leave:
                leave()
            return model

    loader = Last()
    loader.of("a")

    async def play() -> None:
        manager = ModelManager(ServerOptions(), loader)
        waiting = asyncio.create_task(held(manager, "a"))
        await begun(loader, "a")
        loader.leaves = partial(asyncio.get_running_loop().call_soon_threadsafe, waiting.cancel)
        loader.let["a"].set()
        await asyncio.wait([waiting])
        await held(manager, "a")
        await manager.close()

    asyncio.run(asyncio.wait_for(play(), PATIENCE_S))


def test_a_model_that_is_unloaded_leaves_the_memory() -> None:
    class Knotted:
        """Refers to itself, like an engine and its runner."""

        def __init__(self) -> None:
            self.itself = self

        def close(self) -> None:
            """Nothing to free."""

    known: list[weakref.ref[Knotted]] = []

    class Loader(FakeLoader):
        def load(self, *_: Any) -> Any:
            model = Knotted()
            known.append(weakref.ref(model))
            return model

    async def scene(manager: ModelManager, loader: FakeLoader) -> None:
        await held(manager, "a")
        assert known[0]() is not None
        manager.expire(entry("a"))
        while manager.slots():
            await asyncio.sleep(0.001)
        while known[0]() is not None:  # once the manager has finished closing it
            await asyncio.sleep(0.001)

    async def play() -> None:
        loader = Loader()
        manager = ModelManager(ServerOptions(), loader)
        gc.disable()
        try:
            await scene(manager, loader)
        finally:
            gc.enable()
        await manager.close()

    asyncio.run(asyncio.wait_for(play(), PATIENCE_S))
