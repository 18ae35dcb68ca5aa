"""Which cells of llama.cpp's KV cache are in use, and by how many sequences.

llama.cpp keeps this to itself, so it is counted here beside it: one cell holds one position, sequences made by a fork
share cells, and a cell is free when its last sequence lets it go. Cell numbers are ours and need not be llama.cpp's.
"""

import numpy as np
from numpy.typing import NDArray


class CellBook:
    """The books of a cache of `total` cells. Callers check room and handles first; nothing here can fail half-way."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._sharers = np.zeros(total, dtype=np.int32)
        self._free = np.arange(total, dtype=np.int32)  # the first `free` entries are free cells
        self._cells: dict[int, NDArray[np.int32]] = {}
        self._lengths: dict[int, int] = {}
        self.free = total

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._lengths

    def length(self, sequence: int) -> int:
        """Positions of a sequence. Raises KeyError for an unknown one."""
        return self._lengths[sequence]

    def create(self, sequence: int) -> None:
        """Open an empty sequence."""
        self._cells[sequence] = np.empty(0, dtype=np.int32)
        self._lengths[sequence] = 0

    def append(self, sequence: int, count: int) -> None:
        """Give a sequence `count` more cells; count <= free."""
        length = self._lengths[sequence]
        if length + count > len(self._cells[sequence]):
            grown = np.empty(max(2 * length, length + count, 64), dtype=np.int32)
            grown[:length] = self._cells[sequence][:length]
            self._cells[sequence] = grown
        taken = self._free[self.free - count : self.free]
        self._cells[sequence][length : length + count] = taken
        self._sharers[taken] = 1
        self.free -= count
        self._lengths[sequence] = length + count

    def holders(self) -> NDArray[np.int32]:
        """How many sequences hold each cell; `append` takes from the end, so the last cell comes first."""
        return self._sharers[::-1].copy()

    def share(self, source: int, target: int, length: int) -> None:
        """Let an empty sequence share the first `length` cells of another."""
        self._cells[target] = self._cells[source][:length].copy()
        self._lengths[target] = length
        self._sharers[self._cells[target]] += 1

    def truncate(self, sequence: int, length: int) -> None:
        """Let go of the cells from `length` on."""
        dropped = self._cells[sequence][length : self._lengths[sequence]]
        self._sharers[dropped] -= 1
        released = dropped[self._sharers[dropped] == 0]
        self._free[self.free : self.free + len(released)] = released
        self.free += len(released)
        self._lengths[sequence] = length

    def remove(self, sequence: int) -> None:
        """Close a sequence and let go of its cells."""
        self.truncate(sequence, 0)
        del self._cells[sequence], self._lengths[sequence]
