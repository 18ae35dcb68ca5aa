"""Stored values as the rows of a new tensor: floats for requested rows, however the values are stored.

A vector is a matrix with one value per row, so that code that reorders rows also reorders biases. Wrappers serve
families that store rows in another order (Rows), transposed (Turned), with other values (Mapped, ScaledRows), in
another shape (Folded), or with some missing (Padded).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.text import shortened
from localllm.wings.importing.checkpoint import StoredTensor
from localllm.wings.importing.errors import CheckpointError

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]

_EXACT = {"F32": "F32", "F64": "F32", "F16": "F16"}  # GGUF's type for stored values; BF16 for other dtypes


class CheckpointMatrix(Protocol):
    """shape: of the values, rows second to last. exact: their GGUF format unless they are quantised."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def exact(self) -> str: ...

    @property
    def factor(self) -> float:
        """Multiplier for all values of `blocks`; `floats` includes it."""
        ...

    def floats(self, rows: Numbers) -> Floats:
        """Chosen rows, counted with all dimensions but the last flattened: rows x values of a row."""
        ...

    def blocks(self, rows: Numbers) -> NDArray[np.uint8]:
        """The same rows as blocks of `exact`, if that is a quantised format."""
        ...


def float_type(matrix: CheckpointMatrix) -> str:
    """The float type of a matrix whose blocks cannot be used."""
    return matrix.exact if matrix.exact in ("F32", "F16", "BF16") else "F16"


def row_count(shape: tuple[int, ...]) -> int:
    """Rows of a matrix of this shape."""
    return shape[0] if len(shape) == 1 else prod(shape[:-1])


class FloatMatrix:
    """Base of matrices of floats, which have no blocks."""

    @property
    def factor(self) -> float:
        return 1.0

    def blocks(self, rows: Numbers) -> NDArray[np.uint8]:
        raise TypeError("a matrix of floats has no blocks")


@dataclass(frozen=True)
class Plain(FloatMatrix):
    """Stored values, times scales if there are any: one, one per row, or one per square of `block` x `block`."""

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
        """See CheckpointMatrix. Raises CheckpointError for scales that do not fit."""
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
class MatrixRows:
    """Some rows of a matrix, in a given order."""

    of: CheckpointMatrix
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
    """A matrix with other values or another shape than the one it wraps."""

    of: CheckpointMatrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def exact(self) -> str:
        return float_type(self.of)


@dataclass(frozen=True)
class Turned(Changed):
    """A matrix, or each of several, transposed. One at a time is held as floats."""

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
    """A matrix with a function applied to its values."""

    change: Callable[[Floats], Floats]

    def floats(self, rows: Numbers) -> Floats:
        return np.asarray(self.change(self.of.floats(rows)), np.float32)


@dataclass(frozen=True)
class ScaledRows(Changed):
    """A matrix with each row multiplied by a factor. Raises ValueError unless there is a factor for each row.

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
    """A matrix with rows of zeros appended, up to `count` rows."""

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
    """A vector reshaped to a matrix, row by row; it is held as floats."""

    of: CheckpointMatrix
    shape: tuple[int, int]

    @property
    def exact(self) -> str:
        return float_type(self.of)

    def floats(self, rows: Numbers) -> Floats:
        return self.of.floats(np.arange(row_count(self.of.shape))).reshape(self.shape)[rows]


def chosen_rows(matrix: CheckpointMatrix, choose: Callable[[Numbers], Numbers]) -> MatrixRows:
    """Rows of a matrix, or the same rows of each of several. choose: maps the indices of all rows of one matrix to
    those to keep, in any order and shape."""
    several = matrix.shape[:-2] if len(matrix.shape) > 2 else ()
    height = matrix.shape[0] if len(matrix.shape) == 1 else matrix.shape[-2]
    order = choose(np.arange(height)).reshape(-1)
    every = (np.arange(prod(several))[:, None] * height + order).reshape(-1)
    return MatrixRows(matrix, every, (*several, len(order), *matrix.shape[len(several) + 1 :]))
