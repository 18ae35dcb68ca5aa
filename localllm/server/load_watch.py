"""Reports a load's progress from its thread to the event loop, and stops loads."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localllm.server.errors import ApiError

# Smaller steps are not reported.
_STEP = 0.01


@dataclass(frozen=True, slots=True)
class LoadState:
    """A load's phase, as shown to users, and the completed share of the phase, 0 to 1."""

    phase: str
    share: float


LoadListener = Callable[[LoadState], None]


class LoadStoppedError(ApiError):
    """A load was stopped: no request waits for it, or the server shuts down."""

    def __init__(self, why: str) -> None:
        super().__init__(503, why)


class LoadWatch:
    """Connects a load with the requests that wait for it.

    For the event loop, except `progress` and `check`, which any thread may call.
    """

    def __init__(self) -> None:
        self.state = LoadState("waiting for room", 0.0)  # the newest
        self._loop = asyncio.get_running_loop()
        self._listeners: list[LoadListener] = []
        self._why: str | None = None
        self._sent = self.state

    @property
    def stopped(self) -> bool:
        """Whether the load was asked to stop."""
        return self._why is not None

    def stop(self, why: str) -> None:
        """Make the load end at its next progress report. Later calls do not change the reason."""
        self._why = self._why or why

    def check(self) -> None:
        """Raise LoadStoppedError if the load was asked to stop."""
        if self._why is not None:
            raise LoadStoppedError(self._why)

    def progress(self, phase: str, share: float) -> None:
        """Report to the event loop. Raises LoadStoppedError, which ends the load."""
        self.check()
        sent = self._sent
        if phase != sent.phase or abs(share - sent.share) >= _STEP:
            self._sent = LoadState(phase, share)
            self._loop.call_soon_threadsafe(self._notify, self._sent)

    @contextlib.contextmanager
    def listening(self, listener: LoadListener | None) -> Iterator[None]:
        """Call the listener with every new state."""
        if listener is None:
            yield
            return
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _notify(self, state: LoadState) -> None:
        self.state = state
        for listener in self._listeners:
            listener(state)
