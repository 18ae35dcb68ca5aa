"""Attention over pages of 16 tokens with a running softmax.

A column is one query head of one row; a kernel works on up to 16 columns that share a key-value head. Tokens are taken
in chunks of 8 pages and spans of 64, both counted from position 0, and partial results are merged in that order: so a
row's result depends neither on the other rows nor on how a prompt was cut. Scores are in base 2.
"""

import math
from typing import Any

import numpy as np

from cpu_kernels.kernel import Kernel, inner
from cpu_kernels.records import Step, argument, field, scratch
from cpu_kernels.rope import PAGE_TOKENS, owner, rotate_head
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
from cpu_kernels.simd.tiles import (
    tile_fma_broadcast,
    tile_load_scaled,
    tile_store,
    tile_width,
    zero_tile_f32,
)
from cpu_kernels.simd.vectors import (
    get_f32,
    get_i32,
    load_f16,
    load_f32,
    put_f32,
    splat_f32,
    store_f32,
    zero_f32,
)

MAX_COLUMNS = 16
_CHUNK_PAGES = 8
_SPAN_PAGES = 64
_CHUNK_BYTES = _CHUNK_PAGES * PAGE_TOKENS * 4
_PREFETCH_PAGES = 3
_LOWEST = np.float32(-1e30)
_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_TWO_LOG2E = np.float32(2.0 * math.log2(math.e))
_SEGMENTS, _SEGMENT_COUNT, _ROPE_TABLES = int(Step.SEGMENTS), int(Step.SEGMENT_COUNT), int(Step.ROPE_TABLES)
_SEGMENT_FIELDS = 4


def scratch_bytes(padded: int) -> int:
    """Scratch that a thread needs for heads of `padded` values."""
    return MAX_COLUMNS * (3 * padded * 4 + _CHUNK_BYTES) + 5 * 64


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
    lowest = splat_f32(_LOWEST)
    old = load_f32(state)
    for c in range(columns):
        row = scores + c * _CHUNK_BYTES
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
        row = scores + c * _CHUNK_BYTES
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
def _span(
    zero: Any,
    pages: Any,
    keys: int,
    values: int,
    strides: Any,
    columns: int,
    group: int,
    place: Any,
    cap: np.float32,
    memory: int,
) -> None:
    """One span: running softmax over its chunks into outputs, maxima and sums of its own.

    pages: (address of page ids, first page, end). strides: (bytes of a page, D). memory: queries, outputs, totals,
    scores, state.
    """
    table, first, end = pages
    page_bytes, padded = strides
    position, window = place
    width = tile_width(zero)
    queries = memory
    outputs = queries + MAX_COLUMNS * padded * 4
    scores = outputs + 2 * MAX_COLUMNS * padded * 4
    state = scores + MAX_COLUMNS * _CHUNK_BYTES
    for i in range(0, width * padded, 16):
        store_f32(outputs + i * 4, zero_f32())
    store_f32(state, splat_f32(_LOWEST))
    store_f32(state + 64, zero_f32())
    for chunk in range(first, end, _CHUNK_PAGES):
        count = min(_CHUNK_PAGES, end - chunk)
        for p in range(count):
            key = keys + get_i32(table + 4 * (chunk + p)) * page_bytes
            ahead = keys + get_i32(table + 4 * min(chunk + p + _PREFETCH_PAGES, end - 1)) * page_bytes
            value = values + get_i32(table + 4 * (chunk + p)) * page_bytes
            acc = zero
            for d in range(padded):
                if width < MAX_COLUMNS and d % 2 == 0:
                    prefetch_lines(ahead + d * 32, 1)
                    prefetch_lines(value + d * 32, 1)
                acc = tile_fma_broadcast(acc, load_f16(key + d * 32), queries + d * 4, padded * 4)
            tile_store(acc, scores + p * PAGE_TOKENS * 4, _CHUNK_BYTES)
        _softmax(columns, group, count, (chunk * PAGE_TOKENS, position, window), cap, scores, state)
        for j in range(0, padded, 16):
            acc = tile_load_scaled(zero, outputs + j * 4, padded * 4, state + 128)
            for p in range(count):
                value = values + get_i32(table + 4 * (chunk + p)) * page_bytes + j * 2
                weight = scores + p * PAGE_TOKENS * 4
                for token in range(PAGE_TOKENS):
                    vector = load_f16(value + token * 2 * padded)
                    acc = tile_fma_broadcast(acc, vector, weight + token * 4, _CHUNK_BYTES)
            tile_store(acc, outputs + j * 4, padded * 4)


@inner
def _merge(columns: int, padded: int, outputs: int, totals: int, state: int) -> None:
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


