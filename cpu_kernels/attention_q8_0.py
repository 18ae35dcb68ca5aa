"""Keys and values in q8_0: bytes, 32 of which share a scale. See cpu_kernels.attention_blocks for the arithmetic."""

from functools import partial
from typing import Any

import numpy as np

from cpu_kernels import attention_blocks
from cpu_kernels.attention_blocks import WORDS_BYTES, Packing, queries
from cpu_kernels.declarations import inner
from cpu_kernels.kv_types import PAGE_TOKENS, SCALED_TOGETHER
from cpu_kernels.simd.arithmetic import largest_magnitude, magnitude, max_i32, mul_f32, round_i32
from cpu_kernels.simd.cross import cross_dot2_i8, no_rows, spaced_rows
from cpu_kernels.simd.vectors import (
    get_i16,
    get_u8,
    load_f32,
    put_f16,
    put_i16,
    put_u8,
    scatter_i8x4,
    splat_f32,
)

__all__ = ["PAGE_BYTES_PER_VALUE", "VALUE_BYTES", "outputs", "queries", "scores", "store_key", "store_value"]

VALUE_BYTES = PAGE_TOKENS
"""Bytes of a page of values for each of D, without scales."""

PAGE_BYTES_PER_VALUE = 17
"""Bytes of a page for each of D: 16 bytes, and 16 scales of 2 bytes for every 32 values."""
_ZERO, _BYTE = np.float32(0.0), np.float32(127.0)


@inner
def _quantize(x: int, padded: int, slot: int, page: int, out: int) -> None:
    """Round a token's D floats to bytes at `out`, and write their scales into the page."""
    for block in range(padded // SCALED_TOGETHER):
        x0 = load_f32(x + block * 128)
        x1 = load_f32(x + block * 128 + 64)
        scale = largest_magnitude(max_i32(magnitude(x0), magnitude(x1))) / _BYTE
        inverse = splat_f32(_ZERO if scale == _ZERO else np.float32(1.0) / scale)
        scatter_i8x4(out + block * 32, 4, round_i32(mul_f32(x0, inverse)))
        scatter_i8x4(out + block * 32 + 16, 4, round_i32(mul_f32(x1, inverse)))
        put_f16(page + padded * PAGE_TOKENS + (block * PAGE_TOKENS + slot) * 2, scale)


@inner
def store_key(key: int, page: int, slot: int, padded: int, memory: int) -> None:
    """Write a token's key, D floats, into its page. memory: D bytes of scratch."""
    _quantize(key, padded, slot, page, memory)
    for pair in range(padded // 2):
        put_i16(page + (pair * PAGE_TOKENS + slot) * 2, get_i16(memory + pair * 2))


@inner
def store_value(value: int, page: int, slot: int, padded: int, memory: int) -> None:
    """Write a token's value, D floats, into its page. memory: D bytes of scratch."""
    _quantize(value, padded, slot, page, memory)
    for d in range(padded):
        put_u8(page + d // 16 * 256 + slot // 2 * 32 + d % 16 * 2 + slot % 2, get_u8(memory + d))


def _keys(columns: int) -> Any:
    step = 4 * columns

    @inner
    def add(integers: Any, pages: Any, pair: int, words: int) -> Any:
        integers = cross_dot2_i8(integers, pages, pair * 32, words, 4)
        integers = cross_dot2_i8(integers, pages, pair * 32 + 32, words + step, 4)
        integers = cross_dot2_i8(integers, pages, pair * 32 + 64, words + 2 * step, 4)
        return cross_dot2_i8(integers, pages, pair * 32 + 96, words + 3 * step, 4)

    return add


def _values(rows: int) -> Any:
    @inner
    def add(integers: Any, page: int, vector: int, words: int) -> Any:
        value = spaced_rows(no_rows(rows), page + vector * 256, 256, rows)
        for pair in range(0, PAGE_TOKENS // 2, 4):
            at, word = pair * 32, words + pair * 4
            integers = cross_dot2_i8(integers, value, at, word, WORDS_BYTES)
            integers = cross_dot2_i8(integers, value, at + 32, word + 4, WORDS_BYTES)
            integers = cross_dot2_i8(integers, value, at + 64, word + 8, WORDS_BYTES)
            integers = cross_dot2_i8(integers, value, at + 96, word + 12, WORDS_BYTES)
        return integers

    return add


_PACKING = Packing(VALUE_BYTES, 0, _keys, _values)
scores, outputs = partial(attention_blocks.scores, _PACKING), partial(attention_blocks.outputs, _PACKING)
