"""The runner's sequences, and the cells of llama.cpp's KV cache that they hold.

llama.cpp does not report which cells are free, so they are tracked here: one cell holds one position, forked sequences
share cells, and a cell is free when its last sequence releases it. Cell numbers are ours, not llama.cpp's. Rows are
checked for everything that llama.cpp would abort or misbehave on, before anything is changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from gguf_io.image_rows import ImageRows
from gguf_io.runner_info import AdapterSet, RunnerInfo
from gpu_offload.errors import LlamaCppMemoryError


class CellPool:
    """The cells of a cache, `free` of `total` of which no sequence holds."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._sharers = np.zeros(total, dtype=np.int32)
        self._free = np.arange(total, dtype=np.int32)  # the first `free` entries are free cells

    def take(self, count: int) -> NDArray[np.int32]:
        """Return `count` free cells, which from now on one sequence holds. There must be as many."""
        taken = self._free[self.free - count : self.free].copy()
        self._sharers[taken] = 1
        self.free -= count
        return taken

    def share(self, cells: NDArray[np.int32]) -> None:
        """Let one more sequence hold these cells."""
        self._sharers[cells] += 1

    def release(self, cells: NDArray[np.int32]) -> None:
        """Let one sequence fewer hold these cells."""
        self._sharers[cells] -= 1
        released = cells[self._sharers[cells] == 0]
        self._free[self.free : self.free + len(released)] = released
        self.free += len(released)

    def holders(self) -> NDArray[np.int32]:
        """How many sequences hold each cell; `take` begins at the end, so the last cell comes first."""
        return self._sharers[::-1].copy()


@dataclass(slots=True, eq=False)
class StoredCells:
    """A sequence: the adapters that it is computed with, and a cell for each of its rows.

    images: for each image with a grid, which takes fewer positions than rows: its first row, the row after its last,
    and the positions saved so far.
    """

    adapters: AdapterSet = ()
    cells: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    images: tuple[tuple[int, int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.cells)

    def position(self, row: int) -> int:
        """The position of a row, or of the next row to append. Raises ValueError for a row within an image."""
        saved = 0
        for start, stop, so_far in self.images:
            if start < row < stop:
                raise ValueError(f"row {row} is within an image, which cannot be split")
            if stop <= row:
                saved = so_far
        return row - saved

    def up_to(self, length: int) -> "StoredCells":
        """Its first `length` rows."""
        return StoredCells(
            self.adapters, self.cells[:length], tuple(image for image in self.images if image[1] <= length)
        )

    def add_image(self, start: int, image: ImageRows) -> None:
        """Record that the rows from `start` on are an image's."""
        if image.grid is not None:
            saved = start - self.position(start) + len(image.ids) - image.grid.count
            self.images += ((start, start + len(image.ids), saved),)


def check_room(count: int, pool: CellPool) -> None:
    """Raise LlamaCppMemoryError unless `count` cells are free."""
    if count > pool.free:
        raise LlamaCppMemoryError(
            f"{count} tokens do not fit: {pool.free} of {pool.total} cells of the KV cache are free."
        )


def check_tokens(tokens: Sequence[int], rows: int, info: RunnerInfo) -> None:
    """Raise ValueError unless these are tokens for so many rows."""
    if len(tokens) != rows:
        raise ValueError(f"{len(tokens)} tokens for {rows} rows")
    if min(tokens) < 0 or max(tokens) >= info.vocab_size:
        raise ValueError(f"token ids {min(tokens)}..{max(tokens)} are outside 0..{info.vocab_size - 1}")


def check_rows(
    positions: Sequence[int],
    sequences: Sequence[int],
    outputs: Sequence[int],
    info: RunnerInfo,
    alive: Mapping[int, StoredCells],
    pool: CellPool,
) -> dict[int, int]:
    """Return the number of new rows of each sequence.

    Raises ValueError, or LlamaCppMemoryError if cells run out. Plain Python, because decoding has few rows, for which
    arrays would take ten times as long.
    """
    count = len(positions)
    if not 1 <= count <= info.max_rows:
        raise ValueError(f"{count} rows, outside 1..{info.max_rows}")
    wanted = [-1, *outputs, count]
    if any(row >= following for row, following in pairwise(wanted)):
        raise ValueError(f"wanted rows must ascend within 0..{count - 1}")
    appended: dict[int, int] = {}
    first = 0
    for sequence, group in groupby(sequences):
        length = len(list(group))
        if (cells := alive.get(sequence)) is None:
            raise ValueError(f"there is no sequence {sequence}")
        if sequence in appended:
            raise ValueError(f"the rows of sequence {sequence} are not contiguous")
        stored = len(cells)
        start = cells.position(stored)
        if list(positions[first : first + length]) != list(range(start, start + length)):
            raise ValueError(f"the positions of sequence {sequence} do not continue at {start}")
        if stored + length > info.max_context:
            raise ValueError(f"sequence {sequence} would grow beyond the model's {info.max_context} positions")
        appended[sequence] = length
        first += length
    check_room(count, pool)
    return appended
