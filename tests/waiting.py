"""Wait for other threads and processes: until a condition holds, never for a time."""

import time
from collections.abc import Callable

# A limit that only a bug reaches, on any machine: kernels may have to be compiled, and other processes compute too.
PATIENCE_S = 600.0


def eventually(condition: Callable[[], object], what: str = "it did not happen") -> None:
    """Return when the condition holds; what: the message if it never does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
