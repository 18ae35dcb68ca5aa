"""One span of attention: at most 64 pages against the columns of a tile, with a running softmax.

Scores are in base 2. A column's sums are added token by token in a fixed order; how many pages or values are worked on
side by side changes only which chains of additions run at the same time.
"""

import math
from typing import Any

import numpy as np

from cpu_kernels.kernel import inner
from cpu_kernels.rope import PAGE_TOKENS
from cpu_kernels.simd.arithmetic import (
    add_f32,
    div_f32,
    exp2_f32,
    fma,
    largest_f32,
    max_f32,
    mul_f32,
    prefetch_lines,
    select_first,
    sub_f32,
    sum_f32,
)
from cpu_kernels.simd.tiles import tile_fma_broadcast, tile_load_scaled, tile_store, tile_width
from cpu_kernels.simd.vectors import get_f32, get_i32, load_f16, load_f32, put_f32, splat_f32, store_f32, zero_f32

MAX_COLUMNS = 16
CHUNK_PAGES = 8
SPAN_PAGES = 64
CHUNK_BYTES = CHUNK_PAGES * PAGE_TOKENS * 4
LOWEST = np.float32(-1e30)
STATE_BYTES = 5 * 64
"""State: maxima, sums and corrections of a span; maxima and sums of all spans; sixteen columns each."""
# Tiles of up to this many columns work on four pages, and on four vectors of values, side by side: fewer chains of
# dependent additions than the processor can keep in flight would wait for each other.
_NARROW = 4
_TOGETHER = 4
_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_TWO_LOG2E = np.float32(2.0 * math.log2(math.e))


@inner
def _soft_cap(x: Any, cap: np.float32) -> Any:
    """cap * tanh(x / cap) for scores in base e, times log2(e)."""
    power = exp2_f32(mul_f32(x, splat_f32(_TWO_LOG2E / cap)))
    ratio = div_f32(splat_f32(_TWO), add_f32(splat_f32(_ONE), power))
    return mul_f32(splat_f32(cap * _TWO_LOG2E / _TWO), sub_f32(splat_f32(_ONE), ratio))


@inner
def _mask(x: Any, outside: Any, low: int, high: int) -> Any:
    """Lanes low..high-1 of x, `outside` elsewhere."""
    return select_first(outside, select_first(x, outside, high), low)


@inner
def _softmax(columns: int, group: int, pages: int, place: Any, cap: np.float32, scores: int, state: int) -> None:
    """Turn a chunk's scores into weights and update each column's maximum, sum and correction.

    place: (first token of the chunk, first row's position, window or 0). state: maxima, sums, corrections.
    """
    start, position, window = place
    lowest = splat_f32(LOWEST)
    old = load_f32(state)
    for c in range(columns):
        row = scores + c * CHUNK_BYTES
        high = position + c // group + 1 - start
        low = high - window if window > 0 else 0
        largest = lowest
        for page in range(pages):
            at = page * PAGE_TOKENS
            x = load_f32(row + at * 4)
            if cap > _ZERO:
                x = _soft_cap(x, cap)
            x = _mask(x, lowest, low - at, high - at)
            store_f32(row + at * 4, x)
            largest = max_f32(largest, x)
        put_f32(state + 4 * c, max(get_f32(state + 4 * c), largest_f32(largest)))
    store_f32(state + 128, exp2_f32(sub_f32(old, load_f32(state))))
    for c in range(columns):
        row = scores + c * CHUNK_BYTES
        high = position + c // group + 1 - start
        low = high - window if window > 0 else 0
        maximum = splat_f32(get_f32(state + 4 * c))
        total = zero_f32()
        for page in range(pages):
            at = page * PAGE_TOKENS
            weight = _mask(exp2_f32(sub_f32(load_f32(row + at * 4), maximum)), zero_f32(), low - at, high - at)
            store_f32(row + at * 4, weight)
            total = add_f32(total, weight)
        put_f32(state + 64 + 4 * c, get_f32(state + 64 + 4 * c) * get_f32(state + 128 + 4 * c) + sum_f32(total))


@inner
def _scores(zero: Any, pages: Any, count: int, storage: Any, queries: int, out: int) -> None:
    """out[column][page][token] = query . key for `count` pages from the first one; their values are asked for."""
    table, first, end = pages
    keys, values, page_bytes, padded = storage
    at = table + 4 * first
    stride = padded * 4
    page_scores = PAGE_TOKENS * 4
    p = 0
    if tile_width(zero) <= _NARROW:
        while p + _TOGETHER <= count:
            k0 = keys + get_i32(at + 4 * p) * page_bytes
            k1 = keys + get_i32(at + 4 * p + 4) * page_bytes
            k2 = keys + get_i32(at + 4 * p + 8) * page_bytes
            k3 = keys + get_i32(at + 4 * p + 12) * page_bytes
            a0 = zero
            a1 = zero
            a2 = zero
            a3 = zero
            for d in range(padded):
                if d % 2 == 0:
                    for i in range(_TOGETHER):
                        ahead = keys + get_i32(table + 4 * min(first + p + i + _TOGETHER, end - 1)) * page_bytes
                        prefetch_lines(ahead + d * 32, 1)
                        prefetch_lines(values + get_i32(at + 4 * (p + i)) * page_bytes + d * 32, 1)
                query = queries + d * 4
                a0 = tile_fma_broadcast(a0, load_f16(k0 + d * 32), query, stride)
                a1 = tile_fma_broadcast(a1, load_f16(k1 + d * 32), query, stride)
                a2 = tile_fma_broadcast(a2, load_f16(k2 + d * 32), query, stride)
                a3 = tile_fma_broadcast(a3, load_f16(k3 + d * 32), query, stride)
            tile_store(a0, out + p * page_scores, CHUNK_BYTES)
            tile_store(a1, out + (p + 1) * page_scores, CHUNK_BYTES)
            tile_store(a2, out + (p + 2) * page_scores, CHUNK_BYTES)
            tile_store(a3, out + (p + 3) * page_scores, CHUNK_BYTES)
            p += _TOGETHER
    while p < count:
        key = keys + get_i32(at + 4 * p) * page_bytes
        ahead = keys + get_i32(table + 4 * min(first + p + _TOGETHER, end - 1)) * page_bytes
        value = values + get_i32(at + 4 * p) * page_bytes
        acc = zero
        for d in range(padded):
            if d % 2 == 0 and tile_width(zero) < MAX_COLUMNS:
                prefetch_lines(ahead + d * 32, 1)
                prefetch_lines(value + d * 32, 1)
            acc = tile_fma_broadcast(acc, load_f16(key + d * 32), queries + d * 4, stride)
        tile_store(acc, out + p * page_scores, CHUNK_BYTES)
        p += 1


