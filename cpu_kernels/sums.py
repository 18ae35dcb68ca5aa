"""Element-wise sums and products of rows of floats: residual additions, experts' biases and factors, and gates."""

import math
from collections.abc import Iterator

import numpy as np

from cpu_kernels.arguments import Arguments, indices_of
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


class AddRows(Arguments):
    """Arguments of add_rows."""

    x: int  # rows of floats, changed in place
    x_stride: int  # bytes from row to row
    y: int  # rows of floats
    y_stride: int  # bytes from row to row
    count: int  # values of a row
    gates: int = 0  # a float per row, or 0
    gates_stride: int = 0  # bytes from row to row


_ADD = indices_of(AddRows)


@kernel(AddRows, _add_rows_samples)
def add_rows(op: int, step: int, thread: int, threads: int) -> None:
    """x += y, or x += sigmoid(gate of the row) * y."""
    vectors = (argument(op, _ADD.count) + 15) // 16
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(stage_rows(op, step)):
            x = argument(op, _ADD.x) + row * argument(op, _ADD.x_stride)
            y = argument(op, _ADD.y) + row * argument(op, _ADD.y_stride)
            factor = (
                _ONE
                if argument(op, _ADD.gates) == 0
                else _sigmoid(get_f32(argument(op, _ADD.gates) + row * argument(op, _ADD.gates_stride)))
            )
            for v in range(first, last):
                store_f32(x + v * 64, fma(load_f32(y + v * 64), splat_f32(factor), load_f32(x + v * 64)))
        first, last = next_share(op, step, vectors, thread, threads)


def _copy_rows_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.zeros(3 * 48), 192, s.normal(3, 64), 256, 40)


class CopyRows(Arguments):
    """Arguments of copy_rows."""

    x: int  # rows of floats, written
    x_stride: int  # bytes from row to row
    y: int  # rows of floats
    y_stride: int  # bytes from row to row
    count: int  # values of a row


_COPY = indices_of(CopyRows)


@kernel(CopyRows, _copy_rows_samples)
def copy_rows(op: int, step: int, thread: int, threads: int) -> None:
    """x = y."""
    vectors = (argument(op, _COPY.count) + 15) // 16
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(stage_rows(op, step)):
            x = argument(op, _COPY.x) + row * argument(op, _COPY.x_stride)
            y = argument(op, _COPY.y) + row * argument(op, _COPY.y_stride)
            for v in range(first, last):
                store_f32(x + v * 64, load_f32(y + v * 64))
        first, last = next_share(op, step, vectors, thread, threads)


def _scale_and_add_samples() -> Iterator[Sample]:
    for stride in (None, 0, 192):
        s = Sample(rows=3)
        addend = 0 if stride is None else s.normal(3, 48)
        yield s.arguments(s.normal(3, 48), 192, s.normal(3, 48), 192, 40, s.array([0.7]), addend, stride or 0)


class ScaleAndAdd(Arguments):
    """Arguments of scale_and_add."""

    y: int  # rows of floats, written; may be x, or the addend
    y_stride: int  # bytes from row to row
    x: int  # rows of floats
    x_stride: int  # bytes from row to row
    count: int  # values of a row
    factor: int  # address of a float
    addend: int = 0  # rows of floats, or 0
    addend_stride: int = 0  # bytes from row to row; 0 for the same row


_SCALED = indices_of(ScaleAndAdd)


@kernel(ScaleAndAdd, _scale_and_add_samples)
def scale_and_add(op: int, step: int, thread: int, threads: int) -> None:
    """y = x * factor + addend. y may be x, or the addend."""
    vectors, factor = (argument(op, _SCALED.count) + 15) // 16, splat_f32(get_f32(argument(op, _SCALED.factor)))
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(stage_rows(op, step)):
            y = argument(op, _SCALED.y) + row * argument(op, _SCALED.y_stride)
            x = argument(op, _SCALED.x) + row * argument(op, _SCALED.x_stride)
            addend = argument(op, _SCALED.addend) + row * argument(op, _SCALED.addend_stride)
            for i in range(64 * first, 64 * last, 64):
                if argument(op, _SCALED.addend) == 0:
                    store_f32(y + i, mul_f32(load_f32(x + i), factor))
                else:
                    store_f32(y + i, fma(load_f32(x + i), factor, load_f32(addend + i)))
        first, last = next_share(op, step, vectors, thread, threads)


def _scale_by_expert_samples() -> Iterator[Sample]:
    s = Sample(rows=6, width=2)
    yield s.arguments(s.normal(6, 32), 128, s.normal(4), s.array([2, 1, 0, 1, 3, 1, 2], np.int64))


