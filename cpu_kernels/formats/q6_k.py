"""Q6_K: super-blocks of 256 six-bit values less 32, sixteen 8-bit scales, one half-precision factor.

Packed group of 16 rows, per super-block 3392 bytes: for each of 16 sub-blocks two vectors of low nibbles (k steps 0|1
and 2|3) and one of high bit pairs (four k steps); scales as signed bytes, four a lane; f32 d.
"""

from typing import Any

import numpy as np

from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import inner
from cpu_kernels.matmul import put_sum, put_tile
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import (
    add_i32,
    fma,
    mask_bits,
    mul_f32,
    mul_i32,
    or_i32,
    prefetch_lines,
    shift_left,
    shift_right,
    shift_right_signed,
    to_f32,
)
from cpu_kernels.simd.tiles import (
    broadcast_like,
    dot4_steps,
    tile_multiply_add_i32,
    tile_scale_add_to_memory,
    tile_store,
    tile_width,
)
from cpu_kernels.simd.vectors import (
    broadcast_f32,
    broadcast_i32,
    get_f16,
    get_f32,
    get_i8,
    get_i32,
    get_u8,
    load_f32,
    load_i32,
    put_f32,
    put_i32,
    put_u8,
    zero_f32,
    zero_i32,
)

_BLOCK_BYTES = 3392
_SCALES, _D = 3072, 3328
_SOURCE_BYTES, _SOURCE_HIGH, _SOURCE_SCALES, _SOURCE_D = 210, 128, 192, 208
_AHEAD = 4096
_LOW = 0x0F0F0F0F
_HIGH = 0x30303030
_PAIR = 0x03030303
_LARGEST = 63
_Q, _SCALE, _SUM = int(Act.Q256), int(Act.SCALE256), int(Act.SUM16)


