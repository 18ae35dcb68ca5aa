"""F32, F16 and BF16: plain values times plain activations.

Packed group of 16 rows: k vectors of 16 values, in the source's own type. Products are added in order of k.
"""

from typing import Any

import numpy as np

from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import inner
from cpu_kernels.matmul import put_sum
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import fma, prefetch_lines
from cpu_kernels.simd.tiles import tile_fma_broadcast, tile_load_f32, tile_store, tile_width
from cpu_kernels.simd.vectors import (
    broadcast_f32,
    get_f16,
    get_f32,
    get_i16,
    get_i32,
    load_bf16,
    load_f16,
    load_f32,
    put_f32,
    put_i16,
    put_i32,
    zero_f32,
)

_FLOATS = int(Act.FLOATS)
_AHEAD = 4096
_GROUPS_TOGETHER = 4


@inner
def _get_bf16_bits(where: int) -> int:
    return (get_i16(where) & 0xFFFF) << 16


@inner
def _pack_row_16(source: int, group: int, lane: int, k: int) -> None:
    for i in range(k):
        put_i16(group + i * 32 + lane * 2, get_i16(source + i * 2))


@inner
def _pack_row_32(source: int, group: int, lane: int, k: int) -> None:
    for i in range(k):
        put_i32(group + i * 64 + lane * 4, get_i32(source + i * 4))


@inner
def _unpack_row_f16(group: int, lane: int, k: int, out: int) -> None:
    for i in range(k):
        put_f32(out + i * 4, get_f16(group + i * 32 + lane * 2))


@inner
def _unpack_row_bf16(group: int, lane: int, k: int, out: int) -> None:
    for i in range(k):
        put_i32(out + i * 4, _get_bf16_bits(group + i * 32 + lane * 2))


@inner
def _unpack_row_f32(group: int, lane: int, k: int, out: int) -> None:
    for i in range(k):
        put_f32(out + i * 4, np.float32(get_f32(group + i * 64 + lane * 4)))


def _format(name: str, load: Any, vector_bytes: int, pack_row: Any, unpack_row: Any) -> WeightFormat:
    @inner
    def gemv(weights: int, k: int, act: int, tile: int, y: int, addend: int, first: int, last: int) -> None:
        x = field(act, _FLOATS) + tile * k * 4
        size = k * vector_bytes
        g = first
        # Four groups side by side: one chain of dependent additions alone would wait for itself.
        while g + _GROUPS_TOGETHER <= last:
            p = weights + g * size
            t0 = zero_f32()
            t1 = zero_f32()
            t2 = zero_f32()
            t3 = zero_f32()
            for i in range(k):
                value = broadcast_f32(x + i * 4)
                at = p + i * vector_bytes
                t0 = fma(load(at), value, t0)
                t1 = fma(load(at + size), value, t1)
                t2 = fma(load(at + 2 * size), value, t2)
                t3 = fma(load(at + 3 * size), value, t3)
            put_sum(t0, y + g * 64, addend + g * 64 if addend != 0 else 0)
            put_sum(t1, y + g * 64 + 64, addend + g * 64 + 64 if addend != 0 else 0)
            put_sum(t2, y + g * 64 + 128, addend + g * 64 + 128 if addend != 0 else 0)
            put_sum(t3, y + g * 64 + 192, addend + g * 64 + 192 if addend != 0 else 0)
            g += _GROUPS_TOGETHER
        while g < last:
            p = weights + g * size
            total = zero_f32()
            for i in range(k):
                prefetch_lines(p + i * vector_bytes + _AHEAD, 1)
                total = fma(load(p + i * vector_bytes), broadcast_f32(x + i * 4), total)
            put_sum(total, y + g * 64, addend + g * 64 if addend != 0 else 0)
            g += 1

    @inner
    def tile(
        zero: Any,
        group: int,
        k: int,
        act: int,
        index: int,
        sums: int,
        start: int,
        end: int,
        fresh: bool,
    ) -> None:
        width = tile_width(zero)
        x = field(act, _FLOATS) + index * width * k * 4
        total = tile_load_f32(zero, sums)
        for i in range(start, end):
            if fresh:
                prefetch_lines(group + i * vector_bytes + _AHEAD, 1)
            total = tile_fma_broadcast(total, load(group + i * vector_bytes), x + i * 4 * width, 4)
        tile_store(total, sums, 64)

    return WeightFormat(
        name=name,
        form=Form.FLOATS,
        group_rows=16,
        block=1,
        group_block_bytes=vector_bytes,
        pack_row=pack_row,
        unpack_row=unpack_row,
        gemv=gemv,
        tile=tile,
    )


F32_FORMAT = _format("F32", load_f32, 64, _pack_row_32, _unpack_row_f32)
F16_FORMAT = _format("F16", load_f16, 32, _pack_row_16, _unpack_row_f16)
BF16_FORMAT = _format("BF16", load_bf16, 32, _pack_row_16, _unpack_row_bf16)
