"""Weighted sums of values that are the first numbers of the keys, read from the pages of keys.

Latent attention (DeepSeek 2) stores one row per token, shared by all heads: it is the key, and its first numbers are
the value. A page of keys has a token in each lane, so weights are multiplied lane by lane and the lanes are summed at
the end of a span. Since many heads share a row, memory is not the bottleneck: q8_0 bytes are converted to floats here.
"""

from typing import Any

from cpu_kernels.attention_shape import SPAN_BYTES, VECTORS
from cpu_kernels.declarations import inner
from cpu_kernels.isa import POLICY
from cpu_kernels.kv_types import PAGE_TOKENS, SCALED_TOGETHER, KVType
from cpu_kernels.simd.arithmetic import mul_f32
from cpu_kernels.simd.cross import no_rows, spaced_rows
from cpu_kernels.simd.lanes import lanes_fma_f16, lanes_fma_i8, store_sums
from cpu_kernels.simd.tiles import zero_tile_f32
from cpu_kernels.simd.vectors import get_i32, load_f16, load_f32, store_f32

# Each row and each column loads a vector, so a square tile loads the fewest; it is as large as registers allow.
_TILE = 2 * VECTORS if POLICY.vector_parts == 1 else VECTORS
_MOST_COLUMNS = 4 if POLICY.vector_parts == 1 else 2


def outputs(columns: int, kind: KVType) -> Any:
    """Function that computes outputs [column][D] = weights [column][token] . values of a span, for d < `size`."""
    return _halves(min(columns, _MOST_COLUMNS)) if kind is KVType.F16 else _bytes(min(columns, _MOST_COLUMNS))


def _halves(columns: int) -> Any:
    rows = _TILE // columns

    @inner
    def weigh(pages: Any, storage: Any, used: int, group: int, place: Any, weights: int, out: int, memory: int) -> None:
        table, count, _ = pages
        keys, _, page_bytes, _, padded, size = storage
        for d in range(0, size, rows):
            for g in range(0, used, columns):
                acc = zero_tile_f32(_TILE)
                for p in range(count):
                    page = keys + get_i32(table + 4 * p) * page_bytes + d * PAGE_TOKENS * 2
                    value = spaced_rows(no_rows(rows), page, PAGE_TOKENS * 2, padded - 1 - d)
                    acc = lanes_fma_f16(acc, value, 0, weights + g * SPAN_BYTES + p * PAGE_TOKENS * 4, SPAN_BYTES)
                store_sums(acc, columns, out + g * padded * 4 + d * 4, padded * 4)

    return weigh


@inner
def _scale_weights(pages: Any, storage: Any, used: int, block: int, weights: int, out: int) -> None:
    """Multiply a span's weights by its tokens' scales for one block of 32 values."""
    table, count, _ = pages
    keys, _, page_bytes, _, padded, _ = storage
    offset = padded * PAGE_TOKENS + block * PAGE_TOKENS * 2
    for p in range(count):
        scales = load_f16(keys + get_i32(table + 4 * p) * page_bytes + offset)
        for c in range(used):
            at = c * SPAN_BYTES + p * PAGE_TOKENS * 4
            store_f32(out + at, mul_f32(load_f32(weights + at), scales))


def _bytes(columns: int) -> Any:
    rows = _TILE // columns
    pairs = rows // 2

    @inner
    def weigh(pages: Any, storage: Any, used: int, group: int, place: Any, weights: int, out: int, memory: int) -> None:
        table, count, _ = pages
        keys, _, page_bytes, _, padded, size = storage
        for block in range((size + SCALED_TOGETHER - 1) // SCALED_TOGETHER):
            _scale_weights(pages, storage, used, block, weights, memory)
            for d in range(block * SCALED_TOGETHER, (block + 1) * SCALED_TOGETHER, rows):
                for g in range(0, used, columns):
                    acc = zero_tile_f32(_TILE)
                    for p in range(count):
                        page = keys + get_i32(table + 4 * p) * page_bytes + d * PAGE_TOKENS
                        value = spaced_rows(no_rows(pairs), page, PAGE_TOKENS * 2, pairs)
                        acc = lanes_fma_i8(acc, value, 0, memory + g * SPAN_BYTES + p * PAGE_TOKENS * 4, SPAN_BYTES)
                    store_sums(acc, columns, out + g * padded * 4 + d * 4, padded * 4)

    return weigh
