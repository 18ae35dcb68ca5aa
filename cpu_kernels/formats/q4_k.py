"""Q4_K: super-blocks of 256 nibbles, eight 6-bit scales and minima, two half-precision factors.

Packed group of 16 rows, per super-block 2368 bytes: 32 vectors of nibbles (low: the first 32 of a 64-value chunk, high:
the second), scales and minima widened to bytes (two vectors each, four sub-blocks a lane), f16 d and dmin.
"""

from typing import Any

import numpy as np

from cpu_kernels.formats.panels import Panels, put_scales, put_values
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import inner
from cpu_kernels.matmul import put_sum
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import (
    fma,
    mask_bits,
    mul_f32,
    neg_f32,
    prefetch_lines,
    shift_right,
    to_f32,
)
from cpu_kernels.simd.dot import dot2
from cpu_kernels.simd.tiles import (
    add_short,
    short_dot4_steps,
    short_factor,
    start_short,
    tile_dot2,
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
    zero_f32,
    zero_i32,
)

_BLOCK_BYTES = 2368
_SCALES, _MINIMA, _D, _DMIN = 2048, 2176, 2304, 2336
_SOURCE_BYTES = 144
# Bytes ahead of their use that weights are asked for. One row: where the block's scales lie; see docs/speed.md.
_AHEAD, _TILES_AHEAD = 2048, 4096
_NIBBLES = 0x0F0F0F0F
_WORDS = 0x00FF00FF
_SIX_BITS, _UPPER_BITS = 0x3F3F3F3F, 0x30303030
_Q, _SCALE, _PAIRS = int(Act.Q256), int(Act.SCALE256), int(Act.PAIRS256)


@inner
def pack_scales(block: int, scales: int, lane: int, packed: int, d: int) -> None:
    """Widen a row's scales and minima into their lanes (128 bytes each at packed); copy d and dmin (32 each at d).

    Of the twelve bytes that hold all eight of each, the first four have the first scales and the next four the first
    minima in six bits; the last four have four bits of the others, whose upper two are above the six.
    """
    put_i16(d + lane * 2, get_i16(block))
    put_i16(d + 32 + lane * 2, get_i16(block + 2))
    first = get_i32(scales)
    second = get_i32(scales + 4)
    rest = get_i32(scales + 8)
    to = packed + lane * 4
    put_i32(to, first & _SIX_BITS)
    put_i32(to + 64, rest & _NIBBLES | first >> 2 & _UPPER_BITS)
    put_i32(to + 128, second & _SIX_BITS)
    put_i32(to + 192, rest >> 4 & _NIBBLES | second >> 2 & _UPPER_BITS)


@inner
def minima(p: int, pairs: int) -> Any:
    """Sum over sub-blocks of minimum * sum of the activations, for one token."""
    m0 = load_i32(p)
    m1 = load_i32(p + 64)
    total = dot2(zero_i32(), mask_bits(m0, _WORDS), broadcast_i32(pairs))
    total = dot2(total, mask_bits(shift_right(m0, 8), _WORDS), broadcast_i32(pairs + 4))
    total = dot2(total, mask_bits(m1, _WORDS), broadcast_i32(pairs + 8))
    return dot2(total, mask_bits(shift_right(m1, 8), _WORDS), broadcast_i32(pairs + 12))


@inner
def tile_minima(zero: Any, p: int, pairs: int) -> Any:
    """`minima` for a tile of tokens."""
    step = 4 * tile_width(zero)
    m0 = load_i32(p)
    m1 = load_i32(p + 64)
    total = tile_dot2(zero, mask_bits(m0, _WORDS), pairs)
    total = tile_dot2(total, mask_bits(shift_right(m0, 8), _WORDS), pairs + step)
    total = tile_dot2(total, mask_bits(m1, _WORDS), pairs + 2 * step)
    return tile_dot2(total, mask_bits(shift_right(m1, 8), _WORDS), pairs + 3 * step)


@inner
def low_nibbles(p: int) -> Any:
    """Low nibbles of four vectors."""
    return (
        mask_bits(load_i32(p), _NIBBLES),
        mask_bits(load_i32(p + 64), _NIBBLES),
        mask_bits(load_i32(p + 128), _NIBBLES),
        mask_bits(load_i32(p + 192), _NIBBLES),
    )


@inner
def high_nibbles(p: int) -> Any:
    """High nibbles of four vectors."""
    return (
        mask_bits(shift_right(load_i32(p), 4), _NIBBLES),
        mask_bits(shift_right(load_i32(p + 64), 4), _NIBBLES),
        mask_bits(shift_right(load_i32(p + 128), 4), _NIBBLES),
        mask_bits(shift_right(load_i32(p + 192), 4), _NIBBLES),
    )


@inner
def _pack_row(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 256):
        block = source + b * _SOURCE_BYTES
        packed = group + b * _BLOCK_BYTES
        pack_scales(block, block + 4, lane, packed + _SCALES, packed + _D)
        for i in range(32):
            put_i32(packed + i * 64 + lane * 4, get_i32(block + 16 + 4 * i))


