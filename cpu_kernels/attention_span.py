"""The softmax of one span of tokens, and how the results of spans are merged.

Scores are in base 2. A column's sums are added token by token, and span by span, in a fixed order; the number of pages
or columns in a register tile changes only which chains of additions run in parallel.
"""

import math
from typing import Any

import numpy as np

from cpu_kernels.attention_shape import HEADER_BYTES, MAX_COLUMNS, MAXIMA, SPAN_BYTES, SUMS
from cpu_kernels.declarations import inner
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.simd.arithmetic import (
    add_f32,
    div_f32,
    exp2_f32,
    fma,
    largest_f32,
    max_f32,
    mul_f32,
    select_first,
    sub_f32,
    sum_f32,
)
from cpu_kernels.simd.vectors import get_f32, load_f32, put_f32, splat_f32, store_f32, zero_f32

LOWEST = np.float32(-1e30)
_ROW = 4 * MAX_COLUMNS
TOTAL_BYTES = 4 * _ROW
"""Bytes of the merge state: maxima and sums of all columns, factors of the old totals and of the new span."""
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
def _largest(row: int, tokens: int, low: int, high: int, cap: np.float32) -> np.float32:
    """The largest of a column's scores low..high-1. Caps them and sets the others to LOWEST, in place."""
    lowest = splat_f32(LOWEST)
    largest = lowest
    if cap > _ZERO:
        for at in range(0, tokens, PAGE_TOKENS):
            store_f32(row + at * 4, _soft_cap(load_f32(row + at * 4), cap))
    if low > 0 or high < tokens:
        for at in range(0, tokens, PAGE_TOKENS):
            store_f32(row + at * 4, _mask(load_f32(row + at * 4), lowest, low - at, high - at))
    for at in range(0, tokens, PAGE_TOKENS):
        largest = max_f32(largest, load_f32(row + at * 4))
    return largest_f32(largest)


@inner
def first_seen(position: int, window: int) -> int:
    """The first token that a row sees, which may be below 0.

    window: tokens that a row sees up to and including its own, 0 for all, -n for those of its chunk of n tokens.
    """
    if window < 0:
        return position // -window * -window
    return position + 1 - window if window > 0 else 0


@inner
def seen(row: int, place: Any) -> tuple[int, int]:
    """The tokens low..high-1, relative to the span, that a row of a tile sees; both may be outside of the span.

    place: (first token of the span, first row's position, window as for `first_seen`, tokens seen after a row's own,
    tokens in the sequence).
    """
    start, position, window, ahead, end = place
    own = position + row
    return first_seen(own, window) - start, min(own + 1 + ahead, end) - start


@inner
def add_distances(columns: int, group: int, pages: int, place: Any, slopes: int, lanes: int, scores: int) -> None:
    """ALiBi: subtract the distance of token and row, times the head's slope, from a span's scores [column][token].

    slopes: of the columns' heads, in base 2. lanes: address of the numbers 0 to 15. place: see `seen`.
    """
    for c in range(columns):
        row = scores + c * SPAN_BYTES
        slope = splat_f32(get_f32(slopes + 4 * (c % group)))
        first = place[0] - place[1] - c // group
        for at in range(0, pages * PAGE_TOKENS, PAGE_TOKENS):
            ahead = add_f32(splat_f32(np.float32(first + at)), load_f32(lanes))
            distance = max_f32(ahead, sub_f32(zero_f32(), ahead))
            store_f32(row + at * 4, sub_f32(load_f32(row + at * 4), mul_f32(slope, distance)))


@inner
def softmax(columns: int, group: int, pages: int, place: Any, cap: np.float32, scores: int, part: int) -> None:
    """Turn a span's scores [column][token] into weights, and leave each column's maximum and sum in the part's header.

    place: see `seen`.
    """
    tokens = pages * PAGE_TOKENS
    for c in range(columns):
        row = scores + c * SPAN_BYTES
        low, high = seen(c // group, place)
        largest = _largest(row, tokens, low, high, cap)
        maximum = splat_f32(largest)
        total = zero_f32()
        for at in range(0, tokens, PAGE_TOKENS):
            weight = exp2_f32(sub_f32(load_f32(row + at * 4), maximum))
            if low > at or high < at + PAGE_TOKENS:
                weight = _mask(weight, zero_f32(), low - at, high - at)
            store_f32(row + at * 4, weight)
            total = add_f32(total, weight)
        put_f32(part + MAXIMA + 4 * c, largest)
        put_f32(part + SUMS + 4 * c, sum_f32(total))


@inner
def clear(columns: int, padded: int, totals: int, state: int) -> None:
    """Reset totals and state before merging. state: maxima, sums, and space for factors."""
    for i in range(0, columns * padded, 16):
        store_f32(totals + i * 4, zero_f32())
    for i in range(0, columns * 4, 64):
        store_f32(state + i, splat_f32(LOWEST))
        store_f32(state + _ROW + i, zero_f32())


@inner
def add_sinks(columns: int, group: int, sinks: int, state: int) -> None:
    """Start each column with its sink's score as maximum and a sum of 1, but no value.

    sinks: of the heads of the columns, in base 2; columns of one head are `group` apart.
    """
    for c in range(columns):
        put_f32(state + 4 * c, get_f32(sinks + 4 * (c % group)))
        put_f32(state + _ROW + 4 * c, _ONE)


@inner
def add_part(columns: int, padded: int, part: int, totals: int, state: int) -> None:
    """Merge a span's outputs into the totals, rescaling both to the new maxima."""
    for i in range(0, columns * 4, 64):
        before, found = load_f32(state + i), load_f32(part + MAXIMA + i)
        maxima = max_f32(before, found)
        old, new = exp2_f32(sub_f32(before, maxima)), exp2_f32(sub_f32(found, maxima))
        sums = state + _ROW + i
        store_f32(sums, fma(load_f32(sums), old, mul_f32(load_f32(part + SUMS + i), new)))
        store_f32(state + i, maxima)
        store_f32(state + 2 * _ROW + i, old)
        store_f32(state + 3 * _ROW + i, new)
    outputs = part + HEADER_BYTES
    for c in range(columns):
        a = splat_f32(get_f32(state + 2 * _ROW + 4 * c))
        b = splat_f32(get_f32(state + 3 * _ROW + 4 * c))
        for i in range(c * padded * 4, (c + 1) * padded * 4, 64):
            store_f32(totals + i, fma(load_f32(outputs + i), b, mul_f32(load_f32(totals + i), a)))
