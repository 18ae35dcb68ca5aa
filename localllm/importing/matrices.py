"""Stored values as the rows of a new tensor: floats for the rows that are asked for, whichever way they are stored.

A vector is a matrix with one value a row, so that what reorders rows also reorders biases. Matrices are wrapped where a
family stores rows in another order (Rows), transposed (Turned), or other numbers (Mapped, ScaledRows), or lacks some
(Padded).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.importing.checkpoint import StoredTensor
from localllm.importing.errors import CheckpointError
from localllm.text import shortened

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]

_EXACT = {"F32": "F32", "F64": "F32", "F16": "F16"}  # what holds stored values; BF16 otherwise


class Matrix(Protocol):
    """shape: of the values, rows last but one. exact: the GGUF format that they become unless they are quantised."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def exact(self) -> str: ...

    @property
    def factor(self) -> float:
        """What all values of `blocks` have to be multiplied by; `floats` are."""
        ...

    def floats(self, rows: Numbers) -> Floats:
        """Chosen rows, of all but the last dimension taken together: rows x values of a row."""
        ...

    def blocks(self, rows: Numbers) -> NDArray[np.uint8]:
        """The same as blocks of `exact`, where that is a quantised format."""
        ...


def float_type(matrix: Matrix) -> str:
    """The type of floats that a matrix becomes where its blocks are of no use."""
    return matrix.exact if matrix.exact in ("F32", "F16", "BF16") else "F16"


def row_count(shape: tuple[int, ...]) -> int:
    """Rows of a matrix of this shape."""
    return shape[0] if len(shape) == 1 else prod(shape[:-1])


class FloatMatrix:
    """What matrices of floats share: they have no blocks."""

    @property
    def factor(self) -> float:
        return 1.0

    def blocks(self, rows: Numbers) -> NDArray[np.uint8]:
        raise TypeError("a matrix of floats has no blocks")


@dataclass(frozen=True)
class Plain(FloatMatrix):
    """Values as they are stored, times scales where there are any: one, one a row, or one a square of `block`."""

    tensor: StoredTensor
    scale: StoredTensor | None = None
    block: int = 128

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def exact(self) -> str:
        return _EXACT.get(self.tensor.dtype, "BF16")

    def floats(self, rows: Numbers) -> Floats:
        """Raises CheckpointError for scales that do not fit."""
        raw = self.tensor.raw()
        raw = raw.reshape(-1, 1) if len(self.shape) < 2 else raw
        values = self.tensor.floats(raw[rows])
        return values if self.scale is None else values * self._scales(self.scale, rows)

    def _scales(self, scale: StoredTensor, rows: Numbers) -> Floats:
        count, width = row_count(self.shape), self.shape[-1]
        values = scale.floats(scale.raw())
        if values.size == 1:
            return values.reshape(1, 1)
        if values.size == count:
            return np.asarray(values.reshape(-1, 1)[rows], np.float32)
        if values.shape != (-(-count // self.block), -(-width // self.block)):
            raise CheckpointError(f"{scale.path}: {shortened(scale.name)} does not fit its weights.")
        return np.repeat(values[rows // self.block], self.block, axis=1)[:, :width]


@dataclass(frozen=True)
class Rows:
    """Some rows of a matrix, in an order of their own."""

    of: Matrix
    order: Numbers
    shape: tuple[int, ...]

    @property
    def exact(self) -> str:
        return self.of.exact

    @property
    def factor(self) -> float:
        return self.of.factor

    def floats(self, rows: Numbers) -> Floats:
        return self.of.floats(self.order[rows])

    def blocks(self, rows: Numbers) -> NDArray[np.uint8]:
        return self.of.blocks(self.order[rows])


@dataclass(frozen=True)
class Changed(FloatMatrix):
    """A matrix of other numbers, or in another shape, than the one that it is made of."""

    of: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def exact(self) -> str:
        return float_type(self.of)


@dataclass(frozen=True)
class Turned(Changed):
    """A matrix, or each of several, with rows and columns exchanged. One at a time is held as floats."""

    def __post_init__(self) -> None:
        if len(self.of.shape) < 2:
            raise ValueError("a vector has no columns")

    @property
    def shape(self) -> tuple[int, ...]:
        *several, rows, width = self.of.shape
        return (*several, width, rows)

    def floats(self, rows: Numbers) -> Floats:
        height, width = self.shape[-2:]
        out = np.empty((len(rows), width), np.float32)
        for one in np.unique(rows // height):
            chosen = rows // height == one
            out[chosen] = self.of.floats(np.arange(one * width, (one + 1) * width)).T[rows[chosen] % height]
        return out


@dataclass(frozen=True)
class Mapped(Changed):
    """A matrix whose numbers become others."""

    change: Callable[[Floats], Floats]

    def floats(self, rows: Numbers) -> Floats:
        return np.asarray(self.change(self.of.floats(rows)), np.float32)


@dataclass(frozen=True)
class ScaledRows(Changed):
    """A matrix whose rows have a factor each. Raises ValueError for another number of factors.

    Products need more bits than BF16 has.
    """

    factors: Floats

    def __post_init__(self) -> None:
        if len(self.factors) != row_count(self.of.shape):
            raise ValueError("factors of other rows")

    @property
    def exact(self) -> str:
        return "F32" if self.of.exact == "F32" else "F16"

    def floats(self, rows: Numbers) -> Floats:
        return self.of.floats(rows) * self.factors[rows][:, None]


@dataclass(frozen=True)
class Padded(Changed):
    """A matrix with rows of zeros behind its own."""

    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.of.shape[1:])

    def floats(self, rows: Numbers) -> Floats:
        own = rows < self.of.shape[0]
        out = np.zeros((len(rows), self.of.shape[-1]), np.float32)
        out[own] = self.of.floats(rows[own])
        return out


@dataclass(frozen=True)
class Folded(FloatMatrix):
    """A vector as a matrix of its values, row by row; it is held as floats."""

    of: Matrix
    shape: tuple[int, int]

    @property
    def exact(self) -> str:
        return float_type(self.of)

    def floats(self, rows: Numbers) -> Floats:
        return self.of.floats(np.arange(row_count(self.of.shape))).reshape(self.shape)[rows]


def chosen_rows(matrix: Matrix, choose: Callable[[Numbers], Numbers]) -> Rows:
    """Rows of a matrix, or the same ones of each of several. choose: gets the numbers of all rows of one, and keeps
    some, in any order and shape."""
    several = matrix.shape[:-2] if len(matrix.shape) > 2 else ()
    height = matrix.shape[0] if len(matrix.shape) == 1 else matrix.shape[-2]
    order = choose(np.arange(height)).reshape(-1)
    every = (np.arange(prod(several))[:, None] * height + order).reshape(-1)
    return Rows(matrix, every, (*several, len(order), *matrix.shape[len(several) + 1 :]))
