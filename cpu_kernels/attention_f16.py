"""Scores of latents stored in half precision, computed in single precision. See cpu_kernels.attention_latent."""

from typing import Any

from cpu_kernels.attention_shape import SPAN_BYTES, rows_of
from cpu_kernels.declarations import inner
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.simd.cross import cross_fma_f16, cross_store, no_rows, page_rows, prefetch_rows, spaced_rows
from cpu_kernels.simd.tiles import zero_tile_f32
from cpu_kernels.simd.vectors import get_f32, load_f32, put_f32, scatter_f16

PAGE_BYTES_PER_VALUE = 32
"""Bytes of a page for each of D."""


@inner
def store_key(key: int, page: int, slot: int, padded: int, memory: int) -> None:
    """Write a token's key, D floats, into its page."""
    for i in range(0, padded, 16):
        scatter_f16(page + i * PAGE_TOKENS * 2 + slot * 2, PAGE_TOKENS * 2, load_f32(key + i * 4))


def queries(columns: int) -> Any:
    """Function that copies a query of D floats to its column, [group of columns][D][column]; scales are not used."""

    @inner
    def put(query: int, column: int, padded: int, to: int, scales: int) -> None:
        place = to + (column // columns * padded * columns + column % columns) * 4
        for d in range(padded):
            put_f32(place + d * columns * 4, get_f32(query + d * 4))

    return put


def scores(columns: int, value_bytes: int) -> Any:
    """Function that computes a span's scores, [column][token], and prefetches the next pages.

    A latent's value is part of its key, so value_bytes is not used.
    """
    rows = rows_of(columns)
    tile = rows * columns

    @inner
    def score(pages: Any, storage: Any, used: int, queries: int, scales: int, out: int, memory: int) -> None:
        table, count, ahead = pages
        keys, _, key_bytes, _, padded, _ = storage
        for p in range(0, count, rows):
            at = table + 4 * p
            key = page_rows(no_rows(rows), at, count - 1 - p, keys, key_bytes)
            following = page_rows(no_rows(rows), at + 4 * rows, ahead - 1 - p - rows, keys, key_bytes)
            for g in range((used + columns - 1) // columns):
                acc = zero_tile_f32(tile)
                query = queries + g * padded * columns * 4
                for d in range(0, padded, 4):
                    if g == 0:
                        prefetch_rows(following, d * 32, 2, 1)
                    acc = cross_fma_f16(acc, key, d * 32, query + d * 4 * columns, 4)
                    acc = cross_fma_f16(acc, key, d * 32 + 32, query + d * 4 * columns + 4 * columns, 4)
                    acc = cross_fma_f16(acc, key, d * 32 + 64, query + d * 4 * columns + 8 * columns, 4)
                    acc = cross_fma_f16(acc, key, d * 32 + 96, query + d * 4 * columns + 12 * columns, 4)
                place = out + g * columns * SPAN_BYTES + p * PAGE_TOKENS * 4
                cross_store(acc, spaced_rows(no_rows(rows), place, PAGE_TOKENS * 4, rows), SPAN_BYTES)

    return score
