"""Attention over pages of 16 tokens with a running softmax.

A column is one query head of one row; a kernel works on up to 16 columns that share a key-value head. Tokens are taken
in chunks of 8 pages and spans of 64, both counted from position 0, and partial results are merged in that order: so a
row's result depends neither on the other rows nor on how a prompt was cut. Scores are in base 2.
"""

from typing import Any

import numpy as np

from cpu_kernels.attention_span import (
    CHUNK_BYTES,
    CHUNK_PAGES,
    LOWEST,
    MAX_COLUMNS,
    SPAN_PAGES,
    STATE_BYTES,
    attend_span,
    merge,
)
from cpu_kernels.kernel import Kernel, inner
from cpu_kernels.records import Step, argument, field, scratch
from cpu_kernels.rope import PAGE_TOKENS, owner, rotate_head
from cpu_kernels.simd.arithmetic import mul_f32
from cpu_kernels.simd.tiles import tile_width, zero_tile_f32
from cpu_kernels.simd.vectors import get_f32, load_f32, put_f32, splat_f32, store_f32, zero_f32

_ONE = np.float32(1.0)
_SEGMENTS, _SEGMENT_COUNT, _ROPE_TABLES = int(Step.SEGMENTS), int(Step.SEGMENT_COUNT), int(Step.ROPE_TABLES)
_SEGMENT_FIELDS = 4


def scratch_bytes(padded: int) -> int:
    """Scratch that a thread needs for heads of `padded` values."""
    return MAX_COLUMNS * (3 * padded * 4 + CHUNK_BYTES) + STATE_BYTES


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
    state = totals + MAX_COLUMNS * padded * 4 + MAX_COLUMNS * CHUNK_BYTES
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
    store_f32(state + 192, splat_f32(LOWEST))
    store_f32(state + 256, zero_f32())
    end = (position + count - 1) // PAGE_TOKENS + 1
    begin = max(0, position - window + 1) // PAGE_TOKENS if window > 0 else 0
    for span in range(begin // SPAN_PAGES * SPAN_PAGES, end, SPAN_PAGES):
        start = max(span, begin // CHUNK_PAGES * CHUNK_PAGES)
        attend_span(
            zero,
            (field(segment, 3), start, min(end, span + SPAN_PAGES)),
            (
                argument(op, 3) + head * argument(op, 14),
                argument(op, 4) + head * argument(op, 14),
                padded * PAGE_TOKENS * 2,
                padded,
            ),
            count * mine,
            mine,
            (position, window),
            cap,
            memory,
        )
        merge(count * mine, padded, outputs, totals, state)
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
    11 address of the scale (log2(e) included unless there is a cap), 12 address of the soft cap or 0.0, 13 window or 0,
    14 bytes from one kv head's pages to the next's.
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
