"""The buffers between a program's operations: activations of up to max_rows rows, and their packed forms."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cpu_kernels.memory import aligned_zeros
from cpu_kernels.program import ProgramBuilder
from cpu_kernels.records import TILE_WIDTHS, Act
from models.weights import padded

_TILE_ROOM = max(TILE_WIDTHS)


class Place(Protocol):
    """Rows of floats: the address of the first, and the bytes from one to the next."""

    @property
    def address(self) -> int: ...

    @property
    def stride(self) -> int: ...


@dataclass(frozen=True, slots=True)
class FixedPlace:
    """A place by its numbers. The address may be set later."""

    address: int
    stride: int


class Rows:
    """A float32 buffer of rows x width, rows and width padded for whole tiles and groups: `values`."""

    def __init__(self, builder: ProgramBuilder, rows: int, width: int) -> None:
        self.width = padded(width)
        self.stride = 4 * self.width
        self.values = aligned_zeros((rows + _TILE_ROOM, self.width), np.float32)
        self.address = builder.keep(self.values)


def packed_activations(builder: ProgramBuilder, rows: int, longest: int, threads: int) -> int:
    """Address of descriptors (cpu_kernels.records.Act): one for all threads, then each thread's own for a single row.

    longest: the longest row that is ever packed into them.
    """
    descriptors = aligned_zeros((threads + 1, int(Act.SIZE)), np.int64)
    for index in range(threads + 1):
        tokens = rows + _TILE_ROOM if index == 0 else 1
        values = tokens * padded(longest)
        blocks = values // 32 + _TILE_ROOM
        descriptors[index, Act.Q32] = builder.buffer(values, np.int8)
        descriptors[index, Act.SCALE32] = builder.buffer(blocks)
        descriptors[index, Act.SUM32] = builder.buffer(blocks, np.int32)
        descriptors[index, Act.Q256] = builder.buffer(values, np.int8)
        descriptors[index, Act.SCALE256] = builder.buffer(blocks)
        descriptors[index, Act.PAIRS256] = builder.buffer(blocks, np.int32)
        descriptors[index, Act.SUM16] = builder.buffer(2 * blocks, np.int32)
        descriptors[index, Act.FLOATS] = builder.buffer(values)
    return builder.keep(descriptors)
