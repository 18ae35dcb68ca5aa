"""Scores of keys and sums of values in q8_0, whose bytes are multiplied as they are.

A query, and the weights of 32 values of all tokens of a span, are rounded to words of 16 bits with one scale. Products
of bytes and words are added as integers, exactly, so that nothing but these roundings, a hundredth of the bytes' own,
comes on top of what storing lost.
"""

from typing import Any

import numpy as np

from cpu_kernels.attention_shape import MAX_COLUMNS, SPAN_BYTES, SPAN_TOKENS, VECTORS
from cpu_kernels.attention_span import seen
from cpu_kernels.declarations import inner
from cpu_kernels.kv_types import PAGE_TOKENS, SCALED_TOGETHER
from cpu_kernels.simd.arithmetic import largest_magnitude, magnitude, max_i32, mul_f32, round_i32, select_first
from cpu_kernels.simd.cross import (
    cross_dot2_i8,
    cross_scale_f16,
    cross_store_scaled,
    no_rows,
    page_rows,
    prefetch_rows,
    spaced_rows,
    tile_to_f32,
)
from cpu_kernels.simd.tiles import zero_tile_f32, zero_tile_i32
from cpu_kernels.simd.vectors import (
    get_i16,
    get_i32,
    get_u8,
    load_f16,
    load_f32,
    put_f16,
    put_f32,
    put_i16,
    put_u8,
    scatter_i8x4,
    splat_f32,
    store_f32,
    store_i16,
    zero_f32,
    zero_i32,
)

PAGE_BYTES_PER_VALUE = 17
"""Bytes of a page for each of D: sixteen bytes, and sixteen scales for every 32."""

