"""Runs blocking work outside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
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
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except LocalLLMError as error:
            outcome.set_exception(error)
        except Exception as error:
            failure = UnexpectedError(f"{type(error).__name__}: {error}. This is a bug in localllm.")
            failure.__cause__ = error
            outcome.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
