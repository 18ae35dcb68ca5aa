"""Q5_K: super-blocks of 256 five-bit values, eight 6-bit scales and minima, two half-precision factors.

Packed group of 16 rows, per super-block 2880 bytes: four chunks of 64 values, each two times the five vectors of
cpu_kernels.formats.five_bits (there "step i" is of the chunk's first 32 values, "step i + 4" of its second); then
scales, minima, d and dmin as Q4_K's.
"""

from typing import Any

import numpy as np

from cpu_kernels.formats.five_bits import (
    HIGH_FACTOR_BITS,
    LARGEST_FIVE,
    five_bits,
    high_fives,
    low_fives,
    pack_pair,
)
from cpu_kernels.formats.panels import Panels, put_scales, put_values
from cpu_kernels.formats.q4_k import minima, pack_scales, tile_minima
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import inner
from cpu_kernels.matmul import put_sum
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import (
    add_i32,
    fma,
    mask_bits,
    mul_f32,
    mul_i32,
    neg_f32,
    prefetch_lines,
    shift_right,
    shift_right_signed,
    to_f32,
)
from cpu_kernels.simd.tiles import (
    dot4_steps,
    tile_multiply_add_i32,
    tile_scale_add_to_memory,
    tile_width,
)
from cpu_kernels.simd.vectors import (
    broadcast_f32,
    get_f16,
    get_i32,
    get_u8,
    load_f16,
    load_i32,
    put_f32,
    zero_f32,
    zero_i32,
)

_BLOCK_BYTES = 2880
_CHUNK, _HALF_CHUNK = 640, 320
_SCALES, _MINIMA, _D, _DMIN = 2560, 2688, 2816, 2848
_SOURCE_BYTES, _SOURCE_HIGH, _SOURCE_NIBBLES = 176, 16, 48
_AHEAD = 3072
_NIBBLES, _BITS = 0x0F0F0F0F, 0x01010101
_Q, _SCALE, _PAIRS = int(Act.Q256), int(Act.SCALE256), int(Act.PAIRS256)


@inner
def _pack_row(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 256):
        block = source + b * _SOURCE_BYTES
        packed = group + b * _BLOCK_BYTES
        pack_scales(block, block + 4, lane, packed + _SCALES, packed + _D)
        for i in range(32):
            chunk, step = i // 8, i % 8
            nibbles = get_i32(block + _SOURCE_NIBBLES + 4 * i)
            bits = get_i32(block + _SOURCE_HIGH + 4 * step) >> (2 * chunk)
            to = packed + chunk * _CHUNK + step // 4 * _HALF_CHUNK + lane * 4
            low = nibbles & _NIBBLES | (bits & _BITS) << 4
            pack_pair(to, step % 4, low, nibbles >> 4 & _NIBBLES | (bits >> 1 & _BITS) << 4)


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
                at = packed + j // 2 * _CHUNK + i // 16 * _HALF_CHUNK + lane * 4
                value = np.float32(five_bits(at, i % 16 + j % 2 * 16))
                put_f32(out + (b * 256 + j * 32 + i) * 4, scale * value - minimum)


@inner
def _high_fives_shifted(p: int) -> Any:
    """The second half's values themselves."""
    w0, w1, w2, w3 = high_fives(p)
    return (
        shift_right(w0, HIGH_FACTOR_BITS),
        shift_right(w1, HIGH_FACTOR_BITS),
        shift_right(w2, HIGH_FACTOR_BITS),
        shift_right(w3, HIGH_FACTOR_BITS),
    )


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
                    x = q0 + b * 256 + half * 128 + chunk * 64
                    for quarter in range(2):
                        values = p + (half * 2 + chunk) * _CHUNK + quarter * _HALF_CHUNK
                        prefetch_lines(values + _AHEAD, 5)
                        low = dot4_steps(low, low_fives(values), x + quarter * 16, LARGEST_FIVE)
                        high = dot4_steps(high, high_fives(values), x + 32 + quarter * 16, LARGEST_FIVE)
                    high = shift_right_signed(high, HIGH_FACTOR_BITS)
                    products = add_i32(products, mul_i32(low, mask_bits(scales, 0xFF)))
                    products = add_i32(products, mul_i32(high, mask_bits(shift_right(scales, 8), 0xFF)))
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
                values = p + (half * 2 + chunk) * _CHUNK
                if fresh:
                    prefetch_lines(values + _AHEAD, 10)
                part = zero
                for quarter in range(2):
                    low = low_fives(values + quarter * _HALF_CHUNK)
                    part = dot4_steps(part, low, x + quarter * 4 * step, LARGEST_FIVE)
                products = tile_multiply_add_i32(products, part, mask_bits(scales, 0xFF))
                part = zero
                for quarter in range(2):
                    high = _high_fives_shifted(values + quarter * _HALF_CHUNK)
                    part = dot4_steps(part, high, x + (8 + quarter * 4) * step, LARGEST_FIVE)
                products = tile_multiply_add_i32(products, part, mask_bits(shift_right(scales, 8), 0xFF))
                scales = shift_right(scales, 16)
                x += 16 * step
        if fresh:
            prefetch_lines(p + _SCALES + _AHEAD, 5)
        tile_scale_add_to_memory(products, load_f16(p + _D), scale, sums)
        tile_scale_add_to_memory(tile_minima(zero, p + _MINIMA, pairs), neg_f32(load_f16(p + _DMIN)), scale, sums)
        p += _BLOCK_BYTES
        scale += step
        pairs += 4 * step


@inner
def _unpack_block(p: int, to: int) -> None:
    for j in range(4):
        values = p + j * _CHUNK
        prefetch_lines(values + _AHEAD, 10)
        for quarter in range(2):
            put_values(to, j * 16 + quarter * 4, low_fives(values + quarter * _HALF_CHUNK))
            put_values(to, j * 16 + 8 + quarter * 4, _high_fives_shifted(values + quarter * _HALF_CHUNK))
    prefetch_lines(p + _SCALES + _AHEAD, 5)
    put_scales(to, p + _SCALES)


FORMAT = WeightFormat(
    name="Q5_K",
    form=Form.BLOCKS_256,
    group_rows=16,
    block=256,
    group_block_bytes=_BLOCK_BYTES,
    pack_row=_pack_row,
    unpack_row=_unpack_row,
    gemv=_gemv,
    tile=_tile,
    panels=Panels(block_bytes=_BLOCK_BYTES, unpack=_unpack_block, factors=8, sums=16, minima=True),
)