@inner
def _unpack_row(group: int, lane: int, k: int, out: int) -> None:
    for b in range(k // 256):
        packed = group + b * _BLOCK_BYTES
        d = get_f16(packed + _D + lane * 2)
        dmin = get_f16(packed + _DMIN + lane * 2)
        for j in range(8):
            at = packed + j // 4 * 64 + lane * 4 + j % 4
            scale = d * np.float32(get_u8(at + _SCALES))
            minimum = dmin * np.float32(get_u8(at + _MINIMA))
            for i in range(32):
                byte = get_u8(packed + (j // 2 * 8 + i // 4) * 64 + lane * 4 + i % 4)
                nibble = byte >> 4 if j % 2 else byte & 15
                put_f32(out + (b * 256 + j * 32 + i) * 4, scale * np.float32(nibble) - minimum)


@inner
def _gemv(weights: int, k: int, act: int, tile: int, y: int, addend: int, first: int, last: int) -> None:
    blocks = k // 256
    q0 = field(act, _Q) + tile * k
    scales0 = field(act, _SCALE) + tile * blocks * 4
    pairs0 = field(act, _PAIRS) + tile * blocks * 16
    for g in range(first, last):
        p = weights + g * blocks * _BLOCK_BYTES
        total = zero_f32()
        for b in range(blocks):
            products = zero_i32()
            for half in range(2):
                scales = load_i32(p + _SCALES + half * 64)
                for chunk in range(2):
                    low = zero_i32()
                    high = zero_i32()
                    nibbles = p + half * 1024 + chunk * 512
                    x = q0 + b * 256 + half * 128 + chunk * 64
                    prefetch_lines(nibbles + _AHEAD, 8)
                    for quarter in range(2):
                        low = short_dot4_steps(low, low_nibbles(nibbles + quarter * 256), x + quarter * 16)
                        high = short_dot4_steps(high, high_nibbles(nibbles + quarter * 256), x + 32 + quarter * 16)
                    products = add_short(products, low, short_factor(mask_bits(scales, 0xFF)))
                    products = add_short(products, high, short_factor(mask_bits(shift_right(scales, 8), 0xFF)))
                    scales = shift_right(scales, 16)
            prefetch_lines(p + _SCALES + _AHEAD, 5)
            offsets = minima(p + _MINIMA, pairs0 + b * 16)
            scale = broadcast_f32(scales0 + 4 * b)
            total = fma(to_f32(products), mul_f32(load_f16(p + _D), scale), total)
            total = fma(to_f32(offsets), mul_f32(neg_f32(load_f16(p + _DMIN)), scale), total)
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
    pairs = field(act, _PAIRS) + first * width * 16
    step = 4 * width
    p = group + start // 256 * _BLOCK_BYTES
    for _ in range(start, end, 256):
        products = zero
        for half in range(2):
            scales = load_i32(p + _SCALES + half * 64)
            for chunk in range(2):
                nibbles = p + half * 1024 + chunk * 512
                if fresh:
                    prefetch_lines(nibbles + _TILES_AHEAD, 8)
                part = short_dot4_steps(start_short(zero), low_nibbles(nibbles), x)
                part = short_dot4_steps(part, low_nibbles(nibbles + 256), x + 4 * step)
                products = add_short(products, part, short_factor(mask_bits(scales, 0xFF)))
                part = short_dot4_steps(start_short(zero), high_nibbles(nibbles), x + 8 * step)
                part = short_dot4_steps(part, high_nibbles(nibbles + 256), x + 12 * step)
                products = add_short(products, part, short_factor(mask_bits(shift_right(scales, 8), 0xFF)))
                scales = shift_right(scales, 16)
                x += 16 * step
        if fresh:
            prefetch_lines(p + _SCALES + _TILES_AHEAD, 5)
        tile_scale_add_to_memory(products, load_f16(p + _D), scale, sums)
        tile_scale_add_to_memory(tile_minima(zero, p + _MINIMA, pairs), neg_f32(load_f16(p + _DMIN)), scale, sums)
        p += _BLOCK_BYTES
        scale += step
        pairs += 4 * step


@inner
def _unpack_block(p: int, to: int) -> None:
    for j in range(4):
        nibbles = p + j * 512
        prefetch_lines(nibbles + _TILES_AHEAD, 8)
        put_values(to, j * 16, low_nibbles(nibbles))
        put_values(to, j * 16 + 4, low_nibbles(nibbles + 256))
        put_values(to, j * 16 + 8, high_nibbles(nibbles))
        put_values(to, j * 16 + 12, high_nibbles(nibbles + 256))
    prefetch_lines(p + _SCALES + _TILES_AHEAD, 5)
    put_scales(to, p + _SCALES)


FORMAT = WeightFormat(
    name="Q4_K",
    form=Form.BLOCKS_256,
    group_rows=16,
    block=256,
    group_block_bytes=_BLOCK_BYTES,
    pack_row=_pack_row,
    unpack_row=_unpack_row,
    gemv=_gemv,
    tile=_tile,
    panels=Panels(block_bytes=_BLOCK_BYTES, unpack=_unpack_block, factors=8, sums=8, minima=True),
)
