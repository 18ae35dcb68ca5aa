"""Long work beside the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from localllm.errors import LocalLLMError

Result = TypeVar("Result")


class UnexpectedError(LocalLLMError):
    """A defect, told in place so that it does not cost the conversation. Its cause has the traceback."""


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run work on a thread that does not keep the process alive, and return what it returns.

    Raises the work's LocalLLMError, and UnexpectedError from any other. A task that is cancelled while it waits leaves
    the work to end unheard.
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
            failure = UnexpectedError(f"{type(error).__name__}: {error}. This is a defect in localllm.")
            failure.__cause__ = error
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await outcome
