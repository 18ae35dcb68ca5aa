"""Scores of keys and sums of values in half precision, all operands rounded to bfloat16, two products at a time.

Queries and keys, weights and values are rounded on their way into the products; sums and the softmax are in single
precision.
"""

from typing import Any

from cpu_kernels.attention_blocks import WORDS_BYTES
from cpu_kernels.attention_f16 import PAGE_BYTES_PER_VALUE, VALUE_BYTES, rows_of
from cpu_kernels.attention_shape import SPAN_BYTES
from cpu_kernels.declarations import inner
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.simd.bf16 import cross_dot2_bf16, store_bf16
from cpu_kernels.simd.cross import cross_store, no_rows, page_rows, prefetch_rows, spaced_rows
from cpu_kernels.simd.tiles import zero_tile_f32
from cpu_kernels.simd.vectors import get_i32, load_f32, put_i32

__all__ = ["PAGE_BYTES_PER_VALUE", "VALUE_BYTES", "outputs", "queries", "scores"]


def queries(columns: int) -> Any:
    """Function that rounds a query of D floats, in place, into its column, [group of columns][D / 2][column][2]."""

    @inner
    def put(query: int, column: int, padded: int, to: int, scales: int) -> None:
        for i in range(0, padded, 16):
            store_bf16(query + i * 2, load_f32(query + i * 4))
        place = to + (column // columns * (padded // 2) * columns + column % columns) * 4
        for pair in range(padded // 2):
            put_i32(place + pair * columns * 4, get_i32(query + pair * 4))

    return put


def scores(columns: int, value_bytes: int) -> Any:
    """Function that computes a span's scores, [column][token], and asks for the pages that come next.

    value_bytes: bytes of a page of values for each of D, scales left out.
    """
    rows = rows_of(columns)
    tile = rows * columns
    value_step, value_lines = value_bytes, -(-8 * value_bytes // 64)

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
                for d in range(0, padded, 8):
                    if g == 0:
                        prefetch_rows(following, d * 32, 4, 1)
                        prefetch_rows(value, d * value_step, value_lines, 1)
                    acc = cross_dot2_bf16(acc, key, d * 32, query + d * 2 * columns, 4)
                    acc = cross_dot2_bf16(acc, key, d * 32 + 64, query + d * 2 * columns + 4 * columns, 4)
                    acc = cross_dot2_bf16(acc, key, d * 32 + 128, query + d * 2 * columns + 8 * columns, 4)
                    acc = cross_dot2_bf16(acc, key, d * 32 + 192, query + d * 2 * columns + 12 * columns, 4)
                place = out + g * columns * SPAN_BYTES + p * PAGE_TOKENS * 4
                cross_store(acc, spaced_rows(no_rows(rows), place, PAGE_TOKENS * 4, rows), SPAN_BYTES)

    return score


def outputs(columns: int, key_bytes: int) -> Any:
    """Function that computes outputs [column][D] = weights [column][token] . values of a span; key_bytes is not used."""
    rows = rows_of(columns)
    tile = rows * columns

    @inner
    def weigh(pages: Any, storage: Any, used: int, group: int, place: Any, weights: int, out: int, memory: int) -> None:
        table, count, _ = pages
        _, values, _, value_bytes, padded, _ = storage
        vectors = padded // 16
        for c in range(used):
            for t in range(0, count * PAGE_TOKENS, 16):
                store_bf16(memory + c * WORDS_BYTES + t * 2, load_f32(weights + c * SPAN_BYTES + t * 4))
        for j in range(0, vectors, rows):
            for g in range((used + columns - 1) // columns):
                acc = zero_tile_f32(tile)
                for p in range(count):
                    page = values + get_i32(table + 4 * p) * value_bytes + j * PAGE_TOKENS * 32
                    value = spaced_rows(no_rows(rows), page, PAGE_TOKENS * 32, vectors - 1 - j)
                    words = memory + g * columns * WORDS_BYTES + p * PAGE_TOKENS * 2
                    for token in range(0, PAGE_TOKENS, 8):
                        pair = words + token * 2
                        acc = cross_dot2_bf16(acc, value, token * 32, pair, WORDS_BYTES)
                        acc = cross_dot2_bf16(acc, value, token * 32 + 64, pair + 4, WORDS_BYTES)
                        acc = cross_dot2_bf16(acc, value, token * 32 + 128, pair + 8, WORDS_BYTES)
                        acc = cross_dot2_bf16(acc, value, token * 32 + 192, pair + 12, WORDS_BYTES)
                to = out + g * columns * padded * 4 + j * 64
                cross_store(acc, spaced_rows(no_rows(rows), to, 64, vectors - 1 - j), padded * 4)

    return weigh
