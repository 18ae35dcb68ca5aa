"""Keys and values as 16-bit words, with one factor (scale) for each token of a head.

Queries, and attention weights times their values' factors, are rounded to words too. Products are summed as integers,
which is exact, so that every instruction set gives the same bits. No sum overflows 32 bits:

- Keys and queries have a Euclidean norm of at most NORM, so a score is below NORM**2 (see cpu_kernels.words).
- Values are at most LARGEST, and the weights of PART_PAGES pages add up to at most TOTAL.

Rounding a key or a query adds an error of 6e-6 |q| |k| to a score (standard deviation); half precision adds 1.2e-5 for
keys of 128 ordinary numbers. Storing values adds 3.5e-5 of their token's largest, rounding weights at most 1.4e-4 of
the output. The total is 0.3 to 0.9 times the error of half precision alone. It is up to 2.6 times as large if one
number of a key is 100 times as large as the others and queries are close to zero at its index.
"""

from typing import Any

import numpy as np

from cpu_kernels.attention_blocks import WORDS_BYTES, put_words
from cpu_kernels.attention_shape import MAX_COLUMNS, SPAN_BYTES, SPAN_PAGES, rows_of
from cpu_kernels.declarations import inner
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.simd.arithmetic import (
    add_f32,
    largest_f32,
    max_f32,
    mul_f32,
    round_i32,
    sum_f32,
)
from cpu_kernels.simd.cross import (
    cross_add_scaled,
    cross_dot2_i16,
    cross_scaled_f32,
    cross_store_scaled,
    no_rows,
    page_rows,
    prefetch_rows,
    spaced_rows,
    tile_to_f32,
)
from cpu_kernels.simd.tiles import zero_tile_i32
from cpu_kernels.simd.vectors import (
    get_i32,
    load_f32,
    put_f32,
    scatter_i16,
    scatter_i16x2,
    splat_f32,
    store_f32,
    store_i16,
    zero_f32,
)
from cpu_kernels.words import LEAST, WORD, largest_of, reciprocal, unit_of

VALUE_BYTES = PAGE_BYTES_PER_VALUE = 32
"""Bytes of a page for each of D, without factors."""

_ZERO = np.float32(0.0)
LARGEST = np.float32(8191.0)
TOTAL = np.float32(262000.0)
PART_PAGES = 8
"""Pages whose weighted values are summed as integers before they become floats."""

