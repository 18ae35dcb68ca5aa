"""Norms other than RMSNorm with packing: LayerNorm, and norms of queries and keys that cannot be fused with rotation.

Sums run over sixteen lanes, which are added as a tree at the end, so they are the same on every processor.
"""

import math
from collections.abc import Iterator

import numpy as np

from cpu_kernels.activations import NormPack, limit_values, more_rows_to_pack, norm_row, pack_row, rows_to_pack
from cpu_kernels.arguments import Arguments, indices_of
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
        biases, limits = (s.normal(96), 0) if bias else (0, s.array([-0.5, 0.7]))
        yield s.arguments(x, 384, weight, k, int(Form.FLOATS), s.activations(96), epsilon, 0, limits, biases)


class LayerNormPack(NormPack):
    """Arguments of layer_norm_pack."""

    bias: int = 0  # of the norm, or 0


_LAYER = indices_of(LayerNormPack)


@kernel(LayerNormPack, _layer_norm_samples)
def layer_norm_pack(op: int, step: int, thread: int, threads: int) -> None:
    """Normalise rows by mean and variance and pack them."""
    rows, width, k = stage_rows(op, step), stage_width(op, step), argument(op, _LAYER.k)
    act = activation(argument(op, _LAYER.packed), 1, rows, thread)
    epsilon = get_f32(argument(op, _LAYER.epsilon))
    out = scratch(step, thread)
    first, last = rows_to_pack(op, step, thread, threads)
    while first >= 0:
        for row in range(first, last):
            index = get_i32(field(step, Step.WANTED) + 4 * row) if argument(op, _LAYER.wanted) != 0 else row
            source = argument(op, _LAYER.x) + index * argument(op, _LAYER.stride)
            _layer_norm_row(source, argument(op, _LAYER.weight), argument(op, _LAYER.bias), k, epsilon, out)
            if argument(op, _LAYER.limits) != 0:
                limit_values(out, argument(op, _LAYER.limits), k, out)
            pack_row(out, 0, k, k, argument(op, _LAYER.forms), width, row, act)
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


class NormGroupsPack(Arguments):
    """Arguments of norm_groups_pack."""

    x: int  # rows of floats
    stride: int  # bytes from row to row
    weight: int  # of all parts
    size: int  # values of a part
    parts: int  # of a row
    forms: int  # Form: what to pack
    packed: int  # descriptors of packed activations
    epsilon: int  # address of a float


_GROUPS = indices_of(NormGroupsPack)


@kernel(NormGroupsPack, _norm_groups_samples)
def norm_groups_pack(op: int, step: int, thread: int, threads: int) -> None:
    """Normalise each of several equal parts of a row by its root mean square, and pack the row.

    Reads up to a vector past x and weight, whose values do not matter. With one row every thread packs its own copy.
    """
    rows, width = stage_rows(op, step), stage_width(op, step)
    size, parts = argument(op, _GROUPS.size), argument(op, _GROUPS.parts)
    epsilon = get_f32(argument(op, _GROUPS.epsilon))
    act = activation(argument(op, _GROUPS.packed), 1, rows, thread)
    out = scratch(step, thread)
    first, last = rows_to_pack(op, step, thread, threads)
    while first >= 0:
        for row in range(first, last):
            for part in range(parts):
                at = part * size * 4
                _norm_part(
                    argument(op, _GROUPS.x) + row * argument(op, _GROUPS.stride) + at,
                    argument(op, _GROUPS.weight) + at,
                    size,
                    epsilon,
                    out + at,
                )
            pack_row(out, 0, size * parts, size * parts, argument(op, _GROUPS.forms), width, row, act)
        first, last = more_rows_to_pack(op, step, thread, threads)


def _norm_rows_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 64), 256, s.normal(64), 48, 64, s.array([1e-3]))


class NormRows(Arguments):
    """Arguments of norm_rows."""

    x: int  # rows of floats, changed in place
    stride: int  # bytes from row to row
    weight: int  # of the norm
    size: int  # values of a row without padding
    padded: int  # values of a row with padding
    epsilon: int  # address of a float


_ROWS = indices_of(NormRows)


@kernel(NormRows, _norm_rows_samples)
def norm_rows(op: int, step: int, thread: int, threads: int) -> None:
    """x = RMSNorm(x) * weight in place, over all heads of a row together."""
    rows, epsilon = stage_rows(op, step), get_f32(argument(op, _ROWS.epsilon))
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x = argument(op, _ROWS.x) + row * argument(op, _ROWS.stride)
            norm_row(x, argument(op, _ROWS.weight), argument(op, _ROWS.size), argument(op, _ROWS.padded), epsilon, x)
        first, last = next_share(op, step, rows, thread, threads)


