"""Keys and values in q4_0: four bits each, 32 of which share a scale, turned by a Hadamard transform before.

The transform spreads what is large in a few numbers of a head over all of them, so that four bits lose less. It is
orthogonal: products of a turned query with turned keys are those of the query with the keys, and sums of turned values
are turned back once, by the same transform. What is computed is in cpu_kernels.attention_blocks.
"""

import math
from functools import partial
from typing import Any

import numpy as np

from cpu_kernels import attention_blocks
from cpu_kernels.attention_blocks import WORDS_BYTES, Packing
from cpu_kernels.declarations import inner
from cpu_kernels.kv_types import PAGE_TOKENS, SCALED_TOGETHER
from cpu_kernels.simd.arithmetic import (
    add_f32,
    add_i32,
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
)
from cpu_kernels.simd.cross import cross_dot2_u4, no_rows, spaced_rows
from cpu_kernels.simd.vectors import (
    get_u8,
    load_f32,
    put_f16,
    put_i32,
    put_u8,
    scatter_i8x4,
    splat_f32,
    splat_i32,
    store_f32,
)

VALUE_BYTES = PAGE_TOKENS // 2
"""Bytes of a page of values for each of D, scales left out."""

PAGE_BYTES_PER_VALUE = 9
"""Bytes of a page for each of D: eight bytes, and sixteen scales for every 32."""
_OFFSET = 8
_ZERO, _ONE, _MOST = np.float32(0.0), np.float32(1.0), np.float32(7.0)
_EIGHT = np.float32(8.0)


@inner
def turn(x: int, padded: int, out: int) -> None:
    """out = the orthogonal Hadamard transform of x, D floats, in blocks of the largest power of two that divides D.

    It is its own inverse, but for rounding. out may be x.
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
def _quantize(x: int, padded: int, slot: int, page: int, out: int) -> None:
    """Round D floats to numbers from 0 to 15, in bytes at `out`, and write their scales into a token's slot.

    As in GGML's Q4_0 the largest magnitude of 32 becomes -8, whatever its sign.
    """
    for block in range(padded // SCALED_TOGETHER):
        x0 = load_f32(x + block * 128)
        x1 = load_f32(x + block * 128 + 64)
        bound = largest_magnitude(max_i32(magnitude(x0), magnitude(x1)))
        scale = -bound / _EIGHT if largest_f32(max_f32(x0, x1)) == bound else bound / _EIGHT
        inverse = splat_f32(_ZERO if scale == _ZERO else _ONE / scale)
        for part in range(2):
            scaled = min_f32(splat_f32(_MOST), mul_f32(x0 if part == 0 else x1, inverse))
            numbers = add_i32(round_i32(scaled), splat_i32(_OFFSET))
            scatter_i8x4(out + block * 32 + part * 16, 4, numbers)
        put_f16(page + padded * VALUE_BYTES + (block * PAGE_TOKENS + slot) * 2, scale)


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
    """Function that turns a query of D floats and puts it into its column as attention_blocks has it."""
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
        integers = cross_dot2_u4(integers, pages, pair * 16, 0, 0, words, 4)
        integers = cross_dot2_u4(integers, pages, pair * 16, 4, 0, words + step, 4)
        integers = cross_dot2_u4(integers, pages, pair * 16, 8, 0, words + 2 * step, 4)
        return cross_dot2_u4(integers, pages, pair * 16, 12, 0, words + 3 * step, 4)

    return add


def _values(rows: int) -> Any:
    @inner
    def add(integers: Any, page: int, vector: int, words: int) -> Any:
        value = spaced_rows(no_rows(rows), page + vector // 2 * 256, 0, 0)
        half = vector % 2 * 4
        for four in range(PAGE_TOKENS // 4):
            at, word = four * 64, words + four * 8
            integers = cross_dot2_u4(integers, value, at, half, 4, word, WORDS_BYTES)
            integers = cross_dot2_u4(integers, value, at, half + 8, 4, word + 4, WORDS_BYTES)
        return integers

    return add


_PACKING = Packing(VALUE_BYTES, _OFFSET, _keys, _values)
scores, outputs = partial(attention_blocks.scores, _PACKING), partial(attention_blocks.outputs, _PACKING)
