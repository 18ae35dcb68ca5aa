"""Scores of keys and sums of values in half precision, all operands rounded to bfloat16, two products at a time.

Queries and keys, weights and values are rounded on their way into the products; sums and the softmax are in single
precision.
"""

from typing import Any

from cpu_kernels.attention_blocks import WORDS_BYTES
from cpu_kernels.attention_f16 import PAGE_BYTES_PER_VALUE, VALUE_BYTES, rows_of
from cpu_kernels.attention_shape import MAX_COLUMNS, SPAN_BYTES, SPAN_TOKENS, WIDTHS
from cpu_kernels.declarations import inner
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.simd.bf16 import cross_dot2_bf16, cross_dot2_f16, store_bf16, store_pairs_bf16
from cpu_kernels.simd.cross import cross_store, no_rows, page_rows, prefetch_rows, spaced_rows
from cpu_kernels.simd.tiles import zero_tile_f32
from cpu_kernels.simd.vectors import get_i32, load_f32, put_i32

MEMORY_BYTES = MAX_COLUMNS * WORDS_BYTES + rows_of(WIDTHS[-1]) * SPAN_TOKENS * 32
"""Scratch for a span's weights in bfloat16, and for as many vectors of all values as are multiplied side by side."""

__all__ = ["PAGE_BYTES_PER_VALUE", "VALUE_BYTES", "outputs", "queries", "scores"]