def _norm_heads_samples() -> Iterator[Sample]:
    s = Sample(rows=2)
    yield s.arguments(s.normal(2, 3, 32), 3, s.normal(32), 32, 24, s.array([1e-3]))


class NormHeads(Arguments):
    """Arguments of norm_heads."""

    x: int  # rows of heads * D floats, changed in place
    heads: int  # of a row
    weight: int  # of the norm
    padded: int  # D: values of a head with padding
    size: int  # values of a head
    epsilon: int  # address of a float


_HEADS = indices_of(NormHeads)


@kernel(NormHeads, _norm_heads_samples)
def norm_heads(op: int, step: int, thread: int, threads: int) -> None:
    """x = RMSNorm(x) * weight in place, head by head; threads divide the heads of all rows."""
    padded, epsilon = argument(op, _HEADS.padded), get_f32(argument(op, _HEADS.epsilon))
    items = stage_rows(op, step) * argument(op, _HEADS.heads)
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        for item in range(first, last):
            x = argument(op, _HEADS.x) + item * padded * 4
            norm_row(x, argument(op, _HEADS.weight), argument(op, _HEADS.size), padded, epsilon, x)
        first, last = next_share(op, step, items, thread, threads)


def _add_norm_samples() -> Iterator[Sample]:
    for by_position in (False, True):
        s = Sample(rows=3)
        s.positions(5, 32)
        y = s.normal(8, 96) if by_position else s.normal(96)
        stride, bias = (384, s.normal(96)) if by_position else (0, 0)
        yield s.arguments(s.normal(3, 96), 384, y, stride, int(by_position), s.normal(96), bias, 80, s.array([1e-3]))


class AddNorm(Arguments):
    """Arguments of add_norm."""

    x: int  # rows of floats, changed in place
    x_stride: int  # bytes from row to row
    y: int  # rows of floats to add, or 0
    y_stride: int  # bytes from row to row
    by_position: int = 0  # 1 if y is indexed by position instead of by row
    weight: int  # of the norm
    bias: int = 0  # of the norm, or 0
    size: int  # values of a row without padding
    epsilon: int  # address of a float


_ADD = indices_of(AddNorm)


@kernel(AddNorm, _add_norm_samples)
def add_norm(op: int, step: int, thread: int, threads: int) -> None:
    """x = LayerNorm(x + y) in place."""
    rows, k, epsilon = stage_rows(op, step), argument(op, _ADD.size), get_f32(argument(op, _ADD.epsilon))
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x = argument(op, _ADD.x) + row * argument(op, _ADD.x_stride)
            if argument(op, _ADD.y) != 0:
                index = get_i32(field(step, Step.POSITIONS) + 4 * row) if argument(op, _ADD.by_position) != 0 else row
                y = argument(op, _ADD.y) + index * argument(op, _ADD.y_stride)
                for i in range(0, k, 16):
                    store_f32(x + i * 4, add_f32(load_f32(x + i * 4), load_f32(y + i * 4)))
            _layer_norm_row(x, argument(op, _ADD.weight), argument(op, _ADD.bias), k, epsilon, x)
        first, last = next_share(op, step, rows, thread, threads)


def _turn_samples() -> Iterator[Sample]:
    s = Sample(rows=2)
    s.positions(5, 32)
    yield s.arguments(s.normal(2, 3, 32), 3, s.normal(32), 32, 24, 0, s.array([1e-3]))


class TurnThenNormalise(Arguments):
    """Arguments of turn_then_normalise."""

    x: int  # rows of heads * D floats, changed in place
    heads: int  # of a row
    weight: int  # of the norm
    padded: int  # D: values of a head with padding
    size: int  # values of a head
    rope: int  # number of the rope table in the step record
    epsilon: int  # address of a float


_TURN = indices_of(TurnThenNormalise)


@kernel(TurnThenNormalise, _turn_samples)
def turn_then_normalise(op: int, step: int, thread: int, threads: int) -> None:
    """x = RMSNorm(rope(x)) * weight in place, head by head."""
    heads, padded, size = argument(op, _TURN.heads), argument(op, _TURN.padded), argument(op, _TURN.size)
    tables = field(step, Step.ROPE_TABLES + argument(op, _TURN.rope))
    epsilon = get_f32(argument(op, _TURN.epsilon))
    turned = scratch(step, thread)
    items = stage_rows(op, step) * heads
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        for item in range(first, last):
            x = argument(op, _TURN.x) + item * padded * 4
            table = tables + get_i32(field(step, Step.ROPE_ROWS) + 4 * (item // heads)) * padded * 4
            rotate_head(x, 0, table, padded, size, epsilon, _ONE, turned)
            norm_row(turned, argument(op, _TURN.weight), size, padded, epsilon, x)
        first, last = next_share(op, step, items, thread, threads)
