"""Keys and values in q4_0: four bits each after a Hadamard transform; 32 of them share a scale.

The transform spreads outliers over all numbers of a head, so four bits lose less. It is orthogonal: products of
transformed queries and keys are those of the original ones, and sums of transformed values are transformed back once,
by the same transform. It also makes the numbers nearly Gaussian, so the 16 levels are closer together around zero:
those of GGML's IQ4_NL. cpu_kernels.attention_blocks has the arithmetic.
"""

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from cpu_kernels import attention_blocks
from cpu_kernels.attention_blocks import WORDS_BYTES, Packing
from cpu_kernels.declarations import define, inner
from cpu_kernels.kv_types import PAGE_TOKENS, SCALED_TOGETHER
from cpu_kernels.simd.arithmetic import (
    add_f32,
    fma,
    hadamard_f32,
    largest_f32,
    largest_magnitude,
    magnitude,
    max_f32,
    max_i32,
    min_f32,
    mul_f32,
    round_i32,
    sub_f32,
    sum_f32,
)
from cpu_kernels.simd.bytes import look_up
from cpu_kernels.simd.cross import cross_dot2_levels, no_rows, spaced_rows
from cpu_kernels.simd.vectors import (
    constant,
    f32x16,
    get_u8,
    i32x16,
    load_f32,
    put_f16,
    put_i32,
    put_u8,
    scatter_i8x4,
    splat_f32,
    store_f32,
    zero_f32,
)

VALUE_BYTES = PAGE_TOKENS // 2
"""Bytes of a page of values for each of D, without scales."""

