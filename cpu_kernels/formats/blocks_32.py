"""Formats whose blocks hold 32 small values and a scale, and perhaps a minimum: what they share.

Packed group of 32 rows, per block: two halves of 16 rows, each four vectors whose bytes hold a value of k step i in
their low bits and one of step i + 4 in their high bits (and a fifth vector where values have five bits); then 32
scales; then 32 f16 minima where the format has them. No bigger than the source's block where its scale is f16.

A format without minima gives its values plus an offset that makes bytes unsigned: offset * 2**spare_bits is 128, and
the packed activations' -128 * sum takes it back. With minima, bytes start at zero.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import inner
from cpu_kernels.matmul import put_sum
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import add_i32, fma, mul_f32, prefetch_lines, shift_left, to_f32
from cpu_kernels.simd.dot import has_short_sums
from cpu_kernels.simd.tiles import (
    biased_dot4_steps,
    broadcast_like,
    dot4_steps,
    start_biased,
    tile_scale_add_to_memory,
    tile_width,
)
from cpu_kernels.simd.vectors import (
    broadcast_f32,
    broadcast_i32,
    get_f16,
    get_i32,
    load_f16,
    put_f32,
    put_i32,
    splat_f32,
    zero_f32,
    zero_i32,
)

# Bytes ahead of their use that weights are asked for; see docs/speed.md.
_AHEAD, _TILES_AHEAD = 1024, 3072
_Q, _SCALE, _SUM = int(Act.Q32), int(Act.SCALE32), int(Act.SUM32)
# Undoes the factor in the packed activations' -128 * sum.
_PER_SUM = np.float32(-1.0 / 128.0)


@inner
def copy_nibbles(source: int, to: int) -> None:
    """Store a block's sixteen bytes of nibbles (value j low, value j + 16 high) as one lane of four vectors."""
    for i in range(4):
        put_i32(to + i * 64, get_i32(source + 4 * i))


