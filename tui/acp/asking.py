"""Questions to the editor from the threads in which tools run."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from localllm.actions.action import ToolError

POLL_S = 0.05

T = TypeVar("T")


class EditorQuestions:
    """Made in the thread of the client's event loop, for other threads."""

    def __init__(self, stopping: threading.Event) -> None:
        """stopping: ends what waits for the editor."""
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()

    def ask(self, question: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. Raises what it raises, ToolError if the user stops before."""
        asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        while not asked.done():
            try:
                return asked.result(POLL_S)
            except TimeoutError:
                if not asked.done() and self._stopping.is_set():
                    asked.cancel()
                    raise ToolError("Stopped by the user.") from None
        return asked.result()
