"""Norms other than RMSNorm with packing: LayerNorm, and norms of queries and keys that cannot be fused with rotation.

Sums run over sixteen lanes, which are added as a tree at the end, so they are the same on every processor.
"""

import math
from collections.abc import Iterator

import numpy as np

from cpu_kernels.activations import more_rows_to_pack, norm_row, pack_row, rows_to_pack
from cpu_kernels.declarations import inner
from cpu_kernels.kernel import kernel
from cpu_kernels.records import Form, Step, activation, argument, field, scratch, stage_rows, stage_width
from cpu_kernels.rope import rotate_head
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import add_f32, fma, mul_f32, select_first, sub_f32, sum_f32
from cpu_kernels.simd.vectors import get_f32, get_i32, load_f32, splat_f32, store_f32, zero_f32

_ONE = np.float32(1.0)


@inner
def _layer_norm_row(x: int, weight: int, bias: int, k: int, epsilon: np.float32, out: int) -> None:
    """out = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias; x is padded to whole vectors of sixteen."""
    total = zero_f32()
    for i in range(0, k, 16):
        total = add_f32(total, select_first(load_f32(x + i * 4), zero_f32(), k - i))
    mean = splat_f32(sum_f32(total) / np.float32(k))
    squares = zero_f32()
    for i in range(0, k, 16):
        v = select_first(sub_f32(load_f32(x + i * 4), mean), zero_f32(), k - i)
        squares = fma(v, v, squares)
    factor = splat_f32(_ONE / np.float32(math.sqrt(sum_f32(squares) / np.float32(k) + epsilon)))
    for i in range(0, k, 16):
        v = mul_f32(mul_f32(sub_f32(load_f32(x + i * 4), mean), factor), load_f32(weight + i * 4))
        if bias != 0:
            v = add_f32(v, load_f32(bias + i * 4))
        store_f32(out + i * 4, v)


def _layer_norm_samples() -> Iterator[Sample]:
    for k, bias in ((80, True), (64, False)):
        s = Sample(rows=3, width=2)
        x, weight, epsilon = s.normal(3, 96), s.normal(96), s.array([1e-3])
        biases = s.normal(96) if bias else 0
        yield s.arguments(x, 384, weight, k, int(Form.FLOATS), s.activations(96), epsilon, 0, biases)


@kernel(_layer_norm_samples)
def layer_norm_pack(op: int, step: int, thread: int, threads: int) -> None:
    """Normalise rows by mean and variance and pack them.

    Arguments: those of activations.norm_pack, with a weight that is never 0, and 8 bias or 0.
    """
    rows, width, k = stage_rows(op, step), stage_width(op, step), argument(op, 3)
    act = activation(argument(op, 5), 1, rows, thread)
    epsilon = get_f32(argument(op, 6))
    out = scratch(step, thread)
    first, last = rows_to_pack(op, step, thread, threads)
    while first >= 0:
        for row in range(first, last):
            index = get_i32(field(step, Step.WANTED) + 4 * row) if argument(op, 7) != 0 else row
            source = argument(op, 0) + index * argument(op, 1)
            _layer_norm_row(source, argument(op, 2), argument(op, 8), k, epsilon, out)
            pack_row(out, 0, k, k, argument(op, 4), width, row, act)
        first, last = more_rows_to_pack(op, step, thread, threads)


def _norm_groups_samples() -> Iterator[Sample]:
    for size, groups, rows in ((24, 3, 3), (64, 1, 1)):
        s, k = Sample(rows=rows, width=min(rows, 2)), size * groups
        x, weight = s.normal(rows * 96 + 16), s.normal(k + 16)
        yield s.arguments(x, 384, weight, size, groups, int(Form.FLOATS), s.activations(96), s.array([1e-3]))


@inner
def _norm_part(x: int, weight: int, size: int, epsilon: np.float32, out: int) -> None:
    """out = x / sqrt(mean(x^2) + epsilon) * weight for a part of a row, which other parts may follow."""
    squares = zero_f32()
    for i in range(0, size, 16):
        v = select_first(load_f32(x + i * 4), zero_f32(), size - i)
        squares = fma(v, v, squares)
    factor = splat_f32(_ONE / np.float32(math.sqrt(sum_f32(squares) / np.float32(size) + epsilon)))
    for i in range(0, size, 16):
        store_f32(out + i * 4, mul_f32(mul_f32(load_f32(x + i * 4), factor), load_f32(weight + i * 4)))


@kernel(_norm_groups_samples)
def norm_groups_pack(op: int, step: int, thread: int, threads: int) -> None:
    """Normalise each of several equal parts of a row by its root mean square, and pack the row.

    Arguments: 0 x, 1 stride in bytes, 2 weight of all parts, 3 values of a part, 4 parts, 5 forms, 6 descriptors,
    7 address of epsilon. Reads up to a vector past x and weight, whose values do not matter. With one row every thread
    packs its own copy.
    """
    rows, width = stage_rows(op, step), stage_width(op, step)
    size, parts, epsilon = argument(op, 3), argument(op, 4), get_f32(argument(op, 7))
    act = activation(argument(op, 6), 1, rows, thread)
    out = scratch(step, thread)
    first, last = rows_to_pack(op, step, thread, threads)
    while first >= 0:
        for row in range(first, last):
            for part in range(parts):
                at = part * size * 4
                _norm_part(argument(op, 0) + row * argument(op, 1) + at, argument(op, 2) + at, size, epsilon, out + at)
            pack_row(out, 0, size * parts, size * parts, argument(op, 5), width, row, act)
        first, last = more_rows_to_pack(op, step, thread, threads)


