"""Submitting on another thread, whatever happens meanwhile."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from gguf_io.interruption import checkpoint
from localllm.errors import QueueFullError
from localllm.remote.connection import RemoteError
from localllm.server.errors import ClientGoneError
from localllm.server.keys import CLIENT
from localllm.server.options import ServerOptions
from localllm.server.service import Service
from localllm.server.streams import interruptible
from localllm.settings import Settings
from tests.waiting import PATIENCE_S


class SlowEngine:
    """Submits when the test lets it, the second request never; accepts or refuses its requests."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        self.accepted: Future[None] = Future()
        self.streams: list[Any] = []

    def prompt(self, text: str) -> Any:
        def submit(_choice: int) -> Any:
            self.begun.set()
            assert self.let.wait(PATIENCE_S)
            if text == "one too many":
                raise QueueFullError("full")
            stream = SimpleNamespace(cancelled=threading.Event(), accepted=self.accepted)
            stream.cancel = stream.cancelled.set
            self.streams.append(stream)
            return stream

        return SimpleNamespace(submit=submit)


def submission(engine: SlowEngine, *prompts: str) -> Any:
    nothing: Any = None
    return Service(ServerOptions(), nothing, nothing)._submit(nothing, [engine.prompt(text) for text in prompts], 1)


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


def test_a_refusal_elsewhere_ends_the_others() -> None:
    engine = SlowEngine()
    engine.let.set()
    engine.accepted.set_exception(RemoteError("not today", 429))
    with pytest.raises(RemoteError, match="not today"):
        asyncio.run(submission(engine, "hello", "again"))
    assert all(stream.cancelled.is_set() for stream in engine.streams)
    assert len(engine.streams) == 2


def test_abandoned_work_ends() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            while True:
                checkpoint()
        except ClientGoneError:
            ended.set()
            raise

    async def leave() -> None:
        task = asyncio.create_task(interruptible(work))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)

    asyncio.run(leave())


def test_work_that_is_awaited_is_done() -> None:
    def work() -> int:
        checkpoint()
        return 7

    assert asyncio.run(interruptible(work)) == 7


def queue(max_queue: int) -> Service:
    nothing: Any = None
    return Service(ServerOptions(Settings(max_queue=max_queue)), nothing, nothing)


def fill(service: Service, client: str, stack: contextlib.ExitStack, answers: int = 1) -> int:
    """Send a client's requests until one is refused; returns the number of answers."""
    taken = 0
    CLIENT.set(client)
    with contextlib.suppress(QueueFullError):
        while True:
            stack.enter_context(service.admit(answers))
            taken += answers
    return taken


def test_a_client_alone_has_the_whole_queue_and_leaves_room_for_others() -> None:
    service = queue(512)
    with contextlib.ExitStack() as stack:
        assert fill(service, "first", stack) == 512
        assert fill(service, "second", stack) == 256
        assert fill(service, "third", stack) == 128
        assert fill(service, "first", stack) == 0
    with contextlib.ExitStack() as stack:
        assert fill(service, "first", stack) == 512
    assert not service.admitted


def test_answers_count_and_not_requests() -> None:
    service = queue(512)
    with contextlib.ExitStack() as stack:
        assert fill(service, "first", stack, 8) == 512
    with contextlib.ExitStack() as stack:
        CLIENT.set("large")
        # a single request is always accepted; it takes the client's whole share
        stack.enter_context(service.admit(2048))
        assert fill(service, "large", stack) == 0
        assert fill(service, "other", stack) == 256
