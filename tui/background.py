"""Runs blocking work outside the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from localllm.errors import LocalLLMError

Result = TypeVar("Result")


class UnexpectedError(LocalLLMError):
    """A defect, reported as an error message so that the conversation survives. Its __cause__ has the traceback."""


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run work on a daemon thread and return its result.

    Raises the work's LocalLLMError, and UnexpectedError from any other exception. Cancelling the awaiting task does not
    stop the work; its result is discarded.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: Result | None = None
        failure: LocalLLMError | None = None
        try:
            result = work()
        except LocalLLMError as error:
            failure = error
        except Exception as error:
            failure = UnexpectedError(f"{type(error).__name__}: {error}. This is a bug in localllm.")
            failure.__cause__ = error
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await outcome
