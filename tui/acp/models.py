"""The model that answers all sessions: loads one at a time."""

import asyncio
import threading
from collections.abc import Callable

from localllm.background import in_thread
from localllm.errors import RequestError
from tui.backend import Backend, LoadedInfo, LoadStoppedError

POLL_S = 0.05


class SessionLoader:
    """name: of the model that is loaded or loading, "" for none. on_load: called with each model that was loaded."""

    def __init__(self, backend: Backend, on_load: Callable[[str, LoadedInfo], None]) -> None:
        self.backend = backend
        self.name = ""
        self._on_load = on_load
        self._stopped = threading.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self, name: str, pull: bool) -> asyncio.Task[None]:
        """Load a model in the background; the task raises LocalLLMError. pull: whether to download it if missing."""
        self.close()
        self._stopped = threading.Event()
        self._task = asyncio.create_task(self._load(name, pull, self._stopped))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # `loaded` raises it
        return self._task

    async def loaded(self, stop: threading.Event) -> LoadedInfo:
        """Wait for the model. Raises LocalLLMError if there is none, and RequestError once `stop` is set."""
        while self._task and not self._task.done():
            if stop.is_set():
                raise RequestError("Stopped while the model was loading.")
            await asyncio.wait([self._task], timeout=POLL_S)
        info = self.backend.info
        if info is None:
            if self._task:
                self._task.result()
            raise RequestError(
                "No model is chosen. Choose one in the session's settings, or name it: localllm agent MODEL."
            )
        return info

    def close(self) -> None:
        """Abandon the running load."""
        self._stopped.set()

    async def _load(self, name: str, pull: bool, stopped: threading.Event) -> None:
        def progress(_what: str, _share: float) -> None:
            if stopped.is_set():
                raise LoadStoppedError("The load was stopped.")

        before, self.name = self.name, name
        try:
            info = await in_thread(lambda: self.backend.load(name, progress, pull))
        except BaseException:
            self.name = before if self.backend.info else ""
            raise
        self._on_load(name, info)
