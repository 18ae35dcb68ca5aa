"""Q2_K: super-blocks of 256 two-bit values, sixteen 4-bit scales and minima, two half-precision factors.

Packed group of 16 rows, per super-block 1344 bytes: for each of 16 sub-blocks one vector (four k steps, step i in bits
2 i); scales (low nibble) and minima (high) as bytes, four sub-blocks a lane; f16 d and dmin.
"""

from typing import Any

import numpy as np

from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import inner
from cpu_kernels.matmul import put_sum
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import (
    fma,
    mask_bits,
    mul_f32,
    prefetch_lines,
    shift_right,
    to_f32,
)
from cpu_kernels.simd.tiles import (
    add_short,
    broadcast_like,
    short_dot4_steps,
    short_factor,
    start_short,
    tile_scale_add_to_memory,
    tile_width,
)
from cpu_kernels.simd.vectors import (
    broadcast_f32,
    broadcast_i32,
    get_f16,
    get_i16,
    get_i32,
    get_u8,
    load_f16,
    load_i32,
    put_f32,
    put_i16,
    put_i32,
    splat_f32,
    zero_f32,
    zero_i32,
)

_BLOCK_BYTES = 1344
_SCALES, _D, _DMIN = 1024, 1280, 1312
_SOURCE_BYTES, _SOURCE_Q, _SOURCE_D, _SOURCE_DMIN = 84, 16, 80, 82
_AHEAD = 3072
_TWO = 0x03030303
# Undoes the factor in the packed activations' -32 * sum, and the minima are subtracted.
_PER_SUM = np.float32(1.0 / 32.0)
_Q, _SCALE, _SUM = int(Act.Q256), int(Act.SCALE256), int(Act.SUM16)


@inner
def _pack_row(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 256):
        block = source + b * _SOURCE_BYTES
        packed = group + b * _BLOCK_BYTES
        put_i16(packed + _D + lane * 2, get_i16(block + _SOURCE_D))
        put_i16(packed + _DMIN + lane * 2, get_i16(block + _SOURCE_DMIN))
        for quarter in range(4):
            put_i32(packed + _SCALES + quarter * 64 + lane * 4, get_i32(block + 4 * quarter))
        for j in range(16):
            values = block + _SOURCE_Q + j // 8 * 32 + j % 2 * 16
            shift = j % 8 // 2 * 2
            word = 0
            for step in range(4):
                word |= (get_i32(values + 4 * step) >> shift & _TWO) << (2 * step)
            put_i32(packed + j * 64 + lane * 4, word)


@inner
def _unpack_row(group: int, lane: int, k: int, out: int) -> None:
    for b in range(k // 256):
        packed = group + b * _BLOCK_BYTES
        d = get_f16(packed + _D + lane * 2)
        dmin = get_f16(packed + _DMIN + lane * 2)
        for j in range(16):
            both = get_u8(packed + _SCALES + j // 4 * 64 + lane * 4 + j % 4)
            scale = d * np.float32(both & 15)
            minimum = dmin * np.float32(both >> 4)
            for i in range(16):
                value = get_u8(packed + j * 64 + lane * 4 + i % 4) >> (i // 4 * 2) & 3
                put_f32(out + (b * 256 + j * 16 + i) * 4, scale * np.float32(value) - minimum)


@inner
def _weights(p: int) -> Any:
    """A sub-block's four k steps."""
    w = load_i32(p)
    return (
        mask_bits(w, _TWO),
        mask_bits(shift_right(w, 2), _TWO),
        mask_bits(shift_right(w, 4), _TWO),
        mask_bits(shift_right(w, 6), _TWO),
    )


@inner
def _minima_factor(p: int) -> Any:
    return mul_f32(load_f16(p + _DMIN), splat_f32(_PER_SUM))


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
            offsets = zero_i32()
            prefetch_lines(p + _AHEAD, 21)
            for quarter in range(4):
                scales = load_i32(p + _SCALES + quarter * 64)
                for i in range(4):
                    j = quarter * 4 + i
                    part = short_dot4_steps(zero_i32(), _weights(p + j * 64), q0 + b * 256 + j * 16)
                    products = add_short(products, part, short_factor(mask_bits(scales, 15)))
                    minimum = mask_bits(shift_right(scales, 4), 15)
                    offsets = add_short(offsets, broadcast_i32(sums0 + (b * 16 + j) * 4), short_factor(minimum))
                    scales = shift_right(scales, 8)
            scale = broadcast_f32(scales0 + 4 * b)
            total = fma(to_f32(products), mul_f32(load_f16(p + _D), scale), total)
            total = fma(to_f32(offsets), mul_f32(_minima_factor(p), scale), total)
            p += _BLOCK_BYTES
        put_sum(total, y + g * 64, addend + g * 64 if addend != 0 else 0)


@inner
def _tile_minima(zero: Any, p: int, offset: int) -> Any:
    """Sum over sub-blocks of minimum times the activations' sum."""
    total = zero
    for quarter in range(4):
        scales = load_i32(p + _SCALES + quarter * 64)
        for i in range(4):
            sums = broadcast_like(zero, offset + (quarter * 4 + i) * 4 * tile_width(zero), 0)
            total = add_short(total, sums, short_factor(mask_bits(shift_right(scales, 4), 15)))
            scales = shift_right(scales, 8)
    return total


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
    blocks = k // 256
    first = tile * blocks + start // 256
    x = field(act, _Q) + first * width * 256
    scale = field(act, _SCALE) + first * width * 4
    offset = field(act, _SUM) + first * width * 64
    step = 4 * width
    p = group + start // 256 * _BLOCK_BYTES
    for _ in range(start, end, 256):
        products = zero
        if fresh:
            prefetch_lines(p + _AHEAD, 21)
        for quarter in range(4):
            scales = load_i32(p + _SCALES + quarter * 64)
            for i in range(4):
                part = short_dot4_steps(start_short(zero), _weights(p + (quarter * 4 + i) * 64), x)
                products = add_short(products, part, short_factor(mask_bits(scales, 15)))
                scales = shift_right(scales, 8)
                x += 4 * step
        tile_scale_add_to_memory(products, load_f16(p + _D), scale, sums)
        tile_scale_add_to_memory(_tile_minima(zero, p, offset), _minima_factor(p), scale, sums)
        p += _BLOCK_BYTES
        scale += step
        offset += 16 * step


FORMAT = WeightFormat(
    name="Q2_K",
    form=Form.BLOCKS_256,
    group_rows=16,
    block=256,
    group_block_bytes=_BLOCK_BYTES,
    pack_row=_pack_row,
    unpack_row=_unpack_row,
    gemv=_gemv,
    tile=_tile,
)
