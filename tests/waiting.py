"""Waiting for what other threads and processes do: until it is so, never for a time."""

import time
from collections.abc import Callable

# A bound so wide that only a defect meets it, on any machine: kernels may have to be compiled, and others compute too.
PATIENCE_S = 600.0


def eventually(condition: Callable[[], object], what: str = "it did not happen") -> None:
    """Return when the condition holds; what: said where it never does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
