"""Element-wise sums and products of rows of floats: residual additions, experts' biases and factors, and gates."""

import math
from collections.abc import Iterator

import numpy as np

from cpu_kernels.declarations import inner
from cpu_kernels.kernel import kernel
from cpu_kernels.page_states import softplus
from cpu_kernels.records import argument, field, stage_rows, stage_width
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import add_f32, fma, mul_f32
from cpu_kernels.simd.vectors import get_f32, load_f32, put_f32, splat_f32, store_f32

_ONE = np.float32(1.0)


@inner
def _sigmoid(x: np.float32) -> np.float32:
    return np.float32(_ONE / (_ONE + np.float32(math.exp(-x))))


def _add_rows_samples() -> Iterator[Sample]:
    for gated in (False, True):
        s = Sample(rows=3)
        x, y = s.normal(3, 48), s.normal(3, 48)
        yield s.arguments(x, 192, y, 192, 48, s.normal(3, 32) if gated else 0, 128)


@kernel(_add_rows_samples)
def add_rows(op: int, step: int, thread: int, threads: int) -> None:
    """x += y, or x += sigmoid(gate of the row) * y.

    Arguments: 0 x, 1 x stride, 2 y, 3 y stride, 4 values of a row, 5 gates or 0, 6 their stride.
    """
    vectors = (argument(op, 4) + 15) // 16
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(stage_rows(op, step)):
            x, y = argument(op, 0) + row * argument(op, 1), argument(op, 2) + row * argument(op, 3)
            factor = _ONE if argument(op, 5) == 0 else _sigmoid(get_f32(argument(op, 5) + row * argument(op, 6)))
            for v in range(first, last):
                store_f32(x + v * 64, fma(load_f32(y + v * 64), splat_f32(factor), load_f32(x + v * 64)))
        first, last = next_share(op, step, vectors, thread, threads)


def _copy_rows_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.zeros(3 * 48), 192, s.normal(3, 64), 256, 40)


@kernel(_copy_rows_samples)
def copy_rows(op: int, step: int, thread: int, threads: int) -> None:
    """x = y. Arguments: 0 x, 1 x stride, 2 y, 3 y stride, 4 values of a row."""
    vectors = (argument(op, 4) + 15) // 16
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(stage_rows(op, step)):
            x, y = argument(op, 0) + row * argument(op, 1), argument(op, 2) + row * argument(op, 3)
            for v in range(first, last):
                store_f32(x + v * 64, load_f32(y + v * 64))
        first, last = next_share(op, step, vectors, thread, threads)


def _scale_and_add_samples() -> Iterator[Sample]:
    for stride in (None, 0, 192):
        s = Sample(rows=3)
        addend = 0 if stride is None else s.normal(3, 48)
        yield s.arguments(s.normal(3, 48), 192, s.normal(3, 48), 192, 40, s.array([0.7]), addend, stride or 0)


@kernel(_scale_and_add_samples)
def scale_and_add(op: int, step: int, thread: int, threads: int) -> None:
    """y = x * factor + addend. y may be x, or the addend.

    Arguments: 0 y, 1 its stride, 2 x, 3 its stride, 4 values of a row, 5 address of the factor, 6 addend or 0, 7 its
    stride.
    """
    vectors, factor = (argument(op, 4) + 15) // 16, splat_f32(get_f32(argument(op, 5)))
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(stage_rows(op, step)):
            y, x = argument(op, 0) + row * argument(op, 1), argument(op, 2) + row * argument(op, 3)
            addend = argument(op, 6) + row * argument(op, 7)
            for i in range(64 * first, 64 * last, 64):
                if argument(op, 6) == 0:
                    store_f32(y + i, mul_f32(load_f32(x + i), factor))
                else:
                    store_f32(y + i, fma(load_f32(x + i), factor, load_f32(addend + i)))
        first, last = next_share(op, step, vectors, thread, threads)


