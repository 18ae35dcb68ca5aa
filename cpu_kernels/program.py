"""A recorded forward pass: a table of operations on fixed buffers, run in one compiled call per step."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.arguments import Arguments, integers_of
from cpu_kernels.compile_children import CompileProgress
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel import Kernel, compile_all
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import TILE_WIDTHS, Barrier, Op, Stage, Step
from cpu_kernels.sharing import LINE_BYTES, TURNS
from cpu_kernels.threads import ThreadTeam


class ProgramBuilder:
    """Collects operations in order. Arguments are addresses and sizes; the program keeps the arrays alive."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, list[int]]] = []
        """For each operation the name of its kernel for a single row, and its record, without kernel addresses."""
        self._kernels: list[Mapping[int, Kernel]] = []
        self.kept: list[NDArray[np.generic]] = []
        """Everything that lives as long as the program."""
        self.stage = Stage.ALL
        """Default stage of an operation: which rows it computes."""

    def array(self, values: NDArray[np.generic]) -> int:
        """Copy values into aligned memory that lives as long as the program; return its address."""
        copy = aligned_zeros(values.shape, values.dtype)
        copy[...] = values
        return self.keep(copy)

    def buffer(self, values: int, dtype: type[np.generic] = np.float32) -> int:
        """Address of aligned zeros."""
        return self.keep(aligned_zeros((values,), dtype))

    def scalar(self, value: float) -> int:
        """Address of one float32."""
        return self.array(np.array([value], np.float32))

    def keep(self, array: NDArray[np.generic]) -> int:
        """Keep an array alive with the program; return its address."""
        self.kept.append(array)
        return array.ctypes.data

    @property
    def kernels(self) -> list[Kernel]:
        """The distinct kernels of all operations."""
        found: dict[Kernel, None] = {}
        for kernels in self._kernels:
            found |= dict.fromkeys(kernels.values())
        return list(found)

    def add(
        self,
        kernels: Mapping[int, Kernel] | Kernel,
        arguments: Arguments,
        *,
        barrier: Barrier = Barrier.ALWAYS,
        stage: Stage | None = None,
    ) -> int:
        """Append an operation and return its index.

        kernels: one for all tile widths, or one for each. arguments: of the kernels' class. stage: None for the
        builder's. Raises TypeError for arguments of another kernel, and for one that is no integer.
        """
        if isinstance(kernels, Kernel):
            kernels = dict.fromkeys(TILE_WIDTHS, kernels)
        record = [0] * Op.SIZE
        record[Op.BARRIER], record[Op.STAGE] = int(barrier), int(self.stage if stage is None else stage)
        values = _checked(kernels[1], arguments)
        record[Op.ARGUMENTS : Op.ARGUMENTS + len(values)] = values
        self.operations.append((kernels[1].name, record))
        self._kernels.append(kernels)
        return len(self._kernels) - 1

    def build(self, progress: CompileProgress | None = None) -> "Program":
        """Compile the operations' kernels and return the runnable program. Raises KernelError."""
        compile_all(self.kernels, progress)
        records, names = aligned_zeros((len(self.operations), Op.SIZE), np.int64), []
        for i, (name, record) in enumerate(self.operations):
            for column, width in enumerate(TILE_WIDTHS):
                record[Op.KERNELS + column] = self._kernels[i][width].address
            records[i] = record
            names.append(name)
        return Program(records, names, self.kept)


class Program:
    """Operations with their kernels' addresses. Run it with a step record that describes the rows.

    records: int64[operations, Op.SIZE]. names: of each operation's kernel for a single row.
    """

    def __init__(self, records: NDArray[np.generic], names: Sequence[str], keep: Sequence[NDArray[np.generic]]) -> None:
        self.records = records
        self.names = names
        self._keep = list(keep)
        self._head = aligned_zeros((3,), np.int64)
        self._records_address = records.ctypes.data
        self._address = self._head.ctypes.data
        self._lines = aligned_zeros((0,), np.int64)
        self._turn = 0

    def set_argument(self, operation: int, index: int, value: int) -> None:
        """Change one argument of an operation, e.g. the address of a buffer that grew. index: see indices_of."""
        self.records[operation, Op.ARGUMENTS + index] = value

    def run(self, team: ThreadTeam, step: int, first: int = 0, count: int | None = None) -> None:
        """Run all operations, or `count` from the first on, on the team's threads.

        step: address of int64[Step.SIZE], complete and in bounds.
        """
        size = len(self.records) * team.threads * LINE_BYTES // 8
        self._turn = (self._turn + 1) % TURNS
        if self._turn == 0 or size > len(self._lines):
            self._lines, self._turn = aligned_zeros((size,), np.int64), 1
            distance = team.threads * LINE_BYTES
            self.records[:, Op.LINES] = self._lines.ctypes.data + distance * np.arange(len(self.records))
        count = len(self.records) - first if count is None else count
        self._head[:] = (count, self._records_address + first * self.records.strides[0], self._turn)
        team.run(self._address, step)


def operation_of(kernel: Kernel, arguments: Arguments) -> NDArray[np.generic]:
    """The record of an operation that a thread team runs alone. Raises TypeError, see ProgramBuilder.add."""
    record = aligned_zeros((int(Op.SIZE),), np.int64)
    values = _checked(kernel, arguments)
    record[Op.ARGUMENTS : Op.ARGUMENTS + len(values)] = values
    return record


def choose_width(rows: int) -> int:
    """The tile width with which products of this many rows take the least time.

    The first tile waits for the weights, which the others find in the cache. Of equally fast widths, the one with the
    fewest tiles is taken, then the narrowest.
    """
    if rows <= 1:
        return 1
    reading, *times = POLICY.tile_times
    choices = []
    for width, time in zip(TILE_WIDTHS[1:], times, strict=True):
        tiles = -(-rows // width)
        choices.append((max(reading, time) + (tiles - 1) * time, tiles, width))
    return min(choices)[2]


def set_stage(step: NDArray[np.generic], stage: Stage, rows: int, width: int) -> None:
    """Write a stage's rows and tile width into a step record."""
    step[Step.ROWS + stage] = rows
    step[Step.WIDTH + stage] = width
    step[Step.WIDTH_INDEX + stage] = TILE_WIDTHS.index(width)


def _checked(kernel: Kernel, arguments: Arguments) -> list[int]:
    """The arguments as a record holds them. Raises TypeError for those of another kernel, or one that is no integer."""
    if type(arguments) is not kernel.arguments:
        takes = kernel.arguments.__name__ if kernel.arguments else "no arguments"
        raise TypeError(f"{kernel.name} takes {takes}, not {type(arguments).__name__}")
    return integers_of(arguments)