VALUE_LINES = 1
"""Cache lines of a page that belong to four values of a head."""
_ZERO, _BYTE, _WORD = np.float32(0.0), np.float32(127.0), np.float32(32767.0)
_WORDS_BYTES = SPAN_TOKENS * 2
_VALUE_ROWS = {columns: min(2, VECTORS // columns) for columns in (1, 2, 4, 8) if columns <= VECTORS}

MEMORY_BYTES = MAX_COLUMNS * (SPAN_BYTES + _WORDS_BYTES + 4)
"""Scratch for a span's weights: scales of the tokens as each row sees them, words, factors of columns."""


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


def queries(columns: int) -> Any:
    """Function that rounds a query of D floats to words in its column, [group of columns][D / 2][column][2].

    The column's scale goes to scales + 4 * column.
    """

    @inner
    def put(query: int, column: int, padded: int, to: int, scales: int) -> None:
        largest = zero_i32()
        for i in range(0, padded, 16):
            largest = max_i32(largest, magnitude(load_f32(query + i * 4)))
        bound = largest_magnitude(largest)
        factor = splat_f32(_ZERO if bound == _ZERO else _WORD / bound)
        put_f32(scales + 4 * column, bound / _WORD)
        for i in range(0, padded, 16):
            store_i16(query + i * 2, round_i32(mul_f32(load_f32(query + i * 4), factor)))
        place = to + (column // columns * (padded // 2) * columns + column % columns) * 4
        for pair in range(padded // 2):
            put_i16(place + pair * columns * 4, get_i16(query + pair * 4))
            put_i16(place + pair * columns * 4 + 2, get_i16(query + pair * 4 + 2))

    return put


def scores(columns: int, value_lines: int) -> Any:
    """Function that computes a span's scores, [column][token], and asks for the pages that come next.

    value_lines: cache lines of a page of values that belong to four values of a head.
    """
    rows, tile, lines = VECTORS // columns, VECTORS, 2 * value_lines

    @inner
    def score(pages: Any, storage: Any, used: int, queries: int, scales: int, out: int) -> None:
        table, count, ahead = pages
        keys, values, key_bytes, value_bytes, padded, _ = storage
        for p in range(0, count, rows):
            at = table + 4 * p
            key = page_rows(no_rows(rows), at, count - 1 - p, keys, key_bytes)
            following = page_rows(no_rows(rows), at + 4 * rows, ahead - 1 - p - rows, keys, key_bytes)
            value = page_rows(no_rows(rows), at, count - 1 - p, values, value_bytes)
            for g in range((used + columns - 1) // columns):
                acc = zero_tile_f32(tile)
                query = queries + g * padded * columns * 2
                for block in range(padded // SCALED_TOGETHER):
                    integers = zero_tile_i32(tile)
                    for pair in range(block * 16, block * 16 + 16, 4):
                        if g == 0:
                            prefetch_rows(following, pair * 32, 2, 1)
                            prefetch_rows(value, pair * (16 * lines), lines, 1)
                        to = query + pair * 4 * columns
                        integers = cross_dot2_i8(integers, key, pair * 32, to, 4)
                        integers = cross_dot2_i8(integers, key, pair * 32 + 32, to + 4 * columns, 4)
                        integers = cross_dot2_i8(integers, key, pair * 32 + 64, to + 8 * columns, 4)
                        integers = cross_dot2_i8(integers, key, pair * 32 + 96, to + 12 * columns, 4)
                    acc = cross_scale_f16(acc, integers, key, padded * PAGE_TOKENS + block * PAGE_TOKENS * 2)
                place = out + g * columns * SPAN_BYTES + p * PAGE_TOKENS * 4
                row = spaced_rows(no_rows(rows), place, PAGE_TOKENS * 4, rows)
                cross_store_scaled(acc, row, SPAN_BYTES, scales + g * columns * 4)

    return score


@inner
def _token_scales(pages: Any, storage: Any, block: int, low: int, high: int, out: int) -> np.float32:
    """The scales of the span's tokens low..high-1, as shares of the largest times 32767; returns the largest.

    Other tokens get 0 and do not count, so that what lies behind a row does not matter to it.
    """
    table, count, _ = pages
    _, values, _, value_bytes, padded, _ = storage
    offset = padded * PAGE_TOKENS + block * PAGE_TOKENS * 2
    largest = zero_i32()
    for p in range(count):
        scales = load_f16(values + get_i32(table + 4 * p) * value_bytes + offset)
        at = p * PAGE_TOKENS
        if low > at or high < at + PAGE_TOKENS:
            scales = select_first(zero_f32(), select_first(scales, zero_f32(), high - at), low - at)
        store_f32(out + at * 4, scales)
        largest = max_i32(largest, magnitude(scales))
    bound = largest_magnitude(largest)
    factor = splat_f32(_ZERO if bound == _ZERO else _WORD / bound)
    for p in range(count):
        store_f32(out + p * PAGE_TOKENS * 4, mul_f32(load_f32(out + p * PAGE_TOKENS * 4), factor))
    return bound


@inner
def _round_weights(
    pages: Any, storage: Any, columns: int, group: int, block: int, place: Any, weights: int, memory: int
) -> None:
    """Weights times the block's scales as words, [column][token], and what a unit of each column's words stands for.

    memory: scales as rows see them, words, units.
    """
    _, count, _ = pages
    words = memory + MAX_COLUMNS * SPAN_BYTES
    units = words + MAX_COLUMNS * _WORDS_BYTES
    tokens = count * PAGE_TOKENS
    # All rows of a tile see all tokens of most spans.
    _, first_high = seen(0, place)
    last_low, _ = seen((columns - 1) // group, place)
    alike = first_high >= tokens and last_low <= 0
    scales = memory
    bound = _ZERO
    for c in range(columns):
        row = c // group
        if c % group == 0 and (row == 0 or not alike):
            low, high = seen(row, place)
            scales = memory + row * SPAN_BYTES
            bound = _token_scales(pages, storage, block, low, high, scales) / _WORD
        put_f32(units + 4 * c, bound)
        for t in range(0, tokens, PAGE_TOKENS):
            weight = mul_f32(load_f32(weights + c * SPAN_BYTES + t * 4), load_f32(scales + t * 4))
            store_i16(words + c * _WORDS_BYTES + t * 2, round_i32(weight))


def outputs(columns: int, key_bytes: int) -> Any:
    """Function that computes outputs [column][D] = weights [column][token] . values of a span.

    Where few columns leave memory the limit, it asks for the next span's keys, so that memory has work meanwhile.
    key_bytes: of their pages, for each of D.
    """
    rows = _VALUE_ROWS[columns]
    tile = rows * columns
    hurries = columns < VECTORS
    ahead_bytes = 16 * rows * key_bytes
    ahead_lines = -(-ahead_bytes // 64)

    @inner
    def weigh(pages: Any, storage: Any, used: int, group: int, place: Any, weights: int, out: int, memory: int) -> None:
        table, count, left = pages
        keys, values, page_bytes, value_bytes, padded, _ = storage
        words = memory + MAX_COLUMNS * SPAN_BYTES
        units = words + MAX_COLUMNS * _WORDS_BYTES
        for block in range(padded // SCALED_TOGETHER):
            _round_weights(pages, storage, used, group, block, place, weights, memory)
            for j in range(2 * block, 2 * block + 2, rows):
                for g in range((used + columns - 1) // columns):
                    integers = zero_tile_i32(tile)
                    for p in range(count):
                        page = values + get_i32(table + 4 * p) * value_bytes + j * 256
                        value = spaced_rows(no_rows(rows), page, 256, rows)
                        if hurries and g == 0:
                            at = table + 4 * (count + p)
                            following = page_rows(no_rows(1), at, left - 1 - count - p, keys, page_bytes)
                            prefetch_rows(following, j // rows * ahead_bytes, ahead_lines, 2)
                        word = words + g * columns * _WORDS_BYTES + p * PAGE_TOKENS * 2
                        for pair in range(0, PAGE_TOKENS // 2, 4):
                            at = pair * 32
                            integers = cross_dot2_i8(integers, value, at, word + pair * 4, _WORDS_BYTES)
                            integers = cross_dot2_i8(integers, value, at + 32, word + pair * 4 + 4, _WORDS_BYTES)
                            integers = cross_dot2_i8(integers, value, at + 64, word + pair * 4 + 8, _WORDS_BYTES)
                            integers = cross_dot2_i8(integers, value, at + 96, word + pair * 4 + 12, _WORDS_BYTES)
                    row = spaced_rows(no_rows(rows), out + g * columns * padded * 4 + j * 64, 64, rows)
                    cross_store_scaled(tile_to_f32(integers), row, padded * 4, units + g * columns * 4)

    return weigh
