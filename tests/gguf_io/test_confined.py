"""Children that work on untrusted data: which of their requests a watcher may end."""

import threading
from typing import Any

import pytest

from gguf_io import confined
from gguf_io.interruption import CHECKPOINT


class Child:
    """A process that notes that it was killed."""

    killed = False

    def kill(self) -> None:
        self.killed = True


def _cancelled() -> None:
    raise RuntimeError("the client has left")


class Passing(threading.Event):
    """A watcher that looks when the time is up finds it unset; it is set right after that, if at all."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self._ends = ends

    def wait(self, _timeout: float | None = None) -> bool:
        if self._ends:
            self.set()
        return False


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("until", "check"), [(0.0, lambda: None), (float("inf"), _cancelled)])
def test_a_watcher_kills_a_process_only_before_its_request_has_ended(ends: bool, until: float, check: Any) -> None:
    """Afterwards the process may answer the next request."""
    child: Any = Child()
    token = CHECKPOINT.set(check)
    try:
        confined._watch(child, until, Passing(ends), threading.Lock())
    finally:
        CHECKPOINT.reset(token)
    assert child.killed is not ends