@inner
def _outputs(
    zero: Any, table: int, count: int, values: int, page_bytes: int, padded: int, scores: int, outputs: int, state: int
) -> None:
    """outputs = outputs * correction + weights . values of `count` pages."""
    stride = padded * 4
    corrections = state + 128
    j = 0
    if tile_width(zero) <= _NARROW:
        while j + 16 * _TOGETHER <= padded:
            out = outputs + j * 4
            a0 = tile_load_scaled(zero, out, stride, corrections)
            a1 = tile_load_scaled(zero, out + 64, stride, corrections)
            a2 = tile_load_scaled(zero, out + 128, stride, corrections)
            a3 = tile_load_scaled(zero, out + 192, stride, corrections)
            for p in range(count):
                value = values + get_i32(table + 4 * p) * page_bytes + j * 2
                weight = scores + p * PAGE_TOKENS * 4
                for token in range(PAGE_TOKENS):
                    at = value + token * 2 * padded
                    factor = weight + token * 4
                    a0 = tile_fma_broadcast(a0, load_f16(at), factor, CHUNK_BYTES)
                    a1 = tile_fma_broadcast(a1, load_f16(at + 32), factor, CHUNK_BYTES)
                    a2 = tile_fma_broadcast(a2, load_f16(at + 64), factor, CHUNK_BYTES)
                    a3 = tile_fma_broadcast(a3, load_f16(at + 96), factor, CHUNK_BYTES)
            tile_store(a0, out, stride)
            tile_store(a1, out + 64, stride)
            tile_store(a2, out + 128, stride)
            tile_store(a3, out + 192, stride)
            j += 16 * _TOGETHER
    while j < padded:
        acc = tile_load_scaled(zero, outputs + j * 4, stride, corrections)
        for p in range(count):
            value = values + get_i32(table + 4 * p) * page_bytes + j * 2
            weight = scores + p * PAGE_TOKENS * 4
            for token in range(PAGE_TOKENS):
                acc = tile_fma_broadcast(acc, load_f16(value + token * 2 * padded), weight + token * 4, CHUNK_BYTES)
        tile_store(acc, outputs + j * 4, stride)
        j += 16


@inner
def attend_span(
    zero: Any,
    pages: Any,
    storage: Any,
    columns: int,
    group: int,
    place: Any,
    cap: np.float32,
    memory: int,
) -> None:
    """Running softmax over a span's chunks into outputs, maxima and sums of its own.

    pages: (address of page ids, first page, end). storage: (keys, values, bytes of a page, D). place: (position of the
    first row, window or 0). memory: queries, outputs, totals (16 columns of D each), scores, state.
    """
    table, first, end = pages
    _, values, page_bytes, padded = storage
    position, window = place
    width = tile_width(zero)
    queries = memory
    outputs = queries + MAX_COLUMNS * padded * 4
    scores = outputs + 2 * MAX_COLUMNS * padded * 4
    state = scores + MAX_COLUMNS * CHUNK_BYTES
    for i in range(0, width * padded, 16):
        store_f32(outputs + i * 4, zero_f32())
    store_f32(state, splat_f32(LOWEST))
    store_f32(state + 64, zero_f32())
    for chunk in range(first, end, CHUNK_PAGES):
        count = min(CHUNK_PAGES, end - chunk)
        _scores(zero, (table, chunk, end), count, storage, queries, scores)
        _softmax(columns, group, count, (chunk * PAGE_TOKENS, position, window), cap, scores, state)
        _outputs(zero, table + 4 * chunk, count, values, page_bytes, padded, scores, outputs, state)


@inner
def merge(columns: int, padded: int, outputs: int, totals: int, state: int) -> None:
    """Add a span's outputs to the totals. state: the span's maxima and sums, a correction, total maxima and sums."""
    maxima = max_f32(load_f32(state), load_f32(state + 192))
    old = exp2_f32(sub_f32(load_f32(state + 192), maxima))
    new = exp2_f32(sub_f32(load_f32(state), maxima))
    store_f32(state + 256, fma(load_f32(state + 256), old, mul_f32(load_f32(state + 64), new)))
    store_f32(state + 192, maxima)
    store_f32(state, old)
    store_f32(state + 64, new)
    for c in range(columns):
        a = splat_f32(get_f32(state + 4 * c))
        b = splat_f32(get_f32(state + 64 + 4 * c))
        for i in range(c * padded * 4, (c + 1) * padded * 4, 64):
            store_f32(totals + i, fma(load_f32(outputs + i), b, mul_f32(load_f32(totals + i), a)))