@inner
def nibble(at: int, i: int) -> int:
    """Value i of a lane's nibbles, as copy_nibbles left them."""
    return int(get_i32(at + i // 4 % 4 * 64) >> (i % 4 * 8 + i // 16 * 4)) & 15


@dataclass(frozen=True, kw_only=True)
class Blocks32:
    """What is a format's own.

    half_bytes: bytes of weights of 16 rows of a block. low_steps(p), high_steps(p): the four vectors of unsigned bytes
    of k steps 0-3 and of steps 4-7, the latter times 2**shift. largest: the largest byte of the former. spare_bits: how
    many bits bytes leave free. value(at, i): value i of the lane at an address, for embeddings. minima: whether blocks
    have them. load_scale, get_scale, scale_bytes: how scales are loaded, sixteen or one, and the bytes of one.
    """

    half_bytes: int
    low_steps: Any
    high_steps: Any
    largest: int
    spare_bits: int
    value: Any
    minima: bool = False
    load_scale: Any = load_f16
    get_scale: Any = get_f16
    scale_bytes: int = 2

    @property
    def scales_at(self) -> int:
        """Offset of the scales in a packed block."""
        return 2 * self.half_bytes

    @property
    def minima_at(self) -> int:
        """Offset of the minima."""
        return self.scales_at + 32 * self.scale_bytes

    @property
    def shift(self) -> int:
        """Bits by which high_steps, and so sums, are shifted up: the free ones, unless short sums need them."""
        return 0 if has_short_sums() else self.spare_bits

    @property
    def block_bytes(self) -> int:
        """Bytes of a packed block of 32 rows."""
        return self.minima_at + (64 if self.minima else 0)


def blocks_32_format(name: str, layout: Blocks32, pack_row: Any) -> WeightFormat:
    """Build the format's kernels."""
    scales_of_half, minima_of_half = _factors(layout)
    return WeightFormat(
        name=name,
        form=Form.BLOCKS_32,
        group_rows=32,
        block=32,
        group_block_bytes=layout.block_bytes,
        pack_row=pack_row,
        unpack_row=_unpack_row(layout),
        gemv=_gemv(layout, scales_of_half, minima_of_half),
        tile=_tile(layout, scales_of_half, minima_of_half),
    )


def _unpack_row(layout: Blocks32) -> Any:
    value, get_scale, scale_bytes, minima = layout.value, layout.get_scale, layout.scale_bytes, layout.minima
    half_bytes, scales_at, minima_at = layout.half_bytes, layout.scales_at, layout.minima_at
    block_bytes = layout.block_bytes

    @inner
    def unpack_row(group: int, lane: int, k: int, out: int) -> None:
        for b in range(k // 32):
            packed = group + b * block_bytes
            scale = get_scale(packed + scales_at + lane * scale_bytes)
            at = packed + lane // 16 * half_bytes + lane % 16 * 4
            for i in range(32):
                product = scale * np.float32(value(at, i))
                if minima:
                    product += get_f16(packed + minima_at + lane * 2)
                put_f32(out + (b * 32 + i) * 4, product)

    return unpack_row


def _factors(layout: Blocks32) -> tuple[Any, Any]:
    """Functions that load the scales and the minima of a half, made fit for what they multiply."""
    load_scale, half_scales = layout.load_scale, 16 * layout.scale_bytes
    scales_at, minima_at = layout.scales_at, layout.minima_at
    per_byte = np.float32(2.0**-layout.shift)

    @inner
    def scales_of_half(p: int, half: int) -> Any:
        return mul_f32(load_scale(p + scales_at + half * half_scales), splat_f32(per_byte))

    @inner
    def minima_of_half(p: int, half: int) -> Any:
        return mul_f32(load_f16(p + minima_at + half * 32), splat_f32(_PER_SUM))

    return scales_of_half, minima_of_half


def _start(layout: Blocks32) -> Any:
    """What sums of products begin with, given an accumulator like them and the address of the activations' sums."""
    surplus = layout.spare_bits - layout.shift

    @inner
    def start_at_zero(like: Any, offset: int) -> Any:
        return like

    @inner
    def start_biased_at(like: Any, offset: int) -> Any:
        return start_biased(like, offset)

    @inner
    def start_offset(like: Any, offset: int) -> Any:
        return broadcast_like(like, offset, surplus)

    if layout.minima:
        return start_at_zero
    return start_offset if layout.spare_bits else start_biased_at


def _add_steps(layout: Blocks32) -> Any:
    """The products of four vectors and four k steps, added to an accumulator."""
    largest = layout.largest

    @inner
    def add_small(total: Any, weights: Any, x: int) -> Any:
        return dot4_steps(total, weights, x, largest)

    @inner
    def add_biased(total: Any, weights: Any, x: int) -> Any:
        return biased_dot4_steps(total, weights, x)

    return add_small if layout.spare_bits else add_biased


def _gemv(layout: Blocks32, scales_of_half: Any, minima_of_half: Any) -> Any:
    low_steps, high_steps, shift, add_steps = layout.low_steps, layout.high_steps, layout.shift, _add_steps(layout)
    half_bytes, block_bytes, minima, start_sums = layout.half_bytes, layout.block_bytes, layout.minima, _start(layout)
    lines = block_bytes // 64

    @inner
    def products_of_half(p: int, x: int, start: Any) -> Any:
        low = add_steps(zero_i32(), low_steps(p), x)
        high = add_steps(start, high_steps(p), x + 16)
        return to_f32(add_i32(shift_left(low, shift), high))

    @inner
    def gemv(weights: int, k: int, act: int, tile: int, y: int, addend: int, first: int, last: int) -> None:
        blocks = k // 32
        scales0 = field(act, _SCALE) + tile * blocks * 4
        sums0 = field(act, _SUM) + tile * blocks * 4
        q0 = field(act, _Q) + tile * k
        for g in range(first, last):
            p = weights + g * blocks * block_bytes
            f0 = zero_f32()
            f1 = zero_f32()
            for b in range(blocks):
                prefetch_lines(p + _AHEAD, lines)
                sums = broadcast_i32(sums0 + 4 * b)
                scale = broadcast_f32(scales0 + 4 * b)
                start = start_sums(zero_i32(), sums0 + 4 * b)
                x = q0 + b * 32
                f0 = fma(products_of_half(p, x, start), mul_f32(scales_of_half(p, 0), scale), f0)
                f1 = fma(products_of_half(p + half_bytes, x, start), mul_f32(scales_of_half(p, 1), scale), f1)
                if minima:
                    f0 = fma(to_f32(sums), mul_f32(minima_of_half(p, 0), scale), f0)
                    f1 = fma(to_f32(sums), mul_f32(minima_of_half(p, 1), scale), f1)
                p += block_bytes
            put_sum(f0, y + g * 128, addend + g * 128 if addend != 0 else 0)
            put_sum(f1, y + g * 128 + 64, addend + g * 128 + 64 if addend != 0 else 0)

    return gemv


def _tile(layout: Blocks32, scales_of_half: Any, minima_of_half: Any) -> Any:
    low_steps, high_steps, shift, add_steps = layout.low_steps, layout.high_steps, layout.shift, _add_steps(layout)
    half_bytes, block_bytes, minima, start_sums = layout.half_bytes, layout.block_bytes, layout.minima, _start(layout)
    lines = block_bytes // 64

    @inner
    def scaled_low_steps(p: int) -> Any:
        w0, w1, w2, w3 = low_steps(p)
        return (
            shift_left(w0, shift),
            shift_left(w1, shift),
            shift_left(w2, shift),
            shift_left(w3, shift),
        )

    @inner
    def tile(
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
        step = 4 * width
        for half in range(2):
            p = group + start // 32 * block_bytes
            x = field(act, _Q) + first * width * 32
            scale = field(act, _SCALE) + first * width * 4
            offset = field(act, _SUM) + first * width * 4
            for _ in range(start, end, 32):
                if fresh and half == 0:
                    prefetch_lines(p + _TILES_AHEAD, lines)
                products = start_sums(zero, offset)
                products = add_steps(products, scaled_low_steps(p + half * half_bytes), x)
                products = add_steps(products, high_steps(p + half * half_bytes), x + 4 * step)
                tile_scale_add_to_memory(products, scales_of_half(p, half), scale, sums + half * 64 * width)
                if minima:
                    constants = broadcast_like(zero, offset, 0)
                    tile_scale_add_to_memory(constants, minima_of_half(p, half), scale, sums + half * 64 * width)
                p += block_bytes
                x += 8 * step
                scale += step
                offset += step

    return tile
