"""Runs long work on another thread and yields its progress as lines; the work stops when the client leaves."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import Response
from starlette.responses import JSONResponse

from localllm.library.pull import PullProgress, PullStatus
from localllm.server.ollama.wire import error_line
from localllm.server.streams import streamed
from localllm.server.wire import NDJSON, ndjson

Work = Callable[[PullProgress], object]

_AT_ONCE = CapacityLimiter(4)


class _StoppedError(Exception):
    """The client has left."""


async def work_lines(work: Work) -> AsyncGenerator[bytes, None]:
    """Run the work and yield its progress. Once the client has left, the work's next progress report ends it."""
    loop = asyncio.get_running_loop()
    arrived, stopped = asyncio.Event(), threading.Event()
    latest: dict[tuple[str, str | None], PullStatus] = {}

    def note(status: PullStatus) -> None:
        latest[status.status, status.digest] = status
        arrived.set()

    def progress(status: PullStatus) -> None:
        if stopped.is_set():
            raise _StoppedError
        loop.call_soon_threadsafe(note, status)

    def ended(done: "asyncio.Future[object]") -> None:
        arrived.set()
        if not done.cancelled():
            done.exception()  # retrieved, or asyncio logs it

    task = asyncio.ensure_future(to_thread.run_sync(work, progress, limiter=_AT_ONCE))
    task.add_done_callback(ended)
    try:
        while not task.done() or latest:
            await arrived.wait()
            arrived.clear()
            while latest:
                yield ndjson(_status(latest.pop(next(iter(latest)))))
        task.result()
    finally:
        stopped.set()


def _status(status: PullStatus) -> dict[str, Any]:
    if status.digest is None or not status.total:
        return {"status": status.status}
    return {
        "status": status.status,
        "digest": status.digest,
        "total": status.total,
        "completed": status.completed,
    }


async def progress_response(lines: AsyncGenerator[bytes, None], stream: bool | None) -> Response:
    """Respond with lines of progress, or with one success object at the end if stream is false."""
    if stream is not False:
        return await streamed(lines, error_line, NDJSON)
    async with contextlib.aclosing(lines):
        async for _ in lines:
            pass
    return JSONResponse({"status": "success"})
