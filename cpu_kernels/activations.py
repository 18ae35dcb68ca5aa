"""Input activations of matrix products: normalised or gated, then packed in the forms that weight formats need.

Quantisation is symmetric to int8 with a scale per 32 values (like Q8_0) or per 256 (like Q8_K), or to words with a unit
per 128 (cpu_kernels.words). A row's packed values depend only on that row.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.declarations import inner
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel import kernel
from cpu_kernels.records import Act, Form, Step, activation, argument, field, scratch, share, stage_rows, stage_width
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import (
    add_f32,
    add_i32,
    div_f32,
    exp2_f32,
    fma,
    largest_magnitude,
    magnitude,
    max_f32,
    max_i32,
    min_f32,
    mul_f32,
    round_i32,
    sub_f32,
    sum_f32,
    sum_first_pairs,
    sum_i32,
    where_positive,
)
from cpu_kernels.simd.vectors import (
    get_f32,
    get_i32,
    load_f32,
    put_f32,
    put_i16,
    put_i32,
    scatter_i8x4,
    splat_f32,
    store_f32,
    zero_f32,
    zero_i32,
)
from cpu_kernels.words import BLOCK, pack_words

_INT8_MAX = np.float32(127.0)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MINUS_LOG2E = np.float32(-math.log2(math.e))
# GELU's tanh form: x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3))), with the exponent's factor converted to base 2.
_GELU_EXPONENT = np.float32(-2.0 * math.sqrt(2.0 / math.pi) * math.log2(math.e))
_GELU_CUBE = np.float32(0.044715)
_TWO_LOG2E = np.float32(2.0 * math.log2(math.e))
# gpt-oss's gate: x / (1 + exp(-1.702 x)) * (up + 1), with x at most 7 and up in -7..7.
_STEEP = np.float32(-1.702 * math.log2(math.e))
_LIMIT = np.float32(7.0)
_LOG2E = np.float32(math.log2(math.e))

_BLOCKS_32, _BLOCKS_256, _PLAIN = int(Form.BLOCKS_32), int(Form.BLOCKS_256), int(Form.FLOATS)
_WORDS = int(Form.WORDS)
ALL_FORMS = _BLOCKS_32 | _BLOCKS_256 | _PLAIN | _WORDS

_SHORT = POLICY.int16_accumulators

GATE_SILU, GATE_GELU, GATE_CLAMPED, GELU_ALONE, GATE_SIGMOID, GATE_RELU, SQUARED_RELU_ALONE, XIELU_ALONE = range(8)
QUICK_ALONE, GATE_QUICK = 8, 9
"""GELU by a sigmoid: x / (1 + exp(-1.702 x))."""


@inner
def _scale_and_inverse(largest: np.float32) -> tuple[np.float32, np.float32]:
    """The scale of a block with the given largest magnitude, and its inverse. NaN propagates to both."""
    scale = largest / _INT8_MAX
    return scale, (_ZERO if scale == _ZERO else _ONE / scale)


@inner
def _short_sum(factor: int, values: Any, total: int) -> int:
    """factor * total, the sum of sixteen values, in the form in which byte products are accumulated.

    With 16-bit accumulators that is two 16-bit sums in one integer.
    """
    result = factor * total
    if _SHORT:
        first = factor * sum_first_pairs(values)
        result = (first & 0xFFFF) | (result - first) << 16
    return result


@inner
def _pack_32(source: int, blocks: int, pitch: int, q: int, scales: int, sums: int) -> None:
    """Quantise blocks of 32 of one row. pitch: 4 * tile width, the distance between a row's neighbouring entries."""
    for b in range(blocks):
        x0 = load_f32(source + b * 128)
        x1 = load_f32(source + b * 128 + 64)
        scale, inverse = _scale_and_inverse(largest_magnitude(max_i32(magnitude(x0), magnitude(x1))))
        factor = splat_f32(inverse)
        i0 = round_i32(mul_f32(x0, factor))
        i1 = round_i32(mul_f32(x1, factor))
        put_f32(scales + b * pitch, scale)
        scatter_i8x4(q + b * 8 * pitch, pitch, i0)
        scatter_i8x4(q + (b * 8 + 4) * pitch, pitch, i1)
        put_i32(sums + b * pitch, -128 * sum_i32(add_i32(i0, i1)))


