"""Cancellation: the caller supplies a check that tells running work its result is no longer needed.

A context variable, so that functions in between need not pass it on; a thread has it if its starter copied the context.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

POLL_S = 0.1  # between two checks whether the work is still wanted

CHECKPOINT: ContextVar[Callable[[], None]] = ContextVar("checkpoint", default=lambda: None)
"""Called regularly by long-running work in this context. An exception from it ends the work."""


def checkpoint() -> None:
    """Raise if the current work has been cancelled."""
    CHECKPOINT.get()()


@contextmanager
def held(lock: "threading.Lock | threading.Semaphore") -> Iterator[None]:
    """Within the block, hold a lock. Waiting for it ends when the work is cancelled."""
    while not lock.acquire(timeout=POLL_S):
        checkpoint()
    try:
        yield
    finally:
        lock.release()
