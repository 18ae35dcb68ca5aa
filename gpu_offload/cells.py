"""Which cells of llama.cpp's KV cache are in use, and whether rows may be appended.

llama.cpp does not report which cells are free, so they are tracked here: one cell holds one position, forked sequences
share cells, and a cell is free when its last sequence releases it. Cell numbers are ours, not llama.cpp's. Rows are
checked for everything that llama.cpp would abort or misbehave on, before anything is changed.
"""

from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from gpu_offload.errors import LlamaCppMemoryError


class CellBook:
    """Tracks a cache of `total` cells. Callers check free cells and handles first, so that nothing fails half-way."""

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
        """Give a sequence `count` more cells, at most as many as are free."""
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
        """Release the cells from `length` on."""
        dropped = self._cells[sequence][length : self._lengths[sequence]]
        self._sharers[dropped] -= 1
        released = dropped[self._sharers[dropped] == 0]
        self._free[self.free : self.free + len(released)] = released
        self.free += len(released)
        self._lengths[sequence] = length

    def remove(self, sequence: int) -> None:
        """Close a sequence and release its cells."""
        self.truncate(sequence, 0)
        del self._cells[sequence], self._lengths[sequence]


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Maximum rows of a run, vocabulary size, and longest sequence."""

    rows: int
    vocabulary: int
    context: int


def check_room(cells: int, book: CellBook) -> None:
    """Raise LlamaCppMemoryError unless `cells` cells are free."""
    if cells > book.free:
        raise LlamaCppMemoryError(
            f"{cells} tokens do not fit: {book.free} of {book.total} cells of the KV cache are free."
        )


def check_rows(
    rows: NDArray[np.int64], outputs: NDArray[np.int64], limits: RowLimits, book: CellBook
) -> dict[int, int]:
    """Return the number of new rows of each sequence.

    rows: int64[3, count]: tokens, positions, sequences. Raises ValueError, or LlamaCppMemoryError if cells run out.
    Plain Python, because decoding has few rows, for which arrays would take ten times as long.
    """
    tokens, positions, sequences = rows.tolist()
    count = len(tokens)
    if not 1 <= count <= limits.rows:
        raise ValueError(f"{count} rows, outside 1..{limits.rows}")
    if min(tokens) < 0 or max(tokens) >= limits.vocabulary:
        raise ValueError(f"token ids {min(tokens)}..{max(tokens)} are outside 0..{limits.vocabulary - 1}")
    wanted = [-1, *outputs.tolist(), count]
    if any(row >= following for row, following in pairwise(wanted)):
        raise ValueError(f"wanted rows must ascend within 0..{count - 1}")
    appended: dict[int, int] = {}
    first = 0
    for sequence, group in groupby(sequences):
        length = len(list(group))
        if sequence not in book:
            raise ValueError(f"there is no sequence {sequence}")
        if sequence in appended:
            raise ValueError(f"the rows of sequence {sequence} are not contiguous")
        stored = book.length(sequence)
        if positions[first : first + length] != list(range(stored, stored + length)):
            raise ValueError(f"the positions of sequence {sequence} do not continue its length, {stored}")
        if stored + length > limits.context:
            raise ValueError(f"sequence {sequence} would grow beyond the model's {limits.context} positions")
        appended[sequence] = length
        first += length
    check_room(count, book)
    return appended
