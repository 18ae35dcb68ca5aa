"""Numbers that stand for addresses in memory which does not exist yet, in programs recorded before it does.

A program is recorded once, from a file's header. Its weights and pages get memory only if it is loaded: then the
numbers in its operations are replaced by addresses.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np

from cpu_kernels.program import ProgramBuilder

_FIRST, _APART = 1 << 62, 1 << 44

Move = tuple[int, int, int]
"""A range of numbers that operations have: the first, the end, and how far it moves."""


def late_places() -> "count[int]":
    """Numbers that stand for addresses, each far enough from the next for memory of any size."""
    return count(_FIRST, _APART)


def settle(builder: ProgramBuilder, moves: Sequence[Move]) -> None:
    """Move the addresses in a builder's operations. Raises RuntimeError for one that stands for no memory yet."""
    records = [record for _, record in builder.operations]
    if not records or not moves:
        return
    starts, ends, distances = np.array(sorted(moves), np.int64).T
    values = np.array(records, np.int64)
    part = np.searchsorted(starts, values, side="right") - 1
    values += np.where((part >= 0) & (values < ends[part]), distances[part], 0)
    if (values >= _FIRST).any():
        raise RuntimeError("an operation reads memory that it was not given")
    for record, settled in zip(records, values.tolist(), strict=True):
        record[:] = settled