def _scale_by_expert_samples() -> Iterator[Sample]:
    s = Sample(rows=6, width=2)
    yield s.arguments(s.normal(6, 32), 128, s.normal(4), s.array([2, 1, 0, 1, 3, 1, 2], np.int64))


@kernel(_scale_by_expert_samples)
def scale_by_expert(op: int, step: int, thread: int, threads: int) -> None:
    """Multiply each slot by its expert's factor.

    Arguments: 0 y, 1 stride of its rows, 2 factors, 3 segments, as cpu_kernels.matmul reads them.
    """
    width, stride, segments = stage_width(op, step), argument(op, 1), argument(op, 3)
    first, last = first_share(op, step, stride // 64, thread, threads)
    while first >= 0:
        for s in range(field(segments, 0)):
            factor = splat_f32(get_f32(argument(op, 2) + 4 * field(segments, 3 * s + 1)))
            begin = field(segments, 3 * s + 2) * width
            for slot in range(begin, begin + field(segments, 3 * s + 3) * width):
                y = argument(op, 0) + slot * stride
                for i in range(64 * first, 64 * last, 64):
                    store_f32(y + i, mul_f32(load_f32(y + i), factor))
        first, last = next_share(op, step, stride // 64, thread, threads)


def _scale_by_gates_samples() -> Iterator[Sample]:
    for rows, count, size in ((1, 3, 16), (2, 3, 16), (2, 40, 1)):
        s = Sample(rows=rows)
        yield s.arguments(s.normal(rows, count * size), count * size * 4, s.normal(rows, 48), 192, count, size)


@kernel(_scale_by_gates_samples)
def scale_by_gates(op: int, step: int, thread: int, threads: int) -> None:
    """x *= softplus(gate), with one gate for `size` neighbouring values.

    Arguments: 0 x, 1 x stride, 2 gates, 3 their stride, 4 gates of a row, 5 size.
    """
    count, size = argument(op, 4), argument(op, 5)
    units = stage_rows(op, step) * count
    first, last = first_share(op, step, units, thread, threads)
    while first >= 0:
        for unit in range(first, last):
            row, gate = unit // count, unit % count
            factor = softplus(get_f32(argument(op, 2) + row * argument(op, 3) + gate * 4))
            x = argument(op, 0) + row * argument(op, 1) + gate * size * 4
            whole = size // 16 * 16
            for i in range(0, whole, 16):
                store_f32(x + i * 4, mul_f32(load_f32(x + i * 4), splat_f32(factor)))
            for i in range(whole, size):
                put_f32(x + i * 4, get_f32(x + i * 4) * factor)
        first, last = next_share(op, step, units, thread, threads)


def _expert_bias_samples() -> Iterator[Sample]:
    s = Sample(rows=6, width=2)
    yield s.arguments(s.normal(6, 32), 128, s.normal(4, 32), s.array([2, 1, 0, 1, 3, 1, 2], np.int64))


@kernel(_expert_bias_samples)
def add_expert_bias(op: int, step: int, thread: int, threads: int) -> None:
    """Add each slot's expert's bias to it.

    Arguments: 0 y, 1 stride of its rows and of the biases', 2 biases, 3 segments, as cpu_kernels.matmul reads them.
    """
    width, stride, segments = stage_width(op, step), argument(op, 1), argument(op, 3)
    first, last = first_share(op, step, stride // 64, thread, threads)
    while first >= 0:
        for s in range(field(segments, 0)):
            bias = argument(op, 2) + field(segments, 3 * s + 1) * stride
            begin = field(segments, 3 * s + 2) * width
            for slot in range(begin, begin + field(segments, 3 * s + 3) * width):
                y = argument(op, 0) + slot * stride
                for i in range(64 * first, 64 * last, 64):
                    store_f32(y + i, add_f32(load_f32(y + i), load_f32(bias + i)))
        first, last = next_share(op, step, stride // 64, thread, threads)