PAGE_BYTES_PER_VALUE = 9
"""Bytes of a page for each of D: eight bytes, and sixteen scales for every 32."""
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the four-bit codes, in units of the scale."""
_OFFSET = -LEVELS[0]
_STORED = tuple(level + _OFFSET for level in LEVELS)
_ZERO, _ONE, _LAST = np.float32(0.0), np.float32(1.0), np.float32(15.0)
# Candidates for the value that a block's largest magnitude is scaled to: slightly inside or outside of the outermost
# levels, at both ends.
_LARGEST = tuple(np.float32(level) for level in (-135, -127, -118, -110, -104, 105, 113, 127))
# Coefficients, highest first, of a polynomial that is k + 0.5 midway between levels k and k + 1, to within 0.034.
_PLACES = tuple(
    np.float32(coefficient / 128**power)
    for coefficient, power in (
        (2.90976, 5),
        (0.0086636, 4),
        (-5.778142, 3),
        (-0.0779524, 2),
        (10.907169, 1),
        (7.88744, 0),
    )
)


_dot2 = cross_dot2_levels(_STORED)


def _level_values(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    levels = builder.sub(look_up(builder, _STORED, numbers), constant(i32x16.llvm, _OFFSET))
    return builder.sitofp(levels, f32x16.llvm)


# The values of codes from 0 to 15.
_level = define("q4_0_level", [i32x16], f32x16, _level_values, lambda n: np.array(LEVELS, np.float32)[n])


@inner
def turn(x: int, padded: int, out: int) -> None:
    """out = the orthogonal Hadamard transform of x, D floats, in blocks of the largest power of two that divides D.

    It is its own inverse, except for rounding. out may be x.
    """
    size = padded & -padded
    for i in range(0, padded * 4, 64):
        store_f32(out + i, hadamard_f32(load_f32(x + i)))
    step = 64
    while step < size * 4:
        for first in range(0, padded * 4, 2 * step):
            for i in range(out + first, out + first + step, 64):
                a, b = load_f32(i), load_f32(i + step)
                store_f32(i, add_f32(a, b))
                store_f32(i + step, sub_f32(a, b))
        step *= 2
    factor = splat_f32(_ONE / np.float32(math.sqrt(np.float32(size))))
    for i in range(0, padded * 4, 64):
        store_f32(out + i, mul_f32(load_f32(out + i), factor))


@inner
def _nearest(scaled: Any) -> Any:
    """The index of the nearest level of each number, 0 to 15, by a polynomial: between two levels, it may choose the
    other.
    """
    place = fma(splat_f32(_PLACES[0]), scaled, splat_f32(_PLACES[1]))
    place = fma(place, scaled, splat_f32(_PLACES[2]))
    place = fma(place, scaled, splat_f32(_PLACES[3]))
    place = fma(place, scaled, splat_f32(_PLACES[4]))
    place = fma(place, scaled, splat_f32(_PLACES[5]))
    return round_i32(min_f32(max_f32(place, zero_f32()), splat_f32(_LAST)))


@inner
def _better(best: Any, x0: Any, x1: Any, inverse: np.float32) -> Any:
    """The better of two choices for a block: `best`, or the levels nearest to the block times `inverse`.

    A choice is (inverse, product of block and levels, square of their cosine times the block's square).
    """
    v0 = _level(_nearest(mul_f32(x0, splat_f32(inverse))))
    v1 = _level(_nearest(mul_f32(x1, splat_f32(inverse))))
    product = sum_f32(fma(x0, v0, mul_f32(x1, v1)))
    close = product * product / sum_f32(fma(v0, v0, mul_f32(v1, v1)))
    return (inverse, product, close) if close > best[2] else best


@inner
def _quantize(x: int, padded: int, slot: int, page: int, out: int) -> None:
    """Write the codes of D floats, 0 to 15, as bytes to `out`, and their scales into a token's slot.

    Of several candidate scales, a block uses the one whose levels are closest to it in direction. The stored scale
    makes the product of the block and its stored form equal to the block's product with itself: an error along a key
    would change the scores of just the queries that match it.
    """
    for block in range(padded // SCALED_TOGETHER):
        x0 = load_f32(x + block * 128)
        x1 = load_f32(x + block * 128 + 64)
        largest = largest_magnitude(max_i32(magnitude(x0), magnitude(x1)))
        if largest_f32(max_f32(x0, x1)) != largest:
            largest = -largest
        unit = _ZERO if largest == _ZERO else _ONE / largest
        best = (_ZERO, largest, _ZERO)
        # Unrolled: a loop over a tuple leaves a path that LLVM considers unreachable.
        best = _better(best, x0, x1, _LARGEST[0] * unit)
        best = _better(best, x0, x1, _LARGEST[1] * unit)
        best = _better(best, x0, x1, _LARGEST[2] * unit)
        best = _better(best, x0, x1, _LARGEST[3] * unit)
        best = _better(best, x0, x1, _LARGEST[4] * unit)
        best = _better(best, x0, x1, _LARGEST[5] * unit)
        best = _better(best, x0, x1, _LARGEST[6] * unit)
        best = _better(best, x0, x1, _LARGEST[7] * unit)
        factor, product, _ = best
        squares = sum_f32(fma(x0, x0, mul_f32(x1, x1)))
        scale = _ZERO if product == _ZERO else squares / product
        put_f16(page + padded * VALUE_BYTES + (block * PAGE_TOKENS + slot) * 2, scale)
        scatter_i8x4(out + block * 32, 4, _nearest(mul_f32(x0, splat_f32(factor))))
        scatter_i8x4(out + block * 32 + 16, 4, _nearest(mul_f32(x1, splat_f32(factor))))


@inner
def store_key(key: int, page: int, slot: int, padded: int, memory: int) -> None:
    """Write a token's key, D floats, into its page. memory: 5 D bytes of scratch."""
    turn(key, padded, memory)
    numbers = memory + padded * 4
    _quantize(memory, padded, slot, page, numbers)
    for i in range(padded // 8):
        lane = 0
        for pair in range(4):
            at = numbers + 8 * i + 2 * pair
            lane |= get_u8(at) << (4 * pair) | get_u8(at + 1) << (16 + 4 * pair)
        put_i32(page + (i * PAGE_TOKENS + slot) * 4, lane)


@inner
def store_value(value: int, page: int, slot: int, padded: int, memory: int) -> None:
    """Write a token's value, D floats, into its page. memory: 5 D bytes of scratch."""
    turn(value, padded, memory)
    numbers = memory + padded * 4
    _quantize(memory, padded, slot, page, numbers)
    place = slot // 4 * 64 + slot % 2 * 2 + slot % 4 // 2
    for block in range(padded // SCALED_TOGETHER):
        for i in range(16):
            at = numbers + block * 32 + i
            put_u8(page + block * 256 + place + i * 4, get_u8(at) | get_u8(at + 16) << 4)


def queries(columns: int) -> Any:
    """Function that transforms a query of D floats and writes it to its column, as attention_blocks does."""
    put_words = attention_blocks.queries(columns, _OFFSET)

    @inner
    def put(query: int, column: int, padded: int, to: int, scales: int) -> None:
        turn(query, padded, query)
        put_words(query, column, padded, to, scales)

    return put


def _keys(columns: int) -> Any:
    step = 4 * columns

    @inner
    def add(integers: Any, pages: Any, pair: int, words: int) -> Any:
        integers = _dot2(integers, pages, pair * 16, 0, 0, words, 4)
        integers = _dot2(integers, pages, pair * 16, 4, 0, words + step, 4)
        integers = _dot2(integers, pages, pair * 16, 8, 0, words + 2 * step, 4)
        return _dot2(integers, pages, pair * 16, 12, 0, words + 3 * step, 4)

    return add


def _values(rows: int) -> Any:
    @inner
    def add(integers: Any, page: int, vector: int, words: int) -> Any:
        value = spaced_rows(no_rows(rows), page + vector // 2 * 256, 0, 0)
        half = vector % 2 * 4
        for four in range(PAGE_TOKENS // 4):
            at, word = four * 64, words + four * 8
            integers = _dot2(integers, value, at, half, 4, word, WORDS_BYTES)
            integers = _dot2(integers, value, at, half + 8, 4, word + 4, WORDS_BYTES)
        return integers

    return add


_PACKING = Packing(VALUE_BYTES, _OFFSET, _keys, _values)
scores, outputs = partial(attention_blocks.scores, _PACKING), partial(attention_blocks.outputs, _PACKING)
