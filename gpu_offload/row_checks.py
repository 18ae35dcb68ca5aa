"""Rows of a run are checked for everything that llama.cpp would abort or misbehave on, before anything is changed."""

from dataclasses import dataclass
from itertools import pairwise

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

    rows: int64[3, count], tokens, positions, sequences. Raises ValueError, or LlamaCppMemoryError without room.
    """
    tokens, positions, sequences = rows
    count = len(tokens)
    if not 1 <= count <= limits.rows:
        raise ValueError(f"{count} rows, outside 1..{limits.rows}")
    if tokens.min() < 0 or tokens.max() >= limits.vocabulary:
        raise ValueError(f"token ids {tokens.min()}..{tokens.max()} are outside 0..{limits.vocabulary - 1}")
    if len(outputs) and (outputs[0] < 0 or outputs[-1] >= count or (np.diff(outputs) <= 0).any()):
        raise ValueError(f"wanted rows must ascend within 0..{count - 1}")
    starts = np.concatenate([[0], np.flatnonzero(np.diff(sequences)) + 1, [count]])
    appended: dict[int, int] = {}
    for first, end in pairwise(starts):
        sequence, length = int(sequences[first]), int(end - first)
        if sequence not in book:
            raise ValueError(f"there is no sequence {sequence}")
        if sequence in appended:
            raise ValueError(f"the rows of sequence {sequence} do not stand together")
        stored = book.length(sequence)
        if (positions[first:end] != np.arange(stored, stored + length)).any():
            raise ValueError(f"the positions of sequence {sequence} do not continue its length, {stored}")
        if stored + length > limits.context:
            raise ValueError(f"sequence {sequence} would grow beyond the model's {limits.context} positions")
        appended[sequence] = length
    check_room(count, book)
    return appended