@inner
def _pack_256(source: int, blocks: int, pitch: int, q: int, scales: int, pairs: int, sums: int) -> None:
    """Quantise blocks of 256 of one row. Sums of 32 are paired (0,2) (1,3) (4,6) (5,7), like weights' packed minima."""
    for b in range(blocks):
        largest = zero_i32()
        for g in range(16):
            largest = max_i32(largest, magnitude(load_f32(source + b * 1024 + g * 64)))
        scale, inverse = _scale_and_inverse(largest_magnitude(largest))
        factor = splat_f32(inverse)
        put_f32(scales + b * pitch, scale)
        for g in range(0, 16, 2):
            i0 = round_i32(mul_f32(load_f32(source + b * 1024 + g * 64), factor))
            i1 = round_i32(mul_f32(load_f32(source + b * 1024 + g * 64 + 64), factor))
            scatter_i8x4(q + (b * 64 + g * 4) * pitch, pitch, i0)
            scatter_i8x4(q + (b * 64 + g * 4 + 4) * pitch, pitch, i1)
            s0 = sum_i32(i0)
            s1 = sum_i32(i1)
            put_i32(sums + (b * 16 + g) * pitch, _short_sum(-32, i0, s0))
            put_i32(sums + (b * 16 + g + 1) * pitch, _short_sum(-32, i1, s1))
            j = g // 2
            put_i16(pairs + (b * 4 + j // 4 * 2 + j % 2) * pitch + j % 4 // 2 * 2, s0 + s1)


@inner
def pack_row(source: int, first: int, last: int, k: int, forms: int, width: int, row: int, act: int) -> None:
    """Pack values first..last-1 of one row of k values. Both must be multiples of 256, or span the whole row.

    source: address of value `first`.
    """
    tile, lane = row // width, row % width
    pitch = 4 * width
    n = last - first
    if forms & _BLOCKS_32:
        values = tile * width * k + first * width + lane * 4
        blocks = (tile * (k // 32) * width + first // 32 * width + lane) * 4
        _pack_32(
            source,
            n // 32,
            pitch,
            field(act, Act.Q32) + values,
            field(act, Act.SCALE32) + blocks,
            field(act, Act.SUM32) + blocks,
        )
    if forms & _BLOCKS_256:
        values = tile * width * k + first * width + lane * 4
        blocks = (tile * (k // 256) * width + first // 256 * width) * 4
        _pack_256(
            source,
            n // 256,
            pitch,
            field(act, Act.Q256) + values,
            field(act, Act.SCALE256) + blocks + lane * 4,
            field(act, Act.PAIRS256) + blocks * 4 + lane * 4,
            field(act, Act.SUM16) + blocks * 16 + lane * 4,
        )
    if forms & _PLAIN:
        to = field(act, Act.FLOATS) + (tile * width * k + first * width + lane) * 4
        for i in range(n):
            put_f32(to + i * pitch, get_f32(source + i * 4))
    if forms & _WORDS:
        pairs = field(act, Act.WORDS) + (tile * k // 2 * width + first // 2 * width + lane) * 4
        units = field(act, Act.WORD_UNITS) + (tile * (k // BLOCK) * width + first // BLOCK * width + lane) * 4
        pack_words(source, n // BLOCK, pitch, pairs, units)


@inner
def _norm_factor(x: int, k: int, padded: int, epsilon: np.float32) -> np.float32:
    """1 / sqrt(mean(x^2) + epsilon) (RMSNorm). padded: k rounded up to 16; x is zero beyond k."""
    s0 = zero_f32()
    s1 = zero_f32()
    for i in range(0, padded - 16, 32):
        v = load_f32(x + i * 4)
        s0 = fma(v, v, s0)
        v = load_f32(x + i * 4 + 64)
        s1 = fma(v, v, s1)
    if padded % 32 != 0:
        v = load_f32(x + (padded - 16) * 4)
        s0 = fma(v, v, s0)
    mean = sum_f32(add_f32(s0, s1)) / np.float32(k)
    return _ONE / np.float32(math.sqrt(mean + epsilon))


@inner
def _scale_values(x: int, weight: int, scale: np.float32, n: int, out: int) -> None:
    """out = x * scale * weight; n is a multiple of 16 or all are padded to one."""
    factor = splat_f32(scale)
    for i in range(0, n, 16):
        store_f32(out + i * 4, mul_f32(mul_f32(load_f32(x + i * 4), factor), load_f32(weight + i * 4)))


@inner
def norm_row(x: int, weight: int, k: int, padded: int, epsilon: np.float32, out: int) -> None:
    """out = x / sqrt(mean(x^2) + epsilon) * weight (RMSNorm).

    padded: k rounded up to 16; x and weight are zero beyond k.
    """
    _scale_values(x, weight, _norm_factor(x, k, padded, epsilon), padded, out)


@inner
def rows_to_pack(op: int, step: int, thread: int, threads: int) -> tuple[int, int]:
    """Rows first..last-1 that a thread packs first: whole tiles, or its own copy of a single row."""
    rows, width = stage_rows(op, step), stage_width(op, step)
    if rows == 1:
        return 0, 1
    first, last = first_share(op, step, (rows + width - 1) // width, thread, threads)
    return first * width, min(rows, last * width)


@inner
def more_rows_to_pack(op: int, step: int, thread: int, threads: int) -> tuple[int, int]:
    """Rows first..last-1 that a thread packs next; first is negative if there are none."""
    rows, width = stage_rows(op, step), stage_width(op, step)
    if rows == 1:
        return -1, -1
    first, last = next_share(op, step, (rows + width - 1) // width, thread, threads)
    return first * width, min(rows, last * width)


@inner
def limit_values(x: int, limits: int, n: int, out: int) -> None:
    """out = x between two limits, whose address is given; n is a multiple of 16 or x and out are padded to one."""
    low, high = splat_f32(get_f32(limits)), splat_f32(get_f32(limits + 4))
    for i in range(0, n, 16):
        store_f32(out + i * 4, min_f32(high, max_f32(low, load_f32(x + i * 4))))


def _norm_pack_samples() -> Iterator[Sample]:
    for rows, width in ((1, 1), (5, 4)):
        s = Sample(rows=rows, width=width)
        s.step({Step.WANTED: s.array(range(rows)[::-1], np.int32)})
        for weight, gather, limits in ((s.normal(256), 0, 0), (0, 1, 0), (0, 0, s.array([-0.5, 0.7]))):
            x, epsilon = s.normal(rows, 256), s.array([1e-5])
            yield s.arguments(x, 1024, weight, 256, ALL_FORMS, s.activations(256), epsilon, gather, limits)


class NormPack(Arguments):
    """Arguments of norm_pack."""

    x: int  # rows of floats
    stride: int  # bytes from row to row
    weight: int  # of the norm, or 0 to pack x as it is
    k: int  # values of a row
    forms: int  # Form: what to pack
    packed: int  # descriptors of packed activations
    epsilon: int  # address of a float
    wanted: int = 0  # 1 to pack only rows with requested logits
    limits: int = 0  # address of the least and the greatest value to pack, or 0


_PACK = indices_of(NormPack)


@kernel(NormPack, _norm_pack_samples)
def norm_pack(op: int, step: int, thread: int, threads: int) -> None:
    """Normalise rows and pack them. With one row every thread packs its own copy.

    If there are fewer tiles than threads, these divide the rows' blocks of 256, too, and each computes the norms.
    """
    rows = stage_rows(op, step)
    width = stage_width(op, step)
    k = argument(op, _PACK.k)
    weight, limits = argument(op, _PACK.weight), argument(op, _PACK.limits)
    padded = (k + 15) // 16 * 16
    act = activation(argument(op, _PACK.packed), 1, rows, thread)
    epsilon = get_f32(argument(op, _PACK.epsilon))
    out = scratch(step, thread)
    tiles, blocks = (rows + width - 1) // width, (k + 255) // 256
    parts = 1 if rows == 1 or tiles >= threads else min(blocks, threads)
    first, last = (0, 1) if rows == 1 else first_share(op, step, tiles * parts, thread, threads)
    while first >= 0:
        for item in range(first, last):
            tile, part = item // parts, item % parts
            begin = share(blocks, part, parts) * 256
            n = min(k, share(blocks, part + 1, parts) * 256) - begin
            for row in range(tile * width, min(rows, tile * width + width)):
                index = get_i32(field(step, Step.WANTED) + 4 * row) if argument(op, _PACK.wanted) != 0 else row
                x = argument(op, _PACK.x) + index * argument(op, _PACK.stride)
                source = x + begin * 4
                if weight != 0:
                    _scale_values(source, weight + begin * 4, _norm_factor(x, k, padded, epsilon), n, out)
                    source = out
                if limits != 0:
                    limit_values(source, limits, n, out)
                    source = out
                pack_row(source, begin, begin + n, k, argument(op, _PACK.forms), width, row, act)
        first, last = (-1, -1) if rows == 1 else next_share(op, step, tiles * parts, thread, threads)


def _norm_add_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 48), 192, s.normal(3, 48), 192, s.normal(48), 48, s.array([1e-5]))


class NormAdd(Arguments):
    """Arguments of norm_add."""

    x: int  # rows of floats, changed in place
    x_stride: int  # bytes from row to row
    y: int  # rows of floats
    y_stride: int  # bytes from row to row
    weight: int  # of the norm
    k: int  # values of a row
    epsilon: int  # address of a float


_ADD = indices_of(NormAdd)


@kernel(NormAdd, _norm_add_samples)
def norm_add(op: int, step: int, thread: int, threads: int) -> None:
    """x += RMSNorm(y) * weight, row by row."""
    rows = stage_rows(op, step)
    k = argument(op, _ADD.k)
    padded = (k + 15) // 16 * 16
    out = scratch(step, thread)
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x = argument(op, _ADD.x) + row * argument(op, _ADD.x_stride)
            norm_row(
                argument(op, _ADD.y) + row * argument(op, _ADD.y_stride),
                argument(op, _ADD.weight),
                k,
                padded,
                get_f32(argument(op, _ADD.epsilon)),
                out,
            )
            for i in range(0, padded, 16):
                store_f32(x + i * 4, add_f32(load_f32(x + i * 4), load_f32(out + i * 4)))
        first, last = next_share(op, step, rows, thread, threads)


@inner
def _xielu(x: int, factors: int, out: int, n: int) -> None:
    """p x^2 + b x where x > 0, else q (exp(min(x, e)) - 1 - x) + b x (Huang and Schlag, 2024).

    factors: address of q, p, b and e.
    """
    one, base = splat_f32(_ONE), splat_f32(_LOG2E)
    negative, positive = splat_f32(get_f32(factors)), splat_f32(get_f32(factors + 4))
    linear, bound = splat_f32(get_f32(factors + 8)), splat_f32(get_f32(factors + 12))
    for i in range(0, n, 16):
        v = load_f32(x + i * 4)
        below = mul_f32(sub_f32(sub_f32(exp2_f32(mul_f32(min_f32(v, bound), base)), one), v), negative)
        above = mul_f32(mul_f32(positive, v), v)
        store_f32(out + i * 4, fma(linear, v, where_positive(v, above, below)))


@inner
def gate_values(kind: int, gate: int, up: int, out: int, n: int) -> None:
    """out = activation(gate) * up, without up for GELU_ALONE, QUICK_ALONE and SQUARED_RELU_ALONE.

    For xIELU, `up` is the address of its factors. All others except ReLU are x / (1 + 2^e(x)) or 1 / (1 + 2^e(x)).
    """
    if kind == XIELU_ALONE:
        _xielu(gate, up, out, n)
        return
    one = splat_f32(_ONE)
    silu = splat_f32(_MINUS_LOG2E)
    gelu = splat_f32(_GELU_EXPONENT)
    cube = splat_f32(_GELU_CUBE)
    steep, highest, lowest = splat_f32(_STEEP), splat_f32(_LIMIT), splat_f32(-_LIMIT)
    if kind in (GATE_RELU, SQUARED_RELU_ALONE):
        for i in range(0, n, 16):
            x = max_f32(zero_f32(), load_f32(gate + i * 4))
            store_f32(out + i * 4, mul_f32(x, load_f32(up + i * 4) if kind == GATE_RELU else x))
        return
    for i in range(0, n, 16):
        x, factor = load_f32(gate + i * 4), load_f32(up + i * 4)
        e = mul_f32(x, silu)
        if kind in (GATE_GELU, GELU_ALONE):
            e = mul_f32(fma(mul_f32(mul_f32(x, x), x), cube, x), gelu)
        if kind == GATE_CLAMPED:
            x = min_f32(highest, x)
            e = mul_f32(x, steep)
            factor = add_f32(one, max_f32(lowest, min_f32(highest, factor)))
        if kind in (QUICK_ALONE, GATE_QUICK):
            e = mul_f32(x, steep)
        if kind == GATE_SIGMOID:
            x = one
        y = div_f32(x, add_f32(one, exp2_f32(e)))
        store_f32(out + i * 4, y if kind in (GELU_ALONE, QUICK_ALONE) else mul_f32(y, factor))


def _gate_pack_samples() -> Iterator[Sample]:
    for kind, rows, width in product(range(10), (1, 3), (1, 4)):
        s = Sample(rows=rows, width=width)
        gate, up = s.array(4 * s.random.standard_normal((rows, 256))), s.normal(rows, 256)
        if kind == XIELU_ALONE:
            up = s.array([0.7, 0.9, 0.5, -1e-6])
        limits = s.array([-0.5, 0.7]) if kind == GATE_GELU else 0
        yield s.arguments(gate, up, 1024, 256, ALL_FORMS, s.activations(256), kind, 0, limits)


class GatePack(Arguments):
    """Arguments of gate_pack."""

    gate: int  # rows of floats
    up: int  # rows of floats, or the factors of xIELU
    stride: int  # bytes from row to row of gates
    k: int  # values of a row
    forms: int  # Form: what to pack
    packed: int  # descriptors of packed activations
    kind: int  # GATE_SILU and so on
    up_stride: int = 0  # bytes from row to row of up; 0 for the stride of gates
    limits: int = 0  # address of the least and the greatest value to pack, or 0


_GATE = indices_of(GatePack)


@kernel(GatePack, _gate_pack_samples)
def gate_pack(op: int, step: int, thread: int, threads: int) -> None:
    """Pack activation(gate) * up into the shared descriptor.

    If there are fewer tiles than threads, these divide the rows' blocks of 256 as products divide their results, so
    most of what a thread reads it wrote itself.
    """
    rows = stage_rows(op, step)
    width = stage_width(op, step)
    k = argument(op, _GATE.k)
    stride = argument(op, _GATE.stride)
    up_stride = argument(op, _GATE.up_stride) or stride
    act = argument(op, _GATE.packed)
    kind, up, limits = argument(op, _GATE.kind), argument(op, _GATE.up), argument(op, _GATE.limits)
    moves = kind != XIELU_ALONE
    out = scratch(step, thread)
    tiles, blocks = (rows + width - 1) // width, (k + 255) // 256
    parts = 1 if tiles >= threads else blocks
    first, last = first_share(op, step, tiles * parts, thread, threads)
    while first >= 0:
        for item in range(first, last):
            tile, part = item // parts, item % parts
            begin = share(blocks, part, parts) * 256
            n = min(k, share(blocks, part + 1, parts) * 256) - begin
            for row in range(tile * width, min(rows, tile * width + width)):
                gate = argument(op, _GATE.gate) + row * stride + begin * 4
                gate_values(kind, gate, up + (row * up_stride + begin * 4) * moves, out, n)
                if limits != 0:
                    limit_values(out, limits, n, out)
                pack_row(out, begin, begin + n, k, argument(op, _GATE.forms), width, row, act)
        first, last = next_share(op, step, tiles * parts, thread, threads)


def _activate_samples() -> Iterator[Sample]:
    for rows in (1, 3):
        s = Sample(rows=rows)
        yield s.arguments(s.array(4 * s.random.standard_normal((rows, 48))), 192, 40, GELU_ALONE)


class Activate(Arguments):
    """Arguments of activate."""

    y: int  # rows of floats, changed in place
    stride: int  # bytes from row to row
    count: int  # values of a row
    kind: int  # an activation without a gate: GELU_ALONE and so on


_ACTIVATE = indices_of(Activate)


@kernel(Activate, _activate_samples)
def activate(op: int, step: int, thread: int, threads: int) -> None:
    """y = activation(y)."""
    rows, vectors = stage_rows(op, step), (argument(op, _ACTIVATE.count) + 15) // 16
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(rows):
            y = argument(op, _ACTIVATE.y) + row * argument(op, _ACTIVATE.stride) + first * 64
            gate_values(argument(op, _ACTIVATE.kind), y, y, y, (last - first) * 16)
        first, last = next_share(op, step, vectors, thread, threads)


def _limit_rows_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 48), 192, 40, s.array([-0.5, 0.7]))


class LimitRows(Arguments):
    """Arguments of limit_rows."""

    y: int  # rows of floats, changed in place
    stride: int  # bytes from row to row
    count: int  # values of a row
    limits: int  # address of the least and the greatest value


_LIMITS = indices_of(LimitRows)


@kernel(LimitRows, _limit_rows_samples)
def limit_rows(op: int, step: int, thread: int, threads: int) -> None:
    """y between two limits."""
    vectors = (argument(op, _LIMITS.count) + 15) // 16
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(stage_rows(op, step)):
            y = argument(op, _LIMITS.y) + row * argument(op, _LIMITS.stride) + first * 64
            limit_values(y, argument(op, _LIMITS.limits), (last - first) * 16, y)
        first, last = next_share(op, step, vectors, thread, threads)


def _soft_cap_samples() -> Iterator[Sample]:
    s = Sample(rows=2)
    yield s.arguments(s.array(40 * s.random.standard_normal((2, 48))), 192, 48, s.array([30.0]))


class SoftCap(Arguments):
    """Arguments of soft_cap."""

    y: int  # rows of floats, changed in place
    stride: int  # bytes from row to row
    count: int  # values of a row
    cap: int  # address of a float


_CAP = indices_of(SoftCap)


@kernel(SoftCap, _soft_cap_samples)
def soft_cap(op: int, step: int, thread: int, threads: int) -> None:
    """y = cap * tanh(y / cap)."""
    rows = stage_rows(op, step)
    cap = get_f32(argument(op, _CAP.cap))
    vectors = (argument(op, _CAP.count) + 15) // 16
    one, two = splat_f32(_ONE), splat_f32(np.float32(2.0))
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(rows):
            y = argument(op, _CAP.y) + row * argument(op, _CAP.stride)
            for v in range(first, last):
                power = exp2_f32(mul_f32(load_f32(y + v * 64), splat_f32(_TWO_LOG2E / cap)))
                tanh = sub_f32(one, div_f32(two, add_f32(one, power)))
                store_f32(y + v * 64, mul_f32(splat_f32(cap), tanh))
        first, last = next_share(op, step, vectors, thread, threads)