class ScaleByExpert(Arguments):
    """Arguments of scale_by_expert."""

    y: int  # rows of floats, one per slot, changed in place
    stride: int  # bytes from row to row
    factors: int  # a float per expert
    segments: int  # as cpu_kernels.matmul reads them


_FACTOR = indices_of(ScaleByExpert)


@kernel(ScaleByExpert, _scale_by_expert_samples)
def scale_by_expert(op: int, step: int, thread: int, threads: int) -> None:
    """Multiply each slot by its expert's factor."""
    width, stride = stage_width(op, step), argument(op, _FACTOR.stride)
    segments = argument(op, _FACTOR.segments)
    first, last = first_share(op, step, stride // 64, thread, threads)
    while first >= 0:
        for s in range(field(segments, 0)):
            factor = splat_f32(get_f32(argument(op, _FACTOR.factors) + 4 * field(segments, 3 * s + 1)))
            begin = field(segments, 3 * s + 2) * width
            for slot in range(begin, begin + field(segments, 3 * s + 3) * width):
                y = argument(op, _FACTOR.y) + slot * stride
                for i in range(64 * first, 64 * last, 64):
                    store_f32(y + i, mul_f32(load_f32(y + i), factor))
        first, last = next_share(op, step, stride // 64, thread, threads)


def _scale_by_gates_samples() -> Iterator[Sample]:
    for rows, count, size in ((1, 3, 16), (2, 3, 16), (2, 40, 1)):
        s = Sample(rows=rows)
        yield s.arguments(s.normal(rows, count * size), count * size * 4, s.normal(rows, 48), 192, count, size)


class ScaleByGates(Arguments):
    """Arguments of scale_by_gates."""

    x: int  # rows of floats, changed in place
    x_stride: int  # bytes from row to row
    gates: int  # rows of floats
    gates_stride: int  # bytes from row to row
    count: int  # gates of a row
    size: int  # neighbouring values with one gate


_GATES = indices_of(ScaleByGates)


@kernel(ScaleByGates, _scale_by_gates_samples)
def scale_by_gates(op: int, step: int, thread: int, threads: int) -> None:
    """x *= softplus(gate), with one gate for `size` neighbouring values."""
    count, size = argument(op, _GATES.count), argument(op, _GATES.size)
    units = stage_rows(op, step) * count
    first, last = first_share(op, step, units, thread, threads)
    while first >= 0:
        for unit in range(first, last):
            row, gate = unit // count, unit % count
            factor = softplus(get_f32(argument(op, _GATES.gates) + row * argument(op, _GATES.gates_stride) + gate * 4))
            x = argument(op, _GATES.x) + row * argument(op, _GATES.x_stride) + gate * size * 4
            whole = size // 16 * 16
            for i in range(0, whole, 16):
                store_f32(x + i * 4, mul_f32(load_f32(x + i * 4), splat_f32(factor)))
            for i in range(whole, size):
                put_f32(x + i * 4, get_f32(x + i * 4) * factor)
        first, last = next_share(op, step, units, thread, threads)


def _expert_bias_samples() -> Iterator[Sample]:
    s = Sample(rows=6, width=2)
    yield s.arguments(s.normal(6, 32), 128, s.normal(4, 32), s.array([2, 1, 0, 1, 3, 1, 2], np.int64))


class AddExpertBias(Arguments):
    """Arguments of add_expert_bias."""

    y: int  # rows of floats, one per slot, changed in place
    stride: int  # bytes from row to row of y and of the biases
    biases: int  # a row of floats per expert
    segments: int  # as cpu_kernels.matmul reads them


_BIAS = indices_of(AddExpertBias)


@kernel(AddExpertBias, _expert_bias_samples)
def add_expert_bias(op: int, step: int, thread: int, threads: int) -> None:
    """Add each slot's expert's bias to it."""
    width, stride, segments = stage_width(op, step), argument(op, _BIAS.stride), argument(op, _BIAS.segments)
    first, last = first_share(op, step, stride // 64, thread, threads)
    while first >= 0:
        for s in range(field(segments, 0)):
            bias = argument(op, _BIAS.biases) + field(segments, 3 * s + 1) * stride
            begin = field(segments, 3 * s + 2) * width
            for slot in range(begin, begin + field(segments, 3 * s + 3) * width):
                y = argument(op, _BIAS.y) + slot * stride
                for i in range(64 * first, 64 * last, 64):
                    store_f32(y + i, add_f32(load_f32(y + i), load_f32(bias + i)))
        first, last = next_share(op, step, stride // 64, thread, threads)
