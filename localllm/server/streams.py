"""Answers over HTTP: whole or streamed, and ended when the client leaves."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from localllm.errors import LocalLLMError
from localllm.server.errors import ApiError, ClientGoneError
from localllm.server.load_watch import LoadState

log = logging.getLogger(__name__)

T = TypeVar("T")
HeldT = TypeVar("HeldT")


async def connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work as long as the client is there; otherwise cancel it and raise ClientGoneError."""
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
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class LoadLines:
    """Lines that report a load, sent before an answer's own where the answer has to wait for it."""

    def __init__(self, line: Callable[[LoadState], bytes], error_line: Callable[[LocalLLMError], bytes]) -> None:
        self._line = line
        self._error_line = error_line
        self._latest: LoadState | None = None
        self._arrived = asyncio.Event()

    def listen(self, state: LoadState) -> None:
        """Take a state; one that was not sent yet is replaced."""
        self._latest = state
        self._arrived.set()

    async def come_before(self, entering: "asyncio.Task[Any]") -> bool:
        """Whether there is a state to send before the task is done."""
        arrived = asyncio.create_task(self._arrived.wait())
        try:
            await asyncio.wait({arrived, entering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()
        return not entering.done()

    def before(
        self, entering: "asyncio.Task[HeldT]", lines: Callable[[HeldT], AsyncGenerator[bytes, None]]
    ) -> AsyncGenerator[bytes, None]:
        """The states' lines until the task is done, then those of what it has entered; or the error's."""
        return with_errors(self._before(entering, lines), self._error_line)

    async def _before(
        self, entering: "asyncio.Task[HeldT]", lines: Callable[[HeldT], AsyncGenerator[bytes, None]]
    ) -> AsyncGenerator[bytes, None]:
        while await self.come_before(entering):
            self._arrived.clear()
            if self._latest is not None:
                yield self._line(self._latest)
        async with contextlib.aclosing(lines(entering.result())) as rest:
            async for line in rest:
                yield line


async def respond(
    request: Request,
    holding: contextlib.AbstractAsyncContextManager[HeldT],
    *,
    whole: Callable[[HeldT], Awaitable[Any]],
    lines: Callable[[HeldT], AsyncGenerator[bytes, None]] | None,
    media_type: str,
    load_lines: LoadLines | None = None,
) -> Response:
    """Answer with a stream of lines, or with one JSON object where lines is None.

    holding: what the answer needs for as long as it takes. What goes wrong before the first byte raises, so that it
    gets its own status. With load_lines, which must listen to the load, a stream begins while the model still loads.
    """
    stack, held = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    entering = asyncio.create_task(stack.enter_async_context(holding))
    held.push_async_callback(stack.aclose)
    held.push_async_callback(_end, entering)
    try:
        if lines and load_lines:
            load_first: bool = await connected(request, load_lines.come_before(entering))
            if load_first:
                return ClosingStream(load_lines.before(entering, lines), held, media_type)
        found = await connected(request, _awaited(entering))
        body = None if lines else await connected(request, _awaited(whole(found)))
    except BaseException:
        await held.aclose()
        raise
    if lines:
        return ClosingStream(lines(found), held, media_type)
    await held.aclose()
    return JSONResponse(body)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _end(task: "asyncio.Task[Any]") -> None:
    """Cancel a task, and wait until it has noticed."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio logs it


class ClosingStream(StreamingResponse):
    """A stream that releases what it holds when it ends, however it ends."""

    def __init__(self, lines: AsyncGenerator[bytes, None], held: contextlib.AsyncExitStack, media_type: str) -> None:
        super().__init__(lines, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self._lines = lines
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._lines.aclose()
            await self._held.aclose()


def defect(error: Exception) -> str:
    """What a client reads of an error that should not have happened."""
    return f"{type(error).__name__} in localllm; its log has more"


async def with_errors(
    lines: AsyncIterator[bytes], error_line: Callable[[LocalLLMError], bytes]
) -> AsyncGenerator[bytes, None]:
    """Pass lines on; an error after the first byte, a defect too, becomes the last line."""
    try:
        async for line in lines:
            yield line
    except LocalLLMError as error:
        yield error_line(error)
    except Exception as error:
        log.exception("a stream ended with %r", error)
        yield error_line(ApiError(500, defect(error)))
    finally:
        if isinstance(lines, AsyncGenerator):
            await lines.aclose()
