"""A sequence of tokens as the page store knows it: its length, its pages, and what it can go on from."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.memory import aligned_zeros

TABLE_STEP = 64
"""Pages that a table has room for at first, and by which it grows at least."""

LOST = -1
"""The state of a sequence whose last page is to be computed again."""


@dataclass
class Sequence:
    """A sequence's length in tokens and where its pages are: table[:ceil(length / 16)], which lies at table_address.

    A page's place is how many places lie between the first page of a layer's head and it: a place is a page of one
    head, or of all layers of a kind where there are several kinds (PageStore.place_bytes). written: how far its last
    page holds values, at least length: more where the sequence was cut, or forked off a longer one. state: the position
    behind the rows that its last page keeps for short convolutions, if that is not full; LOST where its last row was
    written otherwise than it should be.
    """

    length: int = 0
    table: NDArray[np.generic] = field(default_factory=lambda: aligned_zeros((TABLE_STEP,), np.int32))
    written: int = 0
    state: int = 0
    table_address: int = field(init=False)

    def __post_init__(self) -> None:
        self.table_address = self.table.ctypes.data

    @property
    def pages(self) -> int:
        """Pages in use."""
        return -(-self.length // PAGE_TOKENS)
