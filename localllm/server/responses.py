"""Answers over HTTP: whole or streamed, and stopped when the client leaves."""

import asyncio
import contextlib
import json
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
RunT = TypeVar("RunT")

# Next line, line separator, paragraph separator; JSON itself asks for escapes of all others.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


async def connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work as long as the client is there; cancel it and raise ClientGoneError otherwise."""
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
    """Lines that tell how far a load is, sent before an answer's own where the answer has to wait for it."""

    def __init__(self, line: Callable[[LoadState], bytes], error_line: Callable[[LocalLLMError], bytes]) -> None:
        self._line = line
        self._error_line = error_line
        self._latest: LoadState | None = None
        self._heard = asyncio.Event()

    def told(self, state: LoadState) -> None:
        """Take note of a state; one that nobody has read yet is forgotten."""
        self._latest = state
        self._heard.set()

    async def come_before(self, entering: "asyncio.Task[Any]") -> bool:
        """Whether there is a state to tell before the task is done."""
        heard = asyncio.create_task(self._heard.wait())
        try:
            await asyncio.wait({heard, entering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            heard.cancel()
        return not entering.done()

    def before(
        self, entering: "asyncio.Task[RunT]", lines: Callable[[RunT], AsyncGenerator[bytes, None]]
    ) -> AsyncGenerator[bytes, None]:
        """The states' lines until the task is done, then those of what it has entered; or the error's."""
        return with_errors(self._before(entering, lines), self._error_line)

    async def _before(
        self, entering: "asyncio.Task[RunT]", lines: Callable[[RunT], AsyncGenerator[bytes, None]]
    ) -> AsyncGenerator[bytes, None]:
        while await self.come_before(entering):
            self._heard.clear()
            if self._latest is not None:
                yield self._line(self._latest)
        async with contextlib.aclosing(lines(entering.result())) as rest:
            async for line in rest:
                yield line


async def respond(
    request: Request,
    running: contextlib.AbstractAsyncContextManager[RunT],
    *,
    whole: Callable[[RunT], Awaitable[Any]],
    lines: Callable[[RunT], AsyncGenerator[bytes, None]] | None,
    media_type: str,
    load_lines: LoadLines | None = None,
) -> Response:
    """Answer with a stream of lines, or with one JSON object where lines is None.

    What goes wrong before the first byte raises, so that it gets its own status. load_lines, which `running` must tell
    of the load, let a stream begin while the model still loads.
    """
    stack, held = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    entering = asyncio.create_task(stack.enter_async_context(running))
    held.push_async_callback(stack.aclose)
    held.push_async_callback(_end, entering)
    try:
        if lines and load_lines:
            load_first = await connected(request, load_lines.come_before(entering))
            if load_first:
                return ClosingStream(load_lines.before(entering, lines), held, media_type)
        run = await connected(request, _awaited(entering))
        body = None if lines else await connected(request, _awaited(whole(run)))
    except BaseException:
        await held.aclose()
        raise
    if lines:
        return ClosingStream(lines(run), held, media_type)
    await held.aclose()
    return JSONResponse(body)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _end(task: "asyncio.Task[Any]") -> None:
    """Cancel a task that nobody waits for any more, and wait until it has noticed."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen, even where nobody asked for it


class ClosingStream(StreamingResponse):
    """A stream that gives back what it holds when it ends, however it ends."""

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
    """What a client is told of an error that should not have happened."""
    return f"{type(error).__name__} in localllm; its log has more"


def ndjson(value: Any) -> bytes:
    """One line of a stream of JSON objects."""
    return dumps(value) + b"\n"


def sse(value: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + dumps(value) + b"\n\n"


def dumps(value: Any) -> bytes:
    """JSON without blanks, in UTF-8 and on one line. Lone surrogates, which UTF-8 cannot spell, are escaped.

    So are the characters that end a line for some: clients that read streams with httpx cut at them.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.translate(_LINE_ENDS).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


async def with_errors(
    lines: AsyncIterator[bytes], error_line: Callable[[LocalLLMError], bytes]
) -> AsyncGenerator[bytes, None]:
    """Pass lines on; an error after the first byte, a defect too, becomes a line of its own, the last."""
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