def _norm_rows_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 64), 256, s.normal(64), 48, 64, s.array([1e-3]))


@kernel(_norm_rows_samples)
def norm_rows(op: int, step: int, thread: int, threads: int) -> None:
    """x = RMSNorm(x) * weight in place, over all heads of a row together.

    Arguments: 0 x, 1 stride in bytes, 2 weight, 3 values without padding, 4 values with padding, 5 address of epsilon.
    """
    rows, epsilon = stage_rows(op, step), get_f32(argument(op, 5))
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x = argument(op, 0) + row * argument(op, 1)
            norm_row(x, argument(op, 2), argument(op, 3), argument(op, 4), epsilon, x)
        first, last = next_share(op, step, rows, thread, threads)


def _norm_heads_samples() -> Iterator[Sample]:
    s = Sample(rows=2)
    yield s.arguments(s.normal(2, 3, 32), 3, s.normal(32), 32, 24, s.array([1e-3]))


@kernel(_norm_heads_samples)
def norm_heads(op: int, step: int, thread: int, threads: int) -> None:
    """x = RMSNorm(x) * weight in place, head by head; threads divide the heads of all rows.

    Arguments: 0 x (rows of heads * D), 1 heads, 2 weight, 3 D, 4 size of a head, 5 address of epsilon.
    """
    padded, epsilon = argument(op, 3), get_f32(argument(op, 5))
    items = stage_rows(op, step) * argument(op, 1)
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        for item in range(first, last):
            x = argument(op, 0) + item * padded * 4
            norm_row(x, argument(op, 2), argument(op, 4), padded, epsilon, x)
        first, last = next_share(op, step, items, thread, threads)


def _add_norm_samples() -> Iterator[Sample]:
    for by_position in (False, True):
        s = Sample(rows=3)
        s.positions(5, 32)
        y = s.normal(8, 96) if by_position else s.normal(96)
        stride, bias = (384, s.normal(96)) if by_position else (0, 0)
        yield s.arguments(s.normal(3, 96), 384, y, stride, int(by_position), s.normal(96), bias, 80, s.array([1e-3]))


@kernel(_add_norm_samples)
def add_norm(op: int, step: int, thread: int, threads: int) -> None:
    """x = LayerNorm(x + y) in place.

    Arguments: 0 x, 1 stride in bytes, 2 y or 0, 3 its stride, 4 whether y is indexed by position instead of by row,
    5 weight, 6 bias or 0, 7 values without padding, 8 address of epsilon.
    """
    rows, k, epsilon = stage_rows(op, step), argument(op, 7), get_f32(argument(op, 8))
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x = argument(op, 0) + row * argument(op, 1)
            if argument(op, 2) != 0:
                index = get_i32(field(step, Step.POSITIONS) + 4 * row) if argument(op, 4) != 0 else row
                y = argument(op, 2) + index * argument(op, 3)
                for i in range(0, k, 16):
                    store_f32(x + i * 4, add_f32(load_f32(x + i * 4), load_f32(y + i * 4)))
            _layer_norm_row(x, argument(op, 5), argument(op, 6), k, epsilon, x)
        first, last = next_share(op, step, rows, thread, threads)


def _turn_samples() -> Iterator[Sample]:
    s = Sample(rows=2)
    s.positions(5, 32)
    yield s.arguments(s.normal(2, 3, 32), 3, s.normal(32), 32, 24, 0, s.array([1e-3]))


@kernel(_turn_samples)
def turn_then_normalise(op: int, step: int, thread: int, threads: int) -> None:
    """x = RMSNorm(rope(x)) * weight in place, head by head.

    Arguments: 0 x (rows of heads * D), 1 heads, 2 weight, 3 D, 4 size of a head, 5 rope table, 6 address of epsilon.
    """
    heads, padded, size = argument(op, 1), argument(op, 3), argument(op, 4)
    tables, epsilon = field(step, Step.ROPE_TABLES + argument(op, 5)), get_f32(argument(op, 6))
    turned = scratch(step, thread)
    items = stage_rows(op, step) * heads
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        for item in range(first, last):
            x = argument(op, 0) + item * padded * 4
            table = tables + get_i32(field(step, Step.POSITIONS) + 4 * (item // heads)) * padded * 4
            rotate_head(x, 0, table, padded, size, epsilon, _ONE, turned)
            norm_row(turned, argument(op, 2), size, padded, epsilon, x)
        first, last = next_share(op, step, items, thread, threads)