@inner
def _attend(
    zero: Any, op: int, step: int, segment: int, first: int, count: int, head: int, block: int, memory: int
) -> None:
    """Rows first..first+count-1 of a segment against one key-value head; `block` is the block of its query heads."""
    padded, size, group = argument(op, 6), argument(op, 7), argument(op, 10)
    kv_heads, cap, window = argument(op, 5), get_f32(argument(op, 12)), argument(op, 13)
    row = field(segment, 0) + first
    position = field(segment, 2) + first
    mine = min(MAX_COLUMNS, group - block * MAX_COLUMNS)
    head0 = head * group + block * MAX_COLUMNS
    queries = memory
    outputs = queries + MAX_COLUMNS * padded * 4
    totals = outputs + MAX_COLUMNS * padded * 4
    state = totals + MAX_COLUMNS * padded * 4 + MAX_COLUMNS * _CHUNK_BYTES
    for i in range(0, tile_width(zero) * padded, 16):
        store_f32(queries + i * 4, zero_f32())
        store_f32(totals + i * 4, zero_f32())
    tables = field(step, _ROPE_TABLES + argument(op, 8))
    for r in range(count):
        for g in range(mine):
            source = argument(op, 0) + ((row + r) * kv_heads * group + head0 + g) * padded * 4
            table = tables + (position + r) * padded * 4
            scale, epsilon = get_f32(argument(op, 11)), get_f32(argument(op, 9))
            to = queries + (r * mine + g) * padded * 4
            rotate_head(source, argument(op, 2), table, padded, size, epsilon, scale, to)
    store_f32(state + 192, splat_f32(_LOWEST))
    store_f32(state + 256, zero_f32())
    head_bytes = padded * PAGE_TOKENS * 2
    end = (position + count - 1) // PAGE_TOKENS + 1
    begin = max(0, position - window + 1) // PAGE_TOKENS if window > 0 else 0
    for span in range(begin // _SPAN_PAGES * _SPAN_PAGES, end, _SPAN_PAGES):
        start = max(span, begin // _CHUNK_PAGES * _CHUNK_PAGES)
        _span(
            zero,
            (field(segment, 3), start, min(end, span + _SPAN_PAGES)),
            argument(op, 3) + head * head_bytes,
            argument(op, 4) + head * head_bytes,
            (head_bytes * kv_heads, padded),
            count * mine,
            mine,
            (position, window),
            cap,
            memory,
        )
        _merge(count * mine, padded, outputs, totals, state)
    for c in range(count * mine):
        inverse = _ONE / get_f32(state + 256 + 4 * c)
        out = argument(op, 1) + ((row + c // mine) * kv_heads * group + head0 + c % mine) * size * 4
        source = totals + c * padded * 4
        if size % 16 == 0:
            for i in range(0, size * 4, 64):
                store_f32(out + i, mul_f32(load_f32(source + i), splat_f32(inverse)))
        else:
            for i in range(0, size * 4, 4):
                put_f32(out + i, get_f32(source + i) * inverse)


def attention_kernel(narrow: int, one_row: bool) -> Kernel:
    """Attention of all segments of a step.

    narrow: columns for segments of one row, at least the query heads that share a key-value head (or 16). one_row: the
    variant for steps of a single row, without the code for wider segments.
    Arguments: 0 queries (rows of heads * D), 1 out (rows of heads * size), 2 norm of queries or 0, 3 key pages,
    4 value pages, 5 kv heads, 6 D, 7 size of a head, 8 rope table, 9 address of epsilon, 10 query heads per kv head,
    11 address of the scale (log2(e) included unless there is a cap), 12 address of the soft cap or 0.0, 13 window or 0.
    """

    def attention(op: int, step: int, thread: int, threads: int) -> None:
        kv_heads, group = argument(op, 5), argument(op, 10)
        blocks = (group + MAX_COLUMNS - 1) // MAX_COLUMNS
        rows_together = max(1, MAX_COLUMNS // group)
        memory = scratch(step, thread)
        item = 0
        for s in range(field(step, _SEGMENT_COUNT)):
            segment = field(step, _SEGMENTS) + s * _SEGMENT_FIELDS * 8
            rows = field(segment, 1)
            for first in range(0, rows, rows_together):
                count = min(rows_together, rows - first)
                for head in range(kv_heads):
                    for block in range(blocks):
                        if owner(item, threads) == thread:
                            if one_row or count == 1:
                                _attend(zero_tile_f32(narrow), op, step, segment, first, count, head, block, memory)
                            else:
                                _attend(zero_tile_f32(16), op, step, segment, first, count, head, block, memory)
                        item += 1

    return Kernel(attention, f"attention.{'row' if one_row else 'rows'}_{narrow}")


NARROW = (1, 2, 4, 8, 16)
ONE_ROW = {narrow: attention_kernel(narrow, one_row=True) for narrow in NARROW}
MANY_ROWS = {narrow: attention_kernel(narrow, one_row=False) for narrow in NARROW}


def attention_kernels(group: int) -> tuple[Kernel, Kernel]:
    """The kernels for one row and for many, for models with `group` query heads to a key-value head."""
    narrow = next((n for n in NARROW if n >= group), MAX_COLUMNS)
    return ONE_ROW[narrow], MANY_ROWS[narrow]