@inner
def _round_weights(columns: int, pages: int, weights: int, out: int) -> None:
    """Weights of a span in bfloat16, [column][token], columns WORDS_BYTES apart."""
    for c in range(columns):
        for token in range(0, pages * PAGE_TOKENS, 16):
            store_bf16(out + c * WORDS_BYTES + token * 2, load_f32(weights + c * SPAN_BYTES + token * 4))


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

    value_bytes: bytes of a page of values for each of D, scales left out. memory: room for 64 * D bytes,
    for keys in pairs.
    """
    rows = rows_of(columns)
    tile = rows * columns
    value_step, value_lines = value_bytes, -(-4 * value_bytes // 64)

    @inner
    def score_few(pages: Any, storage: Any, used: int, queries: int, scales: int, out: int, memory: int) -> None:
        table, count, ahead = pages
        keys, values, key_bytes, value_bytes, padded, _ = storage
        for p in range(0, count, rows):
            at = table + 4 * p
            key = page_rows(no_rows(rows), at, count - 1 - p, keys, key_bytes)
            following = page_rows(no_rows(rows), at + 4 * rows, ahead - 1 - p - rows, keys, key_bytes)
            value = page_rows(no_rows(rows), at, count - 1 - p, values, value_bytes)
            acc = zero_tile_f32(tile)
            for d in range(0, padded, 4):
                prefetch_rows(following, d * 32, 2, 1)
                prefetch_rows(value, d * value_step, value_lines, 1)
                query = queries + d * 2 * columns
                acc = cross_dot2_f16(acc, key, d * 32, query, 4)
                acc = cross_dot2_f16(acc, key, d * 32 + 64, query + 4 * columns, 4)
            place = out + p * PAGE_TOKENS * 4
            cross_store(acc, spaced_rows(no_rows(rows), place, PAGE_TOKENS * 4, rows), SPAN_BYTES)

    @inner
    def score_many(pages: Any, storage: Any, used: int, queries: int, scales: int, out: int, memory: int) -> None:
        table, count, ahead = pages
        keys, values, key_bytes, value_bytes, padded, _ = storage
        page_bytes = padded * PAGE_TOKENS * 2
        pairs = spaced_rows(no_rows(rows), memory, page_bytes, rows)
        for p in range(0, count, rows):
            at = table + 4 * p
            key = page_rows(no_rows(rows), at, count - 1 - p, keys, key_bytes)
            following = page_rows(no_rows(rows), at + 4 * rows, ahead - 1 - p - rows, keys, key_bytes)
            value = page_rows(no_rows(rows), at, count - 1 - p, values, value_bytes)
            for d in range(0, padded, 4):
                prefetch_rows(following, d * 32, 2, 1)
                prefetch_rows(value, d * value_step, value_lines, 1)
                store_pairs_bf16(key, d * 32, memory + d * 32, page_bytes)
                store_pairs_bf16(key, d * 32 + 64, memory + d * 32 + 64, page_bytes)
            for g in range((used + columns - 1) // columns):
                acc = zero_tile_f32(tile)
                for d in range(0, padded, 8):
                    query = queries + (g * padded + d) * columns * 2
                    acc = cross_dot2_bf16(acc, pairs, d * 32, query, 4)
                    acc = cross_dot2_bf16(acc, pairs, d * 32 + 64, query + 4 * columns, 4)
                    acc = cross_dot2_bf16(acc, pairs, d * 32 + 128, query + 8 * columns, 4)
                    acc = cross_dot2_bf16(acc, pairs, d * 32 + 192, query + 12 * columns, 4)
                place = out + g * columns * SPAN_BYTES + p * PAGE_TOKENS * 4
                cross_store(acc, spaced_rows(no_rows(rows), place, PAGE_TOKENS * 4, rows), SPAN_BYTES)

    @inner
    def score(pages: Any, storage: Any, used: int, queries: int, scales: int, out: int, memory: int) -> None:
        if used > columns:
            score_many(pages, storage, used, queries, scales, out, memory)
        else:
            score_few(pages, storage, used, queries, scales, out, memory)

    return score if columns == WIDTHS[-1] else score_few


def outputs(columns: int, key_bytes: int) -> Any:
    """Function that computes outputs [column][D] = weights [column][token] . values of a span; key_bytes is not used.

    memory: for weights in bfloat16, and values in pairs.
    """
    rows = rows_of(columns)
    tile = rows * columns

    @inner
    def weigh_few(
        pages: Any, storage: Any, used: int, group: int, place: Any, weights: int, out: int, memory: int
    ) -> None:
        table, count, _ = pages
        _, values, _, value_bytes, padded, _ = storage
        vectors = padded // 16
        _round_weights(used, count, weights, memory)
        for j in range(0, vectors, rows):
            acc = zero_tile_f32(tile)
            for p in range(count):
                page = values + get_i32(table + 4 * p) * value_bytes + j * PAGE_TOKENS * 32
                value = spaced_rows(no_rows(rows), page, PAGE_TOKENS * 32, vectors - 1 - j)
                for token in range(0, PAGE_TOKENS, 8):
                    pair = memory + (p * PAGE_TOKENS + token) * 2
                    acc = cross_dot2_f16(acc, value, token * 32, pair, WORDS_BYTES)
                    acc = cross_dot2_f16(acc, value, token * 32 + 64, pair + 4, WORDS_BYTES)
                    acc = cross_dot2_f16(acc, value, token * 32 + 128, pair + 8, WORDS_BYTES)
                    acc = cross_dot2_f16(acc, value, token * 32 + 192, pair + 12, WORDS_BYTES)
            cross_store(acc, spaced_rows(no_rows(rows), out + j * 64, 64, vectors - 1 - j), padded * 4)

    @inner
    def weigh_many(
        pages: Any, storage: Any, used: int, group: int, place: Any, weights: int, out: int, memory: int
    ) -> None:
        table, count, _ = pages
        _, values, _, value_bytes, padded, _ = storage
        vectors = padded // 16
        numbers = memory + MAX_COLUMNS * WORDS_BYTES
        pairs = spaced_rows(no_rows(rows), numbers, SPAN_TOKENS * 32, rows)
        _round_weights(used, count, weights, memory)
        for j in range(0, vectors, rows):
            for p in range(count):
                page = values + get_i32(table + 4 * p) * value_bytes + j * PAGE_TOKENS * 32
                value = spaced_rows(no_rows(rows), page, PAGE_TOKENS * 32, vectors - 1 - j)
                for offset in range(0, PAGE_TOKENS * 32, 64):
                    store_pairs_bf16(value, offset, numbers + p * PAGE_TOKENS * 32 + offset, SPAN_TOKENS * 32)
            for g in range((used + columns - 1) // columns):
                acc = zero_tile_f32(tile)
                for token in range(0, count * PAGE_TOKENS, 8):
                    pair = memory + g * columns * WORDS_BYTES + token * 2
                    acc = cross_dot2_bf16(acc, pairs, token * 32, pair, WORDS_BYTES)
                    acc = cross_dot2_bf16(acc, pairs, token * 32 + 64, pair + 4, WORDS_BYTES)
                    acc = cross_dot2_bf16(acc, pairs, token * 32 + 128, pair + 8, WORDS_BYTES)
                    acc = cross_dot2_bf16(acc, pairs, token * 32 + 192, pair + 12, WORDS_BYTES)
                to = out + g * columns * padded * 4 + j * 64
                cross_store(acc, spaced_rows(no_rows(rows), to, 64, vectors - 1 - j), padded * 4)

    @inner
    def weigh(pages: Any, storage: Any, used: int, group: int, place: Any, weights: int, out: int, memory: int) -> None:
        if used > columns:
            weigh_many(pages, storage, used, group, place, weights, out, memory)
        else:
            weigh_few(pages, storage, used, group, place, weights, out, memory)

    return weigh if columns == WIDTHS[-1] else weigh_few
