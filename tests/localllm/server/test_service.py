"""Submitting on another thread, whatever happens meanwhile."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.errors import QueueFullError
from localllm.server.service import Service
from tests.waiting import PATIENCE_S


class SlowEngine:
    """Submits when it is let, the second request never."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        self.streams: list[Any] = []

    def submit(self, request: str) -> Any:
        self.begun.set()
        assert self.let.wait(PATIENCE_S)
        if request == "one too many":
            raise QueueFullError("full")
        stream = SimpleNamespace(cancelled=threading.Event())
        stream.cancel = stream.cancelled.set
        self.streams.append(stream)
        return stream


def submission(engine: SlowEngine, *requests: str) -> Any:
    model: Any = SimpleNamespace(engine=engine)
    prepared: list[Any] = [SimpleNamespace(request=request) for request in requests]
    nothing: Any = None
    lease: Any = SimpleNamespace(model=model)
    return Service(nothing, nothing, nothing, nothing)._submit(lease, prepared)


def test_who_leaves_while_it_is_submitted_leaves_nothing_behind() -> None:
    engine = SlowEngine()

    async def leave() -> None:
        task = asyncio.create_task(submission(engine, "hello"))
        await asyncio.to_thread(engine.begun.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.let.set()
        while not (engine.streams and engine.streams[0].cancelled.is_set()):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), PATIENCE_S))


def test_one_refused_choice_ends_the_others() -> None:
    engine = SlowEngine()
    engine.let.set()
    with pytest.raises(QueueFullError):
        asyncio.run(submission(engine, "hello", "one too many"))
    assert engine.streams[0].cancelled.is_set()
