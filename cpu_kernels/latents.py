"""Kernels around latent attention: storing rows of latents in pages, and packing rows for per-head matrices.

A head's part of a row is multiplied by that head's matrix. So the parts are packed head by head: a slot is a (head,
row) pair, each head's slots begin at a tile's first lane, and a matrix product treats heads like experts
(cpu_kernels.matmul): slot = head * (rows in whole tiles) + row.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from cpu_kernels import attention_f16, attention_q8_0
from cpu_kernels.activations import ALL_FORMS, more_rows_to_pack, norm_row, pack_row, rows_to_pack
from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.declarations import inner
from cpu_kernels.kernel import Function, Kernel, kernel
from cpu_kernels.kv_types import PAGE_TOKENS, KVType
from cpu_kernels.records import Step, activation, argument, field, scratch, stage_rows, stage_width
from cpu_kernels.rope import rotate_head
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.vectors import get_f32, get_i32, load_f32, put_i64, store_f32

_ONE = np.float32(1.0)
_TYPES = {KVType.F16: attention_f16, KVType.Q8_0: attention_q8_0}


class StoreLatents(Arguments):
    """Arguments of the kernels that store latents."""

    rows: int  # of D floats
    stride: int  # bytes from row to row
    norm: int  # weight of the norm of latents
    pages: int  # address of the table of pages
    rank: int  # values of a latent
    padded: int  # D: values of a stored row
    turned: int  # values of the rotated part, the last of D
    rope: int  # number of the rope table in the step record
    epsilon: int  # address of a float


_STORED = indices_of(StoreLatents)


def _store(kind: KVType) -> Function:
    """Function that normalises latents, rotates (RoPE) the key part after them, and writes both as one key into pages.
    Threads divide the rows.
    """
    store_key, page_bytes = _TYPES[kind].store_key, _TYPES[kind].PAGE_BYTES_PER_VALUE

    def store_latents(op: int, step: int, thread: int, threads: int) -> None:
        padded, turned = argument(op, _STORED.padded), argument(op, _STORED.turned)
        plain = padded - turned
        ready = scratch(step, thread)
        rows = stage_rows(op, step)
        first, last = first_share(op, step, rows, thread, threads)
        while first >= 0:
            for row in range(first, last):
                position = get_i32(field(step, Step.POSITIONS) + 4 * row)
                page = get_i32(field(field(step, Step.ROW_TABLES), row) + position // PAGE_TOKENS * 4)
                source = argument(op, _STORED.rows) + row * argument(op, _STORED.stride)
                table = field(step, Step.ROPE_TABLES + argument(op, _STORED.rope))
                table += get_i32(field(step, Step.ROPE_ROWS) + 4 * row) * turned * 4
                epsilon = get_f32(argument(op, _STORED.epsilon))
                norm_row(source, argument(op, _STORED.norm), argument(op, _STORED.rank), plain, epsilon, ready)
                rotate_head(source + plain * 4, 0, table, turned, turned, epsilon, _ONE, ready + plain * 4)
                place = argument(op, _STORED.pages) + page * padded * page_bytes
                store_key(ready, place, position % PAGE_TOKENS, padded, ready + padded * 4)
            first, last = next_share(op, step, rows, thread, threads)

    return store_latents


def _store_samples(kind: KVType) -> Iterator[Sample]:
    s = Sample(rows=5)
    s.positions(14, 32)
    s.step({Step.ROW_TABLES: s.array([s.array([1, 0], np.int32)] * 5, np.int64)})
    latents = s.random.standard_normal((5, 96))
    latents[:, 40:64] = 0
    pages = s.zeros(2 * 96 * _TYPES[kind].PAGE_BYTES_PER_VALUE, np.uint8)
    yield s.arguments(s.array(latents), 96 * 4, s.normal(64), pages, 40, 96, 32, 0, s.array([1e-5]))


STORE = {
    kind: Kernel(f"latents.store_{kind}", __name__, partial(_store, kind), partial(_store_samples, kind), StoreLatents)
    for kind in _TYPES
}
"""Kernels by the storage type of latents."""


@inner
def _tiles(rows: int, width: int) -> int:
    return (rows + width - 1) // width


def _split_samples() -> Iterator[Sample]:
    for rows, width in ((1, 1), (5, 4)):
        s = Sample(rows=rows, width=width)
        # A buffer for three heads of the rows in whole tiles: a sample's own has room for the rows only.
        s.step({Step.ROWS: 3 * (rows + width)})
        packed = s.activations(256)
        s.step({Step.ROWS: rows})
        segments = s.zeros(10, np.int64)
        yield s.arguments(s.normal(rows, 3, 288), 3 * 288 * 4, 288 * 4, 256, ALL_FORMS, packed, 3, segments)


class SplitHeads(Arguments):
    """Arguments of split_heads."""

    rows: int  # of floats
    stride: int  # bytes from row to row
    head_stride: int  # bytes from head to head's part
    k: int  # values of a part
    forms: int  # Form: what to pack
    packed: int  # descriptors of packed activations
    heads: int  # slots of a row
    segments: int  # out, as cpu_kernels.matmul reads them


_SPLIT = indices_of(SplitHeads)


@kernel(SplitHeads, _split_samples)
def split_heads(op: int, step: int, thread: int, threads: int) -> None:
    """Pack each head's part of the rows into its slots, and write the table of segments."""
    rows, width, heads = stage_rows(op, step), stage_width(op, step), argument(op, _SPLIT.heads)
    k = argument(op, _SPLIT.k)
    tiles = _tiles(rows, width)
    if thread == 0:
        segments = argument(op, _SPLIT.segments)
        put_i64(segments, heads)
        for head in range(heads):
            put_i64(segments + 8 * (3 * head + 1), head)
            put_i64(segments + 8 * (3 * head + 2), head * tiles)
            put_i64(segments + 8 * (3 * head + 3), tiles)
    items = heads * tiles
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        for item in range(first, last):
            head, begin = item // tiles, item % tiles * width
            for row in range(begin, min(begin + width, rows)):
                source = (
                    argument(op, _SPLIT.rows)
                    + row * argument(op, _SPLIT.stride)
                    + head * argument(op, _SPLIT.head_stride)
                )
                pack_row(
                    source,
                    0,
                    k,
                    k,
                    argument(op, _SPLIT.forms),
                    width,
                    head * tiles * width + row,
                    argument(op, _SPLIT.packed),
                )
        first, last = next_share(op, step, items, thread, threads)