MEMORY_BYTES = MAX_COLUMNS * (WORDS_BYTES + 4 * SPAN_PAGES // PART_PAGES) + SPAN_BYTES
"""Scratch for a span's weights: words, their units, and the tokens' factors."""


@inner
def store_key(key: int, page: int, slot: int, padded: int, memory: int) -> None:
    """Write a token's key, D floats, into its page."""
    unit = unit_of(key, padded)
    inverse = splat_f32(reciprocal(unit))
    for i in range(0, padded, 16):
        words = round_i32(mul_f32(load_f32(key + i * 4), inverse))
        scatter_i16x2(page + i // 2 * PAGE_TOKENS * 4 + slot * 4, PAGE_TOKENS * 4, words)
    put_f32(page + padded * VALUE_BYTES + slot * 4, unit)


@inner
def store_value(value: int, page: int, slot: int, padded: int, memory: int) -> None:
    """Write a token's value, D floats, into its page."""
    bound = largest_of(value, padded)
    unit = _ZERO if bound < LEAST else bound / LARGEST
    inverse = splat_f32(reciprocal(unit))
    for i in range(0, padded, 16):
        words = round_i32(mul_f32(load_f32(value + i * 4), inverse))
        scatter_i16(page + i * PAGE_TOKENS * 2 + slot // 2 * 64 + slot % 2 * 2, 4, words)
    put_f32(page + padded * VALUE_BYTES + slot * 4, unit)


def queries(columns: int) -> Any:
    """Function that rounds a query of D floats to words in its column, [group of columns][D / 2][column][2].

    Writes the unit of the column's words to scales + 4 * column.
    """

    @inner
    def put(query: int, column: int, padded: int, to: int, scales: int) -> None:
        unit = unit_of(query, padded)
        put_f32(scales + 4 * column, unit)
        put_words(query, column, columns, padded, reciprocal(unit), to)

    return put


def scores(columns: int, value_bytes: int) -> Any:
    """Function that computes a span's scores, [column][token], and prefetches its values and the next keys.

    value_bytes: bytes of a page of values for each of D, without scales.
    """
    rows = rows_of(columns)
    tile = rows * columns
    value_step, value_lines, number_bytes = 2 * value_bytes, -(-8 * value_bytes // 64), value_bytes

    @inner
    def score(pages: Any, storage: Any, used: int, queries: int, scales: int, out: int, memory: int) -> None:
        table, count, ahead = pages
        keys, values, key_bytes, value_bytes, padded, _ = storage
        for p in range(0, count, rows):
            at = table + 4 * p
            key = page_rows(no_rows(rows), at, count - 1 - p, keys, key_bytes)
            following = page_rows(no_rows(rows), at + 4 * rows, ahead - 1 - p - rows, keys, key_bytes)
            value = page_rows(no_rows(rows), at, count - 1 - p, values, value_bytes)
            prefetch_rows(following, padded * VALUE_BYTES, 1, 1)
            prefetch_rows(value, padded * number_bytes, 1, 1)
            for g in range((used + columns - 1) // columns):
                acc = zero_tile_i32(tile)
                query = queries + g * padded * columns * 2
                for pair in range(0, padded // 2, 4):
                    if g == 0:
                        prefetch_rows(following, pair * 64, 4, 1)
                        prefetch_rows(value, pair * value_step, value_lines, 1)
                    word = query + pair * 4 * columns
                    acc = cross_dot2_i16(acc, key, pair * 64, word, 4)
                    acc = cross_dot2_i16(acc, key, pair * 64 + 64, word + 4 * columns, 4)
                    acc = cross_dot2_i16(acc, key, pair * 64 + 128, word + 8 * columns, 4)
                    acc = cross_dot2_i16(acc, key, pair * 64 + 192, word + 12 * columns, 4)
                place = out + g * columns * SPAN_BYTES + p * PAGE_TOKENS * 4
                row = spaced_rows(no_rows(rows), place, PAGE_TOKENS * 4, rows)
                scaled = cross_scaled_f32(acc, key, padded * VALUE_BYTES)
                cross_store_scaled(scaled, row, SPAN_BYTES, scales + g * columns * 4)

    return score


@inner
def _round_weights(pages: Any, storage: Any, columns: int, weights: int, memory: int) -> None:
    """Round a span's weights times the values' factors to words. Units are [part][column]; a part is PART_PAGES pages.

    memory: words [column][token], units, factors.
    """
    table, count, _ = pages
    _, values, _, value_bytes, padded, _ = storage
    units = memory + MAX_COLUMNS * WORDS_BYTES
    factors = units + MAX_COLUMNS * 4 * (SPAN_PAGES // PART_PAGES)
    for p in range(count):
        page = values + get_i32(table + 4 * p) * value_bytes
        store_f32(factors + p * 64, load_f32(page + padded * VALUE_BYTES))
    for c in range(columns):
        for first in range(0, count, PART_PAGES):
            last = min(count, first + PART_PAGES)
            total, largest = zero_f32(), zero_f32()
            for p in range(first, last):
                at = weights + c * SPAN_BYTES + p * 64
                weight = mul_f32(load_f32(at), load_f32(factors + p * 64))
                store_f32(at, weight)
                total, largest = add_f32(total, weight), max_f32(largest, weight)
            unit = max(sum_f32(total) / TOTAL, largest_f32(largest) / WORD)
            put_f32(units + (first // PART_PAGES * MAX_COLUMNS + c) * 4, unit)
            inverse = splat_f32(reciprocal(unit))
            for p in range(first, last):
                weight = mul_f32(load_f32(weights + c * SPAN_BYTES + p * 64), inverse)
                store_i16(memory + c * WORDS_BYTES + p * 32, round_i32(weight))


def outputs(columns: int, key_bytes: int) -> Any:
    """Function that computes outputs [column][D] = weights [column][token] . values of a span.

    Prefetching the next span's keys, as cpu_kernels.attention_blocks does, costs more than it gains: key_bytes is not
    used.
    """
    rows = rows_of(columns)
    tile = rows * columns

    @inner
    def weigh(pages: Any, storage: Any, used: int, group: int, place: Any, weights: int, out: int, memory: int) -> None:
        table, count, _ = pages
        _, values, _, value_bytes, padded, _ = storage
        vectors = padded // 16
        units = memory + MAX_COLUMNS * WORDS_BYTES
        _round_weights(pages, storage, used, weights, memory)
        for first in range(0, count, PART_PAGES):
            last = min(count, first + PART_PAGES)
            for j in range(0, vectors, rows):
                for g in range((used + columns - 1) // columns):
                    acc = zero_tile_i32(tile)
                    for p in range(first, last):
                        page = values + get_i32(table + 4 * p) * value_bytes + j * 512
                        value = spaced_rows(no_rows(rows), page, 512, vectors - 1 - j)
                        word = memory + g * columns * WORDS_BYTES + p * 32
                        for pair in range(0, PAGE_TOKENS // 2, 4):
                            at, pairs = pair * 64, word + pair * 4
                            acc = cross_dot2_i16(acc, value, at, pairs, WORDS_BYTES)
                            acc = cross_dot2_i16(acc, value, at + 64, pairs + 4, WORDS_BYTES)
                            acc = cross_dot2_i16(acc, value, at + 128, pairs + 8, WORDS_BYTES)
                            acc = cross_dot2_i16(acc, value, at + 192, pairs + 12, WORDS_BYTES)
                    to = out + g * columns * padded * 4 + j * 64
                    row = spaced_rows(no_rows(rows), to, 64, vectors - 1 - j)
                    unit = units + (first // PART_PAGES * MAX_COLUMNS + g * columns) * 4
                    if first == 0:
                        cross_store_scaled(tile_to_f32(acc), row, padded * 4, unit)
                    else:
                        cross_add_scaled(tile_to_f32(acc), row, padded * 4, unit)

    return weigh
