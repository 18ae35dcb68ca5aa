"""Answers over HTTP: whole or streamed, and stopped when the client leaves."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from localllm.errors import LocalLLMError
from localllm.server.errors import ClientGoneError
from localllm.server.service import Run

T = TypeVar("T")

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


async def respond(
    request: Request,
    running: contextlib.AbstractAsyncContextManager[Run],
    *,
    whole: Callable[[Run], Awaitable[Any]],
    lines: Callable[[Run], AsyncGenerator[bytes, None]] | None,
    media_type: str,
) -> Response:
    """Answer with a stream of lines, or with one JSON object where lines is None.

    What goes wrong before the first byte raises, so that it gets its own status.
    """
    stack = contextlib.AsyncExitStack()
    try:
        run = await connected(request, stack.enter_async_context(running))
        body = None if lines else await connected(request, _awaited(whole(run)))
    except BaseException:
        await stack.aclose()
        raise
    if lines:
        return ClosingStream(lines(run), stack, media_type)
    await stack.aclose()
    return JSONResponse(body)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


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


def ndjson(value: Any) -> bytes:
    """One line of a stream of JSON objects."""
    return dumps(value) + b"\n"


def sse(value: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + dumps(value) + b"\n\n"


def dumps(value: Any) -> bytes:
    """JSON without blanks, in UTF-8; lone surrogates, which UTF-8 cannot spell, are escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


async def with_errors(
    lines: AsyncIterator[bytes], error_line: Callable[[LocalLLMError], bytes]
) -> AsyncGenerator[bytes, None]:
    """Pass lines on; an error after the first byte becomes a line of its own, the last."""
    try:
        async for line in lines:
            yield line
    except LocalLLMError as error:
        yield error_line(error)
    finally:
        if isinstance(lines, AsyncGenerator):
            await lines.aclose()