def _join_samples() -> Iterator[Sample]:
    for rows, width in ((1, 1), (5, 4)):
        s = Sample(rows=rows, width=width)
        yield s.arguments(s.normal(2 * (rows + width), 128), 512, 2, 128, ALL_FORMS, s.activations(256))


class JoinHeads(Arguments):
    """Arguments of join_heads."""

    slots: int  # rows of floats, one per head of a row
    stride: int  # bytes from slot to slot
    heads: int  # slots of a row
    size: int  # values of a head
    forms: int  # Form: what to pack
    packed: int  # descriptors of packed activations


_JOIN = indices_of(JoinHeads)


@kernel(JoinHeads, _join_samples)
def join_heads(op: int, step: int, thread: int, threads: int) -> None:
    """Join each row's heads from their slots and pack the rows. With one row every thread packs its own copy."""
    rows, width, heads = stage_rows(op, step), stage_width(op, step), argument(op, _JOIN.heads)
    size = argument(op, _JOIN.size)
    slots = _tiles(rows, width) * width
    act = activation(argument(op, _JOIN.packed), 1, rows, thread)
    out = scratch(step, thread)
    first, last = rows_to_pack(op, step, thread, threads)
    while first >= 0:
        for row in range(first, last):
            for head in range(heads):
                source = argument(op, _JOIN.slots) + (head * slots + row) * argument(op, _JOIN.stride)
                to = out + head * size * 4
                for i in range(0, size * 4, 64):
                    store_f32(to + i, load_f32(source + i))
            pack_row(out, 0, heads * size, heads * size, argument(op, _JOIN.forms), width, row, act)
        first, last = more_rows_to_pack(op, step, thread, threads)
