"""Cancellation: the caller supplies a check that tells running work its result is no longer needed.

A context variable, so that functions in between need not pass it on; a thread has it if its starter copied the context.
"""

from collections.abc import Callable
from contextvars import ContextVar

CHECKPOINT: ContextVar[Callable[[], None]] = ContextVar("checkpoint", default=lambda: None)
"""Called regularly by long-running work in this context. An exception from it ends the work."""


def checkpoint() -> None:
    """Raise if the current work has been cancelled."""
    CHECKPOINT.get()()
