"""The tokens so far, as an array that grows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """Token ids, oldest first."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._buffer = np.empty(len(tokens) + 256, dtype=np.int64)
        self._buffer[: len(tokens)] = tokens
        self._length = len(tokens)

    def append(self, token_id: int) -> None:
        """Add the newest token."""
        if self._length == self._buffer.size:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self._length] = token_id
        self._length += 1

    def last(self, count: int) -> NDArray[np.int64]:
        """Return a view of the last `count` tokens or of all if there are fewer; -1 means all."""
        start = 0 if count < 0 else max(0, self._length - count)
        return self._buffer[start : self._length]
