"""Q6_K: super-blocks of 256 six-bit values less 32, sixteen 8-bit scales, one half-precision factor.

Packed group of 16 rows, per super-block 3392 bytes, in the order in which they are read: scales as signed bytes, four a
lane; f32 d; for each of 16 sub-blocks two vectors of low nibbles (k steps 0|1 and 2|3) and one of high bit pairs (four
k steps).

Products begin with -32 times the activations' sum, so that a sub-block's sum, the values being -32 to 31 again, fits
into a short sum's words: 8 * 32 * 127 < 2**15.
"""

from typing import Any

import numpy as np

from cpu_kernels.formats.panels import Panels, put_d, put_factors, put_values
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import inner
from cpu_kernels.matmul import put_sum
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import (
    fma,
    mask_bits,
    mul_f32,
    or_i32,
    prefetch_lines,
    shift_left,
    shift_right,
    shift_right_signed,
    to_f32,
)
from cpu_kernels.simd.tiles import (
    add_short,
    broadcast_like,
    short_dot4_steps,
    short_factor,
    tile_scale_add_to_memory,
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
    zero_f32,
    zero_i32,
)

_BLOCK_BYTES = 3392
_SCALES, _D, _VALUES = 0, 256, 320
_SOURCE_BYTES, _SOURCE_HIGH, _SOURCE_SCALES, _SOURCE_D = 210, 128, 192, 208
# Bytes ahead of their use that weights are asked for; see docs/speed.md.
_AHEAD, _TILES_AHEAD = 2048, 4096
_LOW = 0x0F0F0F0F
_HIGH = 0x30303030
_PAIR = 0x03030303
_Q, _SCALE, _SUM = int(Act.Q256), int(Act.SCALE256), int(Act.SUM16)


@inner
def _pack_sub_blocks(low: int, high: int, shift: int, bits: int, to: int) -> None:
    """Pack sixteen values, from bit `shift` of the bytes at low on and bit `bits` of those at high, into a lane."""
    l0 = get_i32(low) >> shift & _LOW
    l1 = get_i32(low + 4) >> shift & _LOW
    l2 = get_i32(low + 8) >> shift & _LOW
    l3 = get_i32(low + 12) >> shift & _LOW
    h0 = get_i32(high) >> bits & _PAIR
    h1 = get_i32(high + 4) >> bits & _PAIR
    h2 = get_i32(high + 8) >> bits & _PAIR
    h3 = get_i32(high + 12) >> bits & _PAIR
    put_i32(to, l0 | l1 << 4)
    put_i32(to + 64, l2 | l3 << 4)
    put_i32(to + 128, h0 | h1 << 2 | h2 << 4 | h3 << 6)


@inner
def _pack_row(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 256):
        block = source + b * _SOURCE_BYTES
        packed = group + b * _BLOCK_BYTES
        put_f32(packed + _D + lane * 4, get_f16(block + _SOURCE_D))
        for quarter in range(4):
            put_i32(packed + _SCALES + quarter * 64 + lane * 4, get_i32(block + _SOURCE_SCALES + 4 * quarter))
        for half in range(2):
            for side in range(2):
                low = block + half * 64 + side * 16
                high = block + _SOURCE_HIGH + half * 32 + side * 16
                to = packed + _VALUES + (half * 8 + side) * 192 + lane * 4
                _pack_sub_blocks(low, high, 0, 0, to)
                _pack_sub_blocks(low + 32, high, 0, 2, to + 2 * 192)
                _pack_sub_blocks(low, high, 4, 4, to + 4 * 192)
                _pack_sub_blocks(low + 32, high, 4, 6, to + 6 * 192)


@inner
def _unpack_row(group: int, lane: int, k: int, out: int) -> None:
    for b in range(k // 256):
        packed = group + b * _BLOCK_BYTES
        d = get_f32(packed + _D + lane * 4)
        for j in range(16):
            scale = d * np.float32(get_i8(packed + _SCALES + j // 4 * 64 + lane * 4 + j % 4))
            for i in range(16):
                step, byte = i // 4, packed + _VALUES + j * 192 + lane * 4 + i % 4
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
            prefetch_lines(p + _AHEAD, 5)
            for quarter in range(4):
                scales = load_i32(p + _SCALES + quarter * 64)
                for j in range(4):
                    block = p + _VALUES + (quarter * 4 + j) * 192
                    x = q0 + b * 256 + (quarter * 4 + j) * 16
                    prefetch_lines(block + _AHEAD, 3)
                    part = broadcast_i32(sums0 + (b * 16 + quarter * 4 + j) * 4)
                    part = short_dot4_steps(part, _weights(block), x)
                    products = add_short(products, part, short_factor(_signed_byte(scales)))
                    scales = shift_right(scales, 8)
            total = fma(to_f32(products), mul_f32(load_f32(p + _D), broadcast_f32(scales0 + 4 * b)), total)
            p += _BLOCK_BYTES
        put_sum(total, y + g * 64, addend + g * 64 if addend != 0 else 0)


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
            prefetch_lines(p + _TILES_AHEAD, 5)
        for quarter in range(4):
            scales = load_i32(p + _SCALES + quarter * 64)
            if fresh:
                prefetch_lines(p + _VALUES + quarter * 768 + _TILES_AHEAD, 12)
            for j in range(4):
                part = broadcast_like(zero, offset, 0)
                part = short_dot4_steps(part, _weights(p + _VALUES + (quarter * 4 + j) * 192), x)
                products = add_short(products, part, short_factor(_signed_byte(scales)))
                scales = shift_right(scales, 8)
                x += 4 * step
                offset += step
        tile_scale_add_to_memory(products, load_f32(p + _D), scale, sums)
        p += _BLOCK_BYTES
        scale += step


@inner
def _unpack_block(p: int, to: int) -> None:
    prefetch_lines(p + _TILES_AHEAD, 5)
    put_d(to, load_f32(p + _D))
    for quarter in range(4):
        scales = load_i32(p + _SCALES + quarter * 64)
        prefetch_lines(p + _VALUES + quarter * 768 + _TILES_AHEAD, 12)
        for i in range(4):
            j = quarter * 4 + i
            put_values(to, j * 4, _weights(p + _VALUES + j * 192))
            put_factors(to, j, _signed_byte(scales))
            scales = shift_right(scales, 8)


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
    panels=Panels(block_bytes=_BLOCK_BYTES, unpack=_unpack_block, factors=16, sums=16, centred=True),
)
