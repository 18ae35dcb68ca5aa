"""Compares compiled kernels with the Python functions that they are compiled from, on small random data.

A compiler bug for some processor gives wrong results silently. So a kernel enters the cache only if its results on
samples equal those of the interpreter running the same source (see cpu_kernels.declarations).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Act, Op, Stage, Step

THREADS = 2
"""The number of threads that a sample's work is divided among; they run one after the other."""
# The C library's exponential may round differently from Python's; everything else is bit-exact.
_TOLERANCE = 1e-5

_ACT_TYPES = {
    Act.Q32: np.int8,
    Act.Q256: np.int8,
    Act.SCALE32: np.float32,
    Act.SCALE256: np.float32,
    Act.FLOATS: np.float32,
    Act.WORDS: np.int16,
    Act.WORD_UNITS: np.float32,
}

Entry = Callable[[int, int, int, int], None]


class Sample:
    """Arguments of a kernel: small arrays, and the records that point to them.

    Methods that make an array return its address. Afterwards the arrays' contents are compared, except scratch memory.
    """

    def __init__(self, *, rows: int = 1, width: int = 1, seed: int = 0, scratch: int = 1 << 16) -> None:
        self.random = np.random.default_rng(seed)
        self._arrays: list[NDArray[Any]] = []
        self._op, self._step = (aligned_zeros((int(kind.SIZE),), np.int64) for kind in (Op, Step))
        self._arrays += [self._op, self._step]
        self._scratch = aligned_zeros((THREADS * scratch,), np.uint8)
        for stage in Stage:
            self._step[Step.ROWS + stage], self._step[Step.WIDTH + stage] = rows, width
        self.step({Step.SCRATCH: self._scratch.ctypes.data, Step.SCRATCH_STRIDE: scratch})

    def array(self, values: Any, dtype: Any = np.float32) -> int:
        """Address of a copy of some numbers."""
        given = np.asarray(values, dtype)
        copy = aligned_zeros(given.shape, dtype)
        copy[...] = given
        self._arrays.append(copy)
        return copy.ctypes.data

    def zeros(self, count: int, dtype: Any = np.float32) -> int:
        """Address of zeros, for results."""
        return self.array(np.zeros(count), dtype)

    def normal(self, *shape: int) -> int:
        """Address of normally distributed floats."""
        return self.array(self.random.standard_normal(shape))

    def tables(self, places: Any, of_window: Any) -> int:
        """Address of a page table with these places, preceded by that of the window layers' table."""
        before = np.array([self.array(of_window, np.int32)]).view(np.int32)
        return self.array([*before, *places], np.int32) + before.nbytes

    def activations(self, k: int) -> int:
        """Address of descriptors of packed activations for rows of k values: the shared one and each thread's.

        All point to the same arrays.
        """
        room = int(self._step[Step.ROWS] + self._step[Step.WIDTH]) * k
        one = [self.zeros(room, _ACT_TYPES.get(form, np.int32)) for form in Act if form != Act.SIZE]
        return self.array([one] * (1 + THREADS), np.int64)

    def positions(self, first: int, padded: int) -> None:
        """Set positions of the rows, starting at `first`, and a rope table for them with heads of `padded` values."""
        rows = int(self._step[Step.ROWS])
        positions = self.array(range(first, first + rows), np.int32)
        self.step({Step.POSITIONS: positions, Step.ROPE_ROWS: positions})
        self.step({Step.ROPE_TABLES: self.normal(first + rows, padded)})

    def step(self, fields: Mapping[int, int]) -> None:
        """Set fields of the step record."""
        for field, value in fields.items():
            self._step[field] = value

    def arguments(self, *values: int) -> "Sample":
        """Set the operation's arguments; returns the sample."""
        self._op[Op.ARGUMENTS : Op.ARGUMENTS + len(values)] = values
        return self

    def run(self, entry: Entry, threads: int = THREADS) -> None:
        """Run a kernel for each thread in turn."""
        for thread in range(threads):
            entry(self._op.ctypes.data, self._step.ctypes.data, thread, threads)

    def differs(self, compiled: Entry, interpreted: Entry) -> bool:
        """Run both on the same data; return whether their results differ."""
        before = [array.copy() for array in self._arrays]
        after = []
        for entry in (compiled, interpreted):
            for array, values in zip(self._arrays, before, strict=True):
                array[...] = values
            self.run(entry)
            after.append([array.copy() for array in self._arrays])
        return not all(map(_alike, *after))


def _alike(found: NDArray[Any], expected: NDArray[Any]) -> bool:
    if expected.dtype.kind != "f":
        return bool(np.array_equal(found, expected))
    size = float(np.nanmax(np.abs(expected), initial=0.0))
    return bool(np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * size, equal_nan=True))


def differing(samples: Iterable[Sample], compiled: Entry, interpreted: Entry) -> Sequence[int]:
    """Indices of the samples on which a compiled kernel's results differ from its source's."""
    with np.errstate(all="ignore"):
        return [i for i, sample in enumerate(samples) if sample.differs(compiled, interpreted)]
