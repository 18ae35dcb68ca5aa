"""Measures the last step of a program: what its matrix products read and compute, and where its time goes."""

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.arguments import indices_of
from cpu_kernels.formats.table import format_named
from cpu_kernels.matmul import Product
from cpu_kernels.program import Program
from cpu_kernels.records import Form, Op, Stage, Step
from cpu_kernels.threads import ThreadTeam

_PRODUCT = indices_of(Product)

Group = TypeVar("Group")


class OperationKind(StrEnum):
    """Kinds of operations in a profile."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention"
    OTHER = "other operations"


@dataclass(frozen=True, slots=True)
class Products:
    """What a step's matrix products read and compute. A multiply-add counts as two operations.

    weight_bytes: packed weights, each matrix once. int8_operations, float_operations: for matrices whose format
    multiplies quantized and float activations.
    """

    weight_bytes: int = 0
    int8_operations: int = 0
    float_operations: int = 0

    def __add__(self, other: "Products") -> "Products":
        return Products(
            self.weight_bytes + other.weight_bytes,
            self.int8_operations + other.int8_operations,
            self.float_operations + other.float_operations,
        )


class RecordedStep:
    """A program and its latest step record. Valid until the next step; repeating the step changes nothing."""

    def __init__(self, program: Program, team: ThreadTeam, step: NDArray[np.generic]) -> None:
        self._program, self._team, self._step = program, team, step

    @property
    def rows(self) -> int:
        """Rows that the step computes."""
        return int(self._step[Step.ROWS + Stage.ALL])

    @property
    def threads(self) -> int:
        """Threads that compute it."""
        return self._team.threads

    def run(self) -> None:
        """Compute the step again: its compiled part only."""
        self._program.run(self._team, self._step.ctypes.data)

    def products(self) -> tuple[Products, Products]:
        """What the products of a step of one row read and compute: those of every row, and those for its logits.

        Counts only the experts that the row chose. Raises ValueError for a step of several rows.
        """
        if self.rows != 1:
            raise ValueError("only a step of one row tells what a row costs")
        row, logits = row_products(zip(self._program.names, self._program.records.tolist(), strict=True), _chosen)
        return sum(row.values(), Products()), sum(logits.values(), Products())

    def profile(self, clock: Callable[[], float] = time.perf_counter) -> dict[OperationKind, float]:
        """Seconds that each kind of operation takes when the step is computed again, one run of a kind at a time.

        Waiting for the slowest thread counts as part of the operations that were waited for. The cost of starting and
        ending a run is measured with an empty one and subtracted.
        """
        return dict.fromkeys(OperationKind, 0.0) | self._profile(_kind, clock)

    def format_seconds(self, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
        """Like `profile`, for matrix products only, by weight format."""
        seconds = self._profile(lambda name: _format(name) if product_form(name) is not None else "", clock)
        seconds.pop("", None)
        return seconds

    def _profile(self, group: Callable[[str], Group], clock: Callable[[], float]) -> dict[Group, float]:
        seconds: dict[Group, float] = {}
        empty = min(self._timed(0, 0, clock) for _ in range(5))
        first = 0
        for key, names in groupby(self._program.names, key=group):
            count = len(list(names))
            seconds[key] = seconds.get(key, 0.0) + max(0.0, self._timed(first, count, clock) - empty)
            first += count
        return seconds

    def _timed(self, first: int, count: int, clock: Callable[[], float]) -> float:
        began = clock()
        self._program.run(self._team, self._step.ctypes.data, first, count)
        return clock() - began


def row_products(
    operations: Iterable[tuple[str, Sequence[int]]], chosen: Callable[[int], int]
) -> tuple[dict[str, Products], dict[str, Products]]:
    """What the products of one row read and compute, by weight format: those of every row, and those for its logits.

    operations: (kernel name, record) each. chosen: returns the number of experts that the row uses, given the address
    of the table of segments.
    """
    row: dict[str, Products] = {}
    logits: dict[str, Products] = {}
    for name, record in operations:
        if (form := product_form(name)) is not None:
            cost = _product(form, record[Op.ARGUMENTS :], chosen)
            sums, weights = logits if record[Op.STAGE] == Stage.WANTED else row, _format(name)
            sums[weights] = sums.get(weights, Products()) + cost
    return row, logits


@cache
def product_form(kernel: str) -> Form | None:
    """The form of activations that the kernel of this name multiplies; None if it is no matrix product."""
    return format_named(_format(kernel)).form if ".matmul_" in kernel else None


def _chosen(segments: int) -> int:
    """The table of segments begins with their count. With one row, each segment is an expert."""
    return ctypes.c_int64.from_address(segments).value


def _product(form: Form, argument: Sequence[int], chosen: Callable[[int], int]) -> Products:
    """What one operation reads and computes for one row."""
    groups, segments = argument[_PRODUCT.groups], argument[_PRODUCT.segments]
    weight_bytes = groups * argument[_PRODUCT.group_bytes]
    matrices = chosen(segments) if segments else 1
    operations = 2 * matrices * groups * argument[_PRODUCT.group_rows] * argument[_PRODUCT.k]
    if form & Form.FLOATS:
        return Products(matrices * weight_bytes, 0, operations)
    return Products(matrices * weight_bytes, operations, 0)


def _format(kernel: str) -> str:
    """The weight format of a matrix product, from the kernel's name."""
    return kernel.partition(".")[0]


def _kind(name: str) -> OperationKind:
    """The kind of operation, from the kernel's name."""
    if ".matmul_" in name:
        return OperationKind.PRODUCTS
    return OperationKind.ATTENTION if name.startswith("attention") else OperationKind.OTHER
