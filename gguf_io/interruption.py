"""Ending work in the middle: whoever starts it says how it is noticed that nobody wants its result any more.

A context variable, so that what lies between need not hand it on; a thread has it where its starter copied the context.
"""

from collections.abc import Callable
from contextvars import ContextVar

CHECKPOINT: ContextVar[Callable[[], None]] = ContextVar("checkpoint", default=lambda: None)
"""Called now and then by long work in this context. What it raises ends the work."""


def checkpoint() -> None:
    """Raise where the work at hand is to end."""
    CHECKPOINT.get()()
