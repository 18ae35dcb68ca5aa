"""Gated short convolutions: a row's input is gated, convolved with those of the K - 1 previous rows, and gated again.

A row's gated input, bx = b * x, is needed by the next K - 1 rows of its sequence. Each page of tokens keeps the last
K - 1 rows written to it, with position p in slot p % (K - 1). So a continued sequence finds its previous rows in its
last page and the page before, and a full page holds all that is needed to continue after it.

Threads divide the columns, which are independent: a row is summed in a fixed order whether its predecessors are in this
step or in pages.
"""

from collections.abc import Iterator

import numpy as np

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.declarations import inner
from cpu_kernels.kernel import kernel
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.records import Step, argument, field
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import fma, mul_f32
from cpu_kernels.simd.vectors import get_i32, load_f32, store_f32

_SEGMENT_BYTES = 4 * 8


class ShortConvolution(Arguments):
    """Arguments of short_convolution."""

    rows: int  # of b, c and x, overwritten with the result, c, and bx
    stride: int  # bytes from row to row
    width_bytes: int  # of each of b, c and x
    weights: int  # floats [K][width], of the oldest row first
    reach: int  # K: rows that the convolution reads
    vectors: int  # of sixteen floats in a row
    pages: int  # the layer's pages in the first group
    page_bytes: int  # bytes of a page
    group_bytes: int  # from one group of pages to the next
    places: int  # place numbers that a group spans in a page table
    states: int  # out: after each row [row][K - 1][width]
    kept: int  # rows whose states are kept


_CONV = indices_of(ShortConvolution)


@inner
def _slot(op: int, table: int, position: int) -> int:
    """Address of a position's row in its page."""
    place, group_places = get_i32(table + position // PAGE_TOKENS * 4), argument(op, _CONV.places)
    page = (
        argument(op, _CONV.pages)
        + place // group_places * argument(op, _CONV.group_bytes)
        + place % group_places * argument(op, _CONV.page_bytes)
    )
    return page + position % (argument(op, _CONV.reach) - 1) * argument(op, _CONV.width_bytes)


@inner
def _copy(source: int, target: int, first: int, last: int) -> None:
    for v in range(first, last):
        store_f32(target + v * 64, load_f32(source + v * 64))


@inner
def _row_before(op: int, segment: int, index: int, back: int) -> int:
    """Address of bx of the row `back` rows before row `index` of a segment: in this step's rows, or in a page."""
    if back <= index:
        return (
            argument(op, _CONV.rows)
            + (field(segment, 0) + index - back) * argument(op, _CONV.stride)
            + 2 * argument(op, _CONV.width_bytes)
        )
    return _slot(op, field(segment, 3), field(segment, 2) + index - back)


@inner
def _convolve(op: int, segment: int, index: int, first: int, last: int) -> None:
    """Compute vectors first..last-1 of a row. Overwrites x with bx and b with the gated sum."""
    part, reach = argument(op, _CONV.width_bytes), argument(op, _CONV.reach)
    width = argument(op, _CONV.vectors) * 64
    b = argument(op, _CONV.rows) + (field(segment, 0) + index) * argument(op, _CONV.stride)
    c, x = b + part, b + 2 * part
    weight = argument(op, _CONV.weights) + (reach - 1) * width
    for v in range(first, last):
        bx = mul_f32(load_f32(b + v * 64), load_f32(x + v * 64))
        store_f32(x + v * 64, bx)
        store_f32(b + v * 64, mul_f32(load_f32(weight + v * 64), bx))
    for back in range(1, min(reach, field(segment, 2) + index + 1)):
        before = _row_before(op, segment, index, back)
        weight = argument(op, _CONV.weights) + (reach - 1 - back) * width
        for v in range(first, last):
            total = fma(load_f32(weight + v * 64), load_f32(before + v * 64), load_f32(b + v * 64))
            store_f32(b + v * 64, total)
    for v in range(first, last):
        store_f32(b + v * 64, mul_f32(load_f32(c + v * 64), load_f32(b + v * 64)))


@inner
def _keep(op: int, segment: int, index: int, first: int, last: int) -> None:
    """Save what later rows may need: bx in the row's page, and the state after the row, unless it is the last."""
    count, position, kept = field(segment, 1), field(segment, 2) + index, argument(op, _CONV.reach) - 1
    row = field(segment, 0) + index
    if index < count - 1 and row < argument(op, _CONV.kept):
        state = argument(op, _CONV.states) + row * kept * argument(op, _CONV.width_bytes)
        for back in range(min(kept, position + 1)):
            place = state + (position - back) % kept * argument(op, _CONV.width_bytes)
            _copy(_row_before(op, segment, index, back), place, first, last)
    if index >= count - kept or position % PAGE_TOKENS >= PAGE_TOKENS - kept:
        _copy(_row_before(op, segment, index, 0), _slot(op, field(segment, 3), position), first, last)


def _samples() -> Iterator[Sample]:
    for reach, start, rows in ((3, 0, 5), (3, 14, 5), (4, 17, 1), (2, 31, 2)):
        s = Sample(rows=rows)
        table = s.array([1, 0, 3], np.int32)
        s.step({Step.SEGMENTS: s.array([0, rows, start, table], np.int64), Step.SEGMENT_COUNT: 1})
        page, width = (reach - 1) * 128, 32
        pages, states = s.normal(2, 2, (reach - 1) * width), s.zeros(3 * (reach - 1) * width)
        places = (pages, page, 2 * page, 2)
        yield s.arguments(s.normal(rows, 3, width), 384, 128, s.normal(reach, width), reach, 2, *places, states, 3)


@kernel(ShortConvolution, _samples)
def short_convolution(op: int, step: int, thread: int, threads: int) -> None:
    """Convolve all rows, each segment's in order."""
    vectors = argument(op, _CONV.vectors)
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for number in range(field(step, Step.SEGMENT_COUNT)):
            segment = field(step, Step.SEGMENTS) + number * _SEGMENT_BYTES
            for index in range(field(segment, 1)):
                _convolve(op, segment, index, first, last)
                _keep(op, segment, index, first, last)
        first, last = next_share(op, step, vectors, thread, threads)
