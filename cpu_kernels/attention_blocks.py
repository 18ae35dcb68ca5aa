"""Scores and weighted sums of values for keys and values quantized to small integers, 32 of which share a scale.

The integers are multiplied without dequantizing. A query, and the attention weights of a span for 32 values, are each
rounded to 16-bit words with one scale. Products of integers and words are summed exactly, as integers. So the only
error beyond that of the stored integers is this rounding, a hundredth of the stored bytes' own.

Integers stored with an offset are multiplied with the offset included; their sums start with the correction, minus the
offset times the sum of the words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_kernels.attention_shape import MAX_COLUMNS, SPAN_BYTES, SPAN_TOKENS, VECTORS
from cpu_kernels.attention_span import seen
from cpu_kernels.declarations import inner
from cpu_kernels.isa import POLICY
from cpu_kernels.kv_types import PAGE_TOKENS, SCALED_TOGETHER
from cpu_kernels.simd.arithmetic import (
    add_i32,
    largest_magnitude,
    magnitude,
    max_i32,
    mul_f32,
    round_i32,
    select_first,
    sum_i32,
)
from cpu_kernels.simd.cross import (
    cross_scale_f16,
    cross_splat_i32,
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
    load_f16,
    load_f32,
    put_f32,
    put_i32,
    splat_f32,
    store_f32,
    store_i16,
    zero_f32,
    zero_i32,
)
from cpu_kernels.words import largest_of

_ZERO, _WORD = np.float32(0.0), np.float32(32767.0)
WORDS_BYTES = SPAN_TOKENS * 2
"""Stride in bytes between columns' weight words."""
# Vectors of values in a register tile: two if the registers hold two accumulators per column.
_VALUE_ROWS = {
    columns: 2 if POLICY.vector_parts == 1 else min(2, VECTORS // columns)
    for columns in (1, 2, 4, 8)
    if columns <= VECTORS
}

MEMORY_BYTES = MAX_COLUMNS * (SPAN_BYTES + WORDS_BYTES + 8)
"""Scratch for a span's weights: token scales masked for each row, words, columns' factors and initial sums."""


@dataclass(frozen=True)
class Packing:
    """How a type's integers are multiplied.

    number_bytes: bytes of a page for each of D, without scales. offset: added to integers when they are stored.

    keys(columns) returns add(integers, pages, pair, words), which adds the products of a tile's pages of keys with four
    pairs of a query's words, starting at `pair`. values(rows) returns add(integers, page, vector, words), which adds
    the products of all tokens' values in `rows` vectors, starting at `vector`, with their weights' words, whose stride
    is WORDS_BYTES.
    """

    number_bytes: int
    offset: int
    keys: Callable[[int], Any]
    values: Callable[[int], Any]


@inner
def put_words(query: int, column: int, columns: int, padded: int, factor: np.float32, to: int) -> None:
    """Round D floats times a factor to words in place, and copy them to their column, [D / 2][column][2] of a group."""
    for i in range(0, padded, 16):
        store_i16(query + i * 2, round_i32(mul_f32(load_f32(query + i * 4), splat_f32(factor))))
    place = to + (column // columns * (padded // 2) * columns + column % columns) * 4
    for pair in range(padded // 2):
        put_i32(place + pair * columns * 4, get_i32(query + pair * 4))


def queries(columns: int, offset: int = 0) -> Any:
    """Function that rounds a query of D floats to words in its column, [group of columns][D / 2][column][2].

    Writes the column's scale to scales + 4 * column. If stored integers have an offset, writes the initial values of
    the sums of 32 products after the words of all columns, [group of columns][D / 32][column].
    """

    @inner
    def put(query: int, column: int, padded: int, to: int, scales: int) -> None:
        bound = largest_of(query, padded)
        put_f32(scales + 4 * column, bound / _WORD)
        put_words(query, column, columns, padded, _ZERO if bound == _ZERO else _WORD / bound, to)
        if offset > 0:
            blocks = padded // SCALED_TOGETHER
            place = to + MAX_COLUMNS * padded * 2 + (column // columns * blocks * columns + column % columns) * 4
            for block in range(blocks):
                total = 0
                for word in range(block * 64, block * 64 + 64, 2):
                    total += get_i16(query + word)
                put_i32(place + block * columns * 4, -offset * total)

    return put


def scores(packing: Packing, columns: int, value_bytes: int) -> Any:
    """Function that computes a span's scores, [column][token], and prefetches its values and the next keys.

    value_bytes: bytes of a page of values for each of D, without scales.
    """
    rows, tile = VECTORS // columns, VECTORS
    number_bytes, offset, add_keys = packing.number_bytes, packing.offset, packing.keys(columns)
    key_lines, value_lines, value_step = 8 * number_bytes // 64, 8 * value_bytes // 64, 2 * value_bytes

    @inner
    def score(pages: Any, storage: Any, used: int, queries: int, scales: int, out: int, memory: int) -> None:
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
                first = queries + MAX_COLUMNS * padded * 2 + g * (padded // SCALED_TOGETHER) * columns * 4
                for block in range(padded // SCALED_TOGETHER):
                    integers = zero_tile_i32(tile)
                    if offset > 0:
                        integers = cross_splat_i32(integers, key, first + block * columns * 4)
                    for pair in range(block * 16, block * 16 + 16, 4):
                        if g == 0:
                            prefetch_rows(following, pair * (2 * number_bytes), key_lines, 1)
                            prefetch_rows(value, pair * value_step, value_lines, 1)
                        integers = add_keys(integers, key, pair, query + pair * 4 * columns)
                    acc = cross_scale_f16(acc, integers, key, padded * number_bytes + block * PAGE_TOKENS * 2)
                place = out + g * columns * SPAN_BYTES + p * PAGE_TOKENS * 4
                row = spaced_rows(no_rows(rows), place, PAGE_TOKENS * 4, rows)
                cross_store_scaled(acc, row, SPAN_BYTES, scales + g * columns * 4)

    return score


@inner
def _token_scales(pages: Any, values: int, value_bytes: int, offset: int, low: int, high: int, out: int) -> np.float32:
    """Write the scales of the span's tokens low..high-1, divided by the largest and times 32767; return the largest.

    offset: of the scales in a page. Other tokens get 0 and do not affect the largest, so that tokens after a row do not
    change its result.
    """
    table, count, _ = pages
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


def _rounding(packing: Packing) -> Any:
    """Function that rounds weights times a block's scales to words."""
    number_bytes, offset = packing.number_bytes, packing.offset

    @inner
    def round_weights(
        pages: Any, storage: Any, columns: int, group: int, block: int, place: Any, weights: int, memory: int
    ) -> None:
        """Write weights times the block's scales as words, [column][token], and the value of 1 in a column's words.

        memory: scales masked for each row, words, units, initial sums.
        """
        _, count, _ = pages
        _, values, _, value_bytes, padded, _ = storage
        words = memory + MAX_COLUMNS * SPAN_BYTES
        units = words + MAX_COLUMNS * WORDS_BYTES
        tokens = count * PAGE_TOKENS
        in_page = padded * number_bytes + block * PAGE_TOKENS * 2
        # In most spans every row of a tile sees all tokens, and one copy of the scales serves all rows.
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
                bound = _token_scales(pages, values, value_bytes, in_page, low, high, scales) / _WORD
            put_f32(units + 4 * c, bound)
            total = zero_i32()
            for t in range(0, tokens, PAGE_TOKENS):
                weight = mul_f32(load_f32(weights + c * SPAN_BYTES + t * 4), load_f32(scales + t * 4))
                rounded = round_i32(weight)
                store_i16(words + c * WORDS_BYTES + t * 2, rounded)
                if offset > 0:
                    total = add_i32(total, rounded)
            if offset > 0:
                put_i32(units + MAX_COLUMNS * 4 + 4 * c, -offset * sum_i32(total))

    return round_weights


def outputs(packing: Packing, columns: int, key_bytes: int) -> Any:
    """Function that computes outputs [column][D] = weights [column][token] . values of a span.

    With few columns memory is the bottleneck, so the function prefetches the next span's keys. key_bytes: bytes of a
    page of keys for each of D.
    """
    rows = _VALUE_ROWS[columns]
    tile = rows * columns
    offset, add_values, round_weights = packing.offset, packing.values(rows), _rounding(packing)
    hurries = columns < VECTORS
    ahead_bytes = 16 * rows * key_bytes
    ahead_lines = -(-ahead_bytes // 64)

    @inner
    def weigh(pages: Any, storage: Any, used: int, group: int, place: Any, weights: int, out: int, memory: int) -> None:
        table, count, left = pages
        keys, values, page_bytes, value_bytes, padded, _ = storage
        words = memory + MAX_COLUMNS * SPAN_BYTES
        units = words + MAX_COLUMNS * WORDS_BYTES
        for block in range(padded // SCALED_TOGETHER):
            round_weights(pages, storage, used, group, block, place, weights, memory)
            for j in range(2 * block, 2 * block + 2, rows):
                for g in range((used + columns - 1) // columns):
                    integers = zero_tile_i32(tile)
                    if offset > 0:
                        first = units + (MAX_COLUMNS + g * columns) * 4
                        integers = cross_splat_i32(integers, no_rows(rows), first)
                    for p in range(count):
                        page = values + get_i32(table + 4 * p) * value_bytes
                        if hurries and g == 0:
                            at = table + 4 * (count + p)
                            following = page_rows(no_rows(1), at, left - 1 - count - p, keys, page_bytes)
                            prefetch_rows(following, j // rows * ahead_bytes, ahead_lines, 2)
                        integers = add_values(
                            integers, page, j, words + g * columns * WORDS_BYTES + p * PAGE_TOKENS * 2
                        )
                    row = spaced_rows(no_rows(rows), out + g * columns * padded * 4 + j * 64, 64, rows)
                    cross_store_scaled(tile_to_f32(integers), row, padded * 4, units + g * columns * 4)

    return weigh
