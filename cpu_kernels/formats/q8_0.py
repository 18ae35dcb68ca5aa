"""Q8_0: blocks of 32 signed bytes with a half-precision scale.

Packed group of 32 rows, per block 1088 bytes: two halves of 16 rows, each 8 vectors (four k a lane); 32 f16 scales.
Bytes are stored plus BYTE_OFFSET, as the processor's products want them (see cpu_kernels.simd.dot).
"""

from typing import Any

import numpy as np

from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import inner
from cpu_kernels.matmul import put_sum
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import fma, mul_f32, prefetch_lines, to_f32
from cpu_kernels.simd.dot import BYTE_OFFSET
from cpu_kernels.simd.tiles import (
    biased_dot4_steps,
    start_biased,
    tile_load_f32,
    tile_scale_add,
    tile_store,
    tile_width,
)
from cpu_kernels.simd.vectors import (
    broadcast_f32,
    get_f16,
    get_i16,
    get_i32,
    get_u8,
    load_f16,
    load_i32,
    put_f32,
    put_i16,
    put_i32,
    zero_f32,
    zero_i32,
)

_BLOCK_BYTES = 1088
_SCALES = 1024
_SOURCE_BYTES = 34
_OFFSETS, _SIGN = BYTE_OFFSET * 0x01010101, BYTE_OFFSET ^ 128
# Bytes ahead of their use that weights are asked for; see docs/speed.md.
_AHEAD, _TILES_AHEAD = 512, 4096
_Q, _SCALE, _SUM = int(Act.Q32), int(Act.SCALE32), int(Act.SUM32)


@inner
def _pack_row(source: int, group: int, lane: int, k: int) -> None:
    half, row = lane // 16, lane % 16
    for b in range(k // 32):
        block = source + b * _SOURCE_BYTES
        packed = group + b * _BLOCK_BYTES
        put_i16(packed + _SCALES + lane * 2, get_i16(block))
        for i in range(8):
            put_i32(packed + half * 512 + i * 64 + row * 4, get_i32(block + 2 + 4 * i) ^ _OFFSETS)


@inner
def _unpack_row(group: int, lane: int, k: int, out: int) -> None:
    half, row = lane // 16, lane % 16
    for b in range(k // 32):
        packed = group + b * _BLOCK_BYTES
        scale = get_f16(packed + _SCALES + lane * 2)
        for i in range(32):
            stored = get_u8(packed + half * 512 + i // 4 * 64 + row * 4 + i % 4)
            value = (stored ^ _SIGN) - 128
            put_f32(out + (b * 32 + i) * 4, scale * np.float32(value))


@inner
def _weights(p: int) -> Any:
    """Four vectors."""
    return load_i32(p), load_i32(p + 64), load_i32(p + 128), load_i32(p + 192)


@inner
def _gemv(weights: int, k: int, act: int, tile: int, y: int, addend: int, first: int, last: int) -> None:
    blocks = k // 32
    scales0 = field(act, _SCALE) + tile * blocks * 4
    sums0 = field(act, _SUM) + tile * blocks * 4
    q0 = field(act, _Q) + tile * k
    for g in range(first, last):
        p = weights + g * blocks * _BLOCK_BYTES
        f0 = zero_f32()
        f1 = zero_f32()
        for b in range(blocks):
            start = start_biased(zero_i32(), sums0 + 4 * b)
            prefetch_lines(p + _AHEAD, 17)
            x = q0 + b * 32
            i0 = biased_dot4_steps(biased_dot4_steps(start, _weights(p), x), _weights(p + 256), x + 16)
            i1 = biased_dot4_steps(biased_dot4_steps(start, _weights(p + 512), x), _weights(p + 768), x + 16)
            scale = broadcast_f32(scales0 + 4 * b)
            f0 = fma(to_f32(i0), mul_f32(load_f16(p + _SCALES), scale), f0)
            f1 = fma(to_f32(i1), mul_f32(load_f16(p + _SCALES + 32), scale), f1)
            p += _BLOCK_BYTES
        put_sum(f0, y + g * 128, addend + g * 128 if addend != 0 else 0)
        put_sum(f1, y + g * 128 + 64, addend + g * 128 + 64 if addend != 0 else 0)


@inner
def _tile(
    zero: Any,
    group: int,
    k: int,
    act: int,
    tile: int,
    sums: int,
    start: int,
    end: int,
    fresh: bool,
) -> None:
    width = tile_width(zero)
    first = tile * (k // 32) + start // 32
    for half in range(2):
        p = group + start // 32 * _BLOCK_BYTES
        q = field(act, _Q) + first * width * 32
        scale = field(act, _SCALE) + first * width * 4
        offset = field(act, _SUM) + first * width * 4
        total = tile_load_f32(zero, sums + half * 64 * width)
        for _ in range(start, end, 32):
            if fresh and half == 0:
                prefetch_lines(p + _TILES_AHEAD, 17)
            products = start_biased(zero, offset)
            products = biased_dot4_steps(products, _weights(p + half * 512), q)
            products = biased_dot4_steps(products, _weights(p + half * 512 + 256), q + 16 * width)
            total = tile_scale_add(total, products, load_f16(p + _SCALES + half * 32), scale)
            p += _BLOCK_BYTES
            q += 32 * width
            scale += 4 * width
            offset += 4 * width
        tile_store(total, sums + half * 64 * width, 64)


FORMAT = WeightFormat(
    name="Q8_0",
    form=Form.BLOCKS_32,
    group_rows=32,
    block=32,
    group_block_bytes=_BLOCK_BYTES,
    pack_row=_pack_row,
    unpack_row=_unpack_row,
    gemv=_gemv,
    tile=_tile,
)
