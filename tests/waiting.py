"""Wait for other threads and processes: until a condition holds, never for a time."""

import time
from collections.abc import Callable

# A limit that only a bug reaches on any machine, below the time limit of a test: the message says what was missing.
PATIENCE_S = 240.0


def eventually(condition: Callable[[], object], what: str = "it did not happen") -> None:
    """Return when the condition holds; what: the message if it never does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
