"""HTTP responses, whole or streamed, whose work is cancelled when the client leaves."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from gguf_io.interruption import CHECKPOINT
from localllm.errors import LocalLLMError
from localllm.server import limits
from localllm.server.errors import ApiError, ClientGoneError, message_of, status_of
from localllm.server.keys import CLIENT
from localllm.server.load_watch import LoadListener, LoadState
from localllm.server.refusals import log_refusal

log = logging.getLogger(__name__)

_THREADS: WeakValueDictionary[tuple[str, int], CapacityLimiter] = WeakValueDictionary()  # by client

T = TypeVar("T")
HeldT = TypeVar("HeldT")


async def connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work. If the client leaves first, cancel it and raise ClientGoneError."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            await _end(task)


async def interruptible(work: Callable[[], T], most: int = limits.MAX_THREADS) -> T:
    """Run work on another thread. If the caller is cancelled, its next checkpoint (gguf_io.interruption) ends it.

    most: how many such threads one client has, so that its work does not keep others waiting.
    """
    left = threading.Event()

    def check() -> None:
        if left.is_set():
            raise ClientGoneError

    def run() -> T:
        CHECKPOINT.set(check)  # in this thread's copy of the context
        return work()

    try:
        return await to_thread.run_sync(run, limiter=_threads(CLIENT.get(), most))
    finally:
        left.set()


def _threads(client: str, most: int) -> CapacityLimiter:
    return _THREADS.setdefault((client, most), CapacityLimiter(most))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def streamed(
    lines: AsyncGenerator[bytes, None],
    error_line: Callable[[LocalLLMError], bytes],
    media_type: str,
    alive_line: Callable[[], bytes] | None = None,
) -> Response:
    """Stream lines, skipping empty ones. Errors before the first line set the status; later ones become a line.

    alive_line: makes the line that is sent after KEEP_ALIVE_SECONDS without another line; None sends none.
    """
    first = asyncio.ensure_future(anext(lines, None))
    try:
        await asyncio.wait({first}, timeout=limits.KEEP_ALIVE_SECONDS if alive_line else None)
        if first.done():
            first.result()
    except BaseException:
        await _end(first)
        await lines.aclose()
        raise
    return _LineStream(first, lines, error_line, media_type, alive_line)


async def held_lines(
    holding: Callable[[LoadListener], contextlib.AbstractAsyncContextManager[HeldT]],
    lines: Callable[[HeldT], AsyncIterator[bytes]],
    state_line: Callable[[LoadState], bytes] | None,
) -> AsyncGenerator[bytes, None]:
    """Enter `holding`, such as a lease of a model, and yield the lines made from what it holds.

    state_line: makes a line from each state of the load meanwhile; None sends none.
    """
    latest: list[LoadState] = []
    arrived = asyncio.Event()

    def listen(state: LoadState) -> None:
        latest[:] = [state]
        arrived.set()

    async with contextlib.AsyncExitStack() as stack:
        entering = asyncio.create_task(stack.enter_async_context(holding(listen)))
        entering.add_done_callback(lambda _: arrived.set())
        try:
            while await arrived.wait() and not entering.done():
                arrived.clear()
                if state_line:
                    yield state_line(latest[0])
            held = await entering
        finally:
            await _end(entering)
        async for line in lines(held):
            yield line


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait until it ends."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio logs it


class _LineStream(StreamingResponse):
    """A stream of lines that tells errors and silence, and always closes the lines."""

    def __init__(
        self,
        first: "asyncio.Future[bytes | None]",
        lines: AsyncGenerator[bytes, None],
        error_line: Callable[[LocalLLMError], bytes],
        media_type: str,
        alive_line: Callable[[], bytes] | None,
    ) -> None:
        """first: the first of the lines, which may be still to come; None if there is none."""
        super().__init__(self._told(), media_type=media_type, headers={"Cache-Control": "no-cache"})
        self._first, self._lines = first, lines
        self._error_line, self._alive_line = error_line, alive_line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _end(self._first)
            await self._lines.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send the lines, and an alive_line whenever KEEP_ALIVE_SECONDS pass without a line."""
        if self._alive_line is None:
            await super().stream_response(send)
            return
        clock = asyncio.get_running_loop().time
        spoke = clock()

        async def keep_alive(alive_line: Callable[[], bytes], seconds: float) -> None:
            nonlocal spoke
            while True:
                await asyncio.sleep(spoke + seconds - clock())
                if clock() >= spoke + seconds:
                    spoke = clock()
                    await send({"type": "http.response.body", "body": alive_line(), "more_body": True})

        async def timed(message: Message) -> None:
            nonlocal spoke
            spoke = clock()
            if not message.get("more_body", True):
                await _end(keeper)
            await send(message)

        keeper = asyncio.create_task(keep_alive(self._alive_line, limits.KEEP_ALIVE_SECONDS))
        try:
            await super().stream_response(timed)
        finally:
            await _end(keeper)

    async def _told(self) -> AsyncGenerator[bytes, None]:
        """The lines that are not empty. An error becomes the last line."""
        if self._alive_line and not self._first.done():
            yield self._alive_line()
        try:
            line = await self._first
            while line is not None:
                if line:
                    yield line
                line = await anext(self._lines, None)
        except LocalLLMError as error:
            log_refusal(status_of(error), message_of(error))
            yield self._error_line(error)
        except Exception as error:
            log.exception("a stream ended with %r", error)
            yield self._error_line(ApiError(500, defect(error)))


def defect(error: Exception) -> str:
    """The message for an unexpected exception."""
    return f"{type(error).__name__} in localllm; its log has more"
