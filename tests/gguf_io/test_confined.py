"""Children that work on untrusted data: how they start, and which of their requests a watcher may end."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_io import confined
from gguf_io.confined import ChildEndedError, ConfinedChild
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

    def is_set(self) -> bool:
        found = super().is_set()
        if self._ends:
            self.set()
        return found


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


WORKER = """
import os, sys, time
from gguf_io.confined import answer_requests

def main():
    {before}
    answer_requests(lambda kind, data: dict(kind=kind, bytes=len(data)), 1 << 30)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ConfinedChild]:
    """Makes a child whose worker runs a statement before it is confined."""

    def made(before: str) -> ConfinedChild:
        (tmp_path / "worker_of_test.py").write_text(WORKER.format(before=before))
        monkeypatch.syspath_prepend(str(tmp_path))
        return ConfinedChild("worker_of_test", 1 << 30)

    return made


def test_the_time_of_a_request_begins_when_the_child_has_started(worker: Callable[[str], ConfinedChild]) -> None:
    child = worker("time.sleep(3)")
    assert child.ask("text", b"abc", cpu_seconds=5, wall_seconds=2) == {"kind": "text", "bytes": 3}
    child.close()


def test_a_child_that_does_not_start_is_an_error(worker: Callable[[str], ConfinedChild]) -> None:
    with pytest.raises(ChildEndedError, match="ended with status 3 when it started"):
        worker("os._exit(3)").ask("text", b"", cpu_seconds=5, wall_seconds=5)


def test_a_child_that_starts_too_slowly_is_stopped(
    worker: Callable[[str], ConfinedChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "START_SECONDS", 0.1)
    with pytest.raises(ChildEndedError, match=r"had not started after 0\.1 s"):
        worker("time.sleep(60)").ask("text", b"", cpu_seconds=5, wall_seconds=5)
