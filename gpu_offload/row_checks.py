"""Rows of a run are checked for everything that llama.cpp would abort or misbehave on, before anything is changed."""

from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from gpu_offload.cells import CellBook
from gpu_offload.errors import LlamaCppMemoryError


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Most rows of a run, tokens of the vocabulary, longest sequence."""

    rows: int
    vocabulary: int
    context: int


def check_room(cells: int, book: CellBook) -> None:
    """Raise LlamaCppMemoryError unless so many cells are free."""
    if cells > book.free:
        raise LlamaCppMemoryError(
            f"{cells} tokens do not fit: {book.free} of {book.total} cells of the KV cache are free."
        )


def check_rows(
    rows: NDArray[np.int64], outputs: NDArray[np.int64], limits: RowLimits, book: CellBook
) -> dict[int, int]:
    """Return the number of new rows of each sequence.

    rows: int64[3, count], tokens, positions, sequences. Raises ValueError, or LlamaCppMemoryError without room. In
    plain Python: of a token's one row, arrays would take ten times as long, and of a prompt's rows it is little.
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
            raise ValueError(f"the rows of sequence {sequence} do not stand together")
        stored = book.length(sequence)
        if positions[first : first + length] != list(range(stored, stored + length)):
            raise ValueError(f"the positions of sequence {sequence} do not continue its length, {stored}")
        if stored + length > limits.context:
            raise ValueError(f"sequence {sequence} would grow beyond the model's {limits.context} positions")
        appended[sequence] = length
        first += length
    check_room(count, book)
    return appended