@inner
def _source_low(block: int, value: int) -> int:
    """Low nibbles of four neighbouring values, as bytes of a 32-bit integer."""
    half, quarter, i = value // 128, value % 128 // 32, value % 32
    return (get_i32(block + half * 64 + quarter % 2 * 32 + i) >> (quarter // 2 * 4)) & _LOW


@inner
def _source_high(block: int, value: int) -> int:
    """High bit pairs of four neighbouring values, as bytes of a 32-bit integer."""
    half, quarter, i = value // 128, value % 128 // 32, value % 32
    return (get_i32(block + _SOURCE_HIGH + half * 32 + i) >> (2 * quarter)) & _PAIR


@inner
def _pack_row(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 256):
        block = source + b * _SOURCE_BYTES
        packed = group + b * _BLOCK_BYTES
        put_f32(packed + _D + lane * 4, get_f16(block + _SOURCE_D))
        for j in range(16):
            put_u8(packed + _SCALES + j // 4 * 64 + lane * 4 + j % 4, get_u8(block + _SOURCE_SCALES + j))
            to = packed + j * 192 + lane * 4
            v = j * 16
            put_i32(to, _source_low(block, v) | _source_low(block, v + 4) << 4)
            put_i32(to + 64, _source_low(block, v + 8) | _source_low(block, v + 12) << 4)
            high = _source_high(block, v) | _source_high(block, v + 4) << 2
            put_i32(to + 128, high | _source_high(block, v + 8) << 4 | _source_high(block, v + 12) << 6)


@inner
def _unpack_row(group: int, lane: int, k: int, out: int) -> None:
    for b in range(k // 256):
        packed = group + b * _BLOCK_BYTES
        d = get_f32(packed + _D + lane * 4)
        for j in range(16):
            scale = d * np.float32(get_i8(packed + _SCALES + j // 4 * 64 + lane * 4 + j % 4))
            for i in range(16):
                step, byte = i // 4, packed + j * 192 + lane * 4 + i % 4
                low = (get_u8(byte + step // 2 * 64) >> (step % 2 * 4)) & 15
                high = (get_u8(byte + 128) >> (step * 2)) & 3
                put_f32(out + (b * 256 + j * 16 + i) * 4, scale * np.float32((low | high << 4) - 32))


@inner
def _weights(p: int) -> Any:
    """The unsigned values of a sub-block's four k steps."""
    l0 = load_i32(p)
    l1 = load_i32(p + 64)
    high = load_i32(p + 128)
    return (
        or_i32(mask_bits(l0, _LOW), mask_bits(shift_left(high, 4), _HIGH)),
        or_i32(mask_bits(shift_right(l0, 4), _LOW), mask_bits(shift_left(high, 2), _HIGH)),
        or_i32(mask_bits(l1, _LOW), mask_bits(high, _HIGH)),
        or_i32(mask_bits(shift_right(l1, 4), _LOW), mask_bits(shift_right(high, 2), _HIGH)),
    )


@inner
def _signed_byte(scales: Any) -> Any:
    """The lowest byte of each lane, as a signed integer."""
    return shift_right_signed(shift_left(scales, 24), 24)


@inner
def _gemv(weights: int, k: int, act: int, tile: int, y: int, addend: int, first: int, last: int) -> None:
    blocks = k // 256
    q0 = field(act, _Q) + tile * k
    scales0 = field(act, _SCALE) + tile * blocks * 4
    sums0 = field(act, _SUM) + tile * blocks * 64
    for g in range(first, last):
        p = weights + g * blocks * _BLOCK_BYTES
        total = zero_f32()
        for b in range(blocks):
            products = zero_i32()
            for quarter in range(4):
                scales = load_i32(p + _SCALES + quarter * 64)
                for j in range(4):
                    block = p + (quarter * 4 + j) * 192
                    x = q0 + b * 256 + (quarter * 4 + j) * 16
                    prefetch_lines(block + _AHEAD, 3)
                    part = broadcast_i32(sums0 + (b * 16 + quarter * 4 + j) * 4)
                    part = dot4_steps(part, _weights(block), x, _LARGEST)
                    products = add_i32(products, mul_i32(part, _signed_byte(scales)))
                    scales = shift_right(scales, 8)
            prefetch_lines(p + _SCALES + _AHEAD, 5)
            total = fma(to_f32(products), mul_f32(load_f32(p + _D), broadcast_f32(scales0 + 4 * b)), total)
            p += _BLOCK_BYTES
        put_sum(total, y + g * 64, addend + g * 64 if addend != 0 else 0)


@inner
def _tile(
    zero_i: Any,
    zero_f: Any,
    group: int,
    k: int,
    act: int,
    tile: int,
    out: Any,
    sums: int,
    fresh: bool,
) -> None:
    width = tile_width(zero_i)
    blocks = k // 256
    x = field(act, _Q) + tile * width * k
    scale = field(act, _SCALE) + tile * width * blocks * 4
    offset = field(act, _SUM) + tile * width * blocks * 64
    step = 4 * width
    p = group
    tile_store(zero_f, sums, 64)
    for _ in range(blocks):
        products = zero_i
        for quarter in range(4):
            scales = load_i32(p + _SCALES + quarter * 64)
            if fresh:
                prefetch_lines(p + quarter * 768 + _AHEAD, 12)
            for j in range(4):
                part = broadcast_like(zero_i, offset, 0)
                part = dot4_steps(part, _weights(p + (quarter * 4 + j) * 192), x, _LARGEST)
                products = tile_multiply_add_i32(products, part, _signed_byte(scales))
                scales = shift_right(scales, 8)
                x += 4 * step
                offset += step
        if fresh:
            prefetch_lines(p + _SCALES + _AHEAD, 5)
        tile_scale_add_to_memory(products, load_f32(p + _D), scale, sums)
        p += _BLOCK_BYTES
        scale += step
    put_tile(zero_i, sums, out)


FORMAT = WeightFormat(
    name="Q6_K",
    form=Form.BLOCKS_256,
    group_rows=16,
    block=256,
    group_block_bytes=_BLOCK_BYTES,
    pack_row=_pack_row,
    unpack_row=_unpack_row,
    gemv=_gemv,
    tile=_tile,
)
