"""Formats whose blocks hold 32 small values, a scale, and possibly a minimum.

Layout of a packed group of 32 rows, per block: the codec's vectors of the first 16 rows, then of the second; 32 scales;
32 minima in half precision if the format has them. With scales in half precision this is no larger than in the file.

Accumulators start with the activations' sums times minus the bias that values are stored with. With minima they start
at zero.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_kernels.declarations import inner
from cpu_kernels.formats.codec import Codec
from cpu_kernels.formats.source import Source
from cpu_kernels.isa import POLICY
from cpu_kernels.records import Act, field
from cpu_kernels.simd.arithmetic import mul_f32, prefetch_lines
from cpu_kernels.simd.bytes import BYTE_OFFSET
from cpu_kernels.simd.tiles import (
    start_biased,
    start_offset,
    tile_add_scaled,
    tile_add_scaled_in_memory,
    tile_broadcast,
    tile_load_f32,
    tile_store,
    tile_width,
)
from cpu_kernels.simd.vectors import (
    get_f16,
    get_f32,
    get_i16,
    load_f16,
    load_f32,
    put_f32,
    put_i16,
    splat_f32,
)

_IN_REGISTERS = POLICY.sums_in_registers
_Q, _SCALE, _SUM = int(Act.Q32), int(Act.SCALE32), int(Act.SUM32)
# Undoes the factor in the packed activations' -128 * sum.
_PER_SUM = np.float32(-1.0 / 128.0)


@dataclass(frozen=True, kw_only=True)
class Blocks32:
    """A format of blocks of 32 values.

    bias: added to values as stored: a power of two below 128, or 0. scale, minimum: offsets of the factors in the
    file's block; minimum is None without minima. put_scale(row, b, to): writes the scale of a row's block b in single
    precision; None if the file has it as a half-precision number. blocks_together: how many of these blocks a block of
    the file holds.
    """

    name: str
    source: Source
    codec: Codec
    bias: int = 0
    scale: int = 0
    minimum: int | None = None
    put_scale: Any = None
    blocks_together: int = 1

    @property
    def half_bytes(self) -> int:
        """Bytes of 16 rows' values."""
        return self.codec.nbytes * 8 // len(self.codec.steps)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a packed scale."""
        return 2 if self.put_scale is None else 4

    @property
    def minima_at(self) -> int:
        """Offset of the minima in a packed block."""
        return 2 * self.half_bytes + 32 * self.scale_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a packed block of 32 rows."""
        return self.minima_at + (0 if self.minimum is None else 64)


def row_packer(layout: Blocks32) -> Any:
    """Return pack_row(source, group, lane, k), which packs a row of a file's blocks into its lane of a group."""
    four, put, together = layout.source.reader(), layout.codec.put, layout.blocks_together
    source_bytes, block_bytes, half_bytes = layout.source.nbytes, layout.nbytes, layout.half_bytes
    scales_at, scale_bytes, minima_at = 2 * half_bytes, layout.scale_bytes, layout.minima_at
    minima, minimum, scale = layout.minimum is not None, layout.minimum or 0, layout.scale
    flip = BYTE_OFFSET * 0x01010101 if layout.codec.is_offset and not layout.codec.table else 0

    @inner
    def copy_half(row: int, b: int, to: int) -> None:
        put_i16(to, get_i16(row + b // together * source_bytes + scale))

    put_scale = layout.put_scale or copy_half

    @inner
    def pack_row(source: int, group: int, lane: int, k: int) -> None:
        for b in range(k // 32):
            block, packed = source + b // together * source_bytes, group + b * block_bytes
            put_scale(source, b, packed + scales_at + lane * scale_bytes)
            if minima:
                put_i16(packed + minima_at + lane * 2, get_i16(block + minimum))
            for step in range(8):
                values = four(block, b % together * 32 + 4 * step) ^ flip
                put(packed + lane // 16 * half_bytes + lane % 16 * 4, step, values)

    return pack_row


def row_unpacker(layout: Blocks32) -> Any:
    """Return unpack_row(group, lane, k, out, memory), which writes a lane's values as floats."""
    value, half_bytes, block_bytes = layout.codec.value, layout.half_bytes, layout.nbytes
    scales_at, scale_bytes, minima_at = 2 * half_bytes, layout.scale_bytes, layout.minima_at
    get_scale, minima, bias = get_f32 if scale_bytes == 4 else get_f16, layout.minimum is not None, layout.bias
    # Signed bytes may be stored in offset binary.
    sign, bias = (BYTE_OFFSET ^ 128, 128) if layout.codec.is_offset and not layout.codec.table else (0, bias)

    @inner
    def unpack_row(group: int, lane: int, k: int, out: int, memory: int) -> None:
        for b in range(k // 32):
            packed = group + b * block_bytes
            scale = get_scale(packed + scales_at + lane * scale_bytes)
            where = packed + lane // 16 * half_bytes + lane % 16 * 4
            for i in range(32):
                product = scale * np.float32((value(where, i) ^ sign) - bias)
                if minima:
                    product += get_f16(packed + minima_at + lane * 2)
                put_f32(out + (b * 32 + i) * 4, product)

    return unpack_row


def _start(layout: Blocks32) -> Any:
    """Return start(zero, sums), the initial accumulators. sums: address of the activations' -128 * sums."""

    @inner
    def start_at_zero(zero: Any, sums: int) -> Any:
        return zero

    if layout.minimum is not None:
        return start_at_zero
    return start_offset if layout.codec.is_offset else start_biased(layout.bias)


def tile_adder(layout: Blocks32) -> Any:
    """Return the function that cpu_kernels.matmul calls for a register tile."""
    dot, start_sums = layout.codec.dot(0, 8), _start(layout)
    half_bytes, block_bytes, minima = layout.half_bytes, layout.nbytes, layout.minimum is not None
    scales_at, half_scales, minima_at = 2 * half_bytes, 16 * layout.scale_bytes, layout.minima_at
    load_scale, lines = load_f32 if layout.scale_bytes == 4 else load_f16, (block_bytes + 63) // 64

    @inner
    def add(sums: Any, products: Any, p: int, half: int, scale: int, total: int, out: int) -> Any:
        """Add the products of 16 rows times their scales, and their minima, to sums in registers or at `out`."""
        factor = load_scale(p + scales_at + half * half_scales)
        if _IN_REGISTERS or tile_width(products) == 1:
            sums = tile_add_scaled(sums, products, factor, scale)
        else:
            tile_add_scaled_in_memory(products, factor, scale, out)
        if minima:
            factor = mul_f32(load_f16(p + minima_at + half * 32), splat_f32(_PER_SUM))
            totals = tile_broadcast(products, total)
            if _IN_REGISTERS or tile_width(products) == 1:
                sums = tile_add_scaled(sums, totals, factor, scale)
            else:
                tile_add_scaled_in_memory(totals, factor, scale, out)
        return sums

    @inner
    def one_token(zero: Any, p: int, blocks: int, x: int, scale: int, total: int, sums: int, ahead: int) -> None:
        """Multiply both halves of a block together, so that operands are loaded once."""
        first, second = tile_load_f32(zero, sums), tile_load_f32(zero, sums + 64)
        for b in range(blocks):
            prefetch_lines(p + ahead, lines)
            low = dot(start_sums(zero, total + 4 * b), p, x + 32 * b)
            high = dot(start_sums(zero, total + 4 * b), p + half_bytes, x + 32 * b)
            first = add(first, low, p, 0, scale + 4 * b, total + 4 * b, sums)
            second = add(second, high, p, 1, scale + 4 * b, total + 4 * b, sums)
            p += block_bytes
        tile_store(first, sums)
        tile_store(second, sums + 64)

    @inner
    def tile(zero: Any, group: int, k: int, act: int, index: int, sums: int, start: int, end: int, ahead: int) -> None:
        width = tile_width(zero)
        first, step = index * (k // 32) + start // 32, 4 * width
        x, scale = field(act, _Q) + first * 8 * step, field(act, _SCALE) + first * step
        total, p = field(act, _SUM) + first * step, group + start // 32 * block_bytes
        if width == 1:
            one_token(zero, p, (end - start) // 32, x, scale, total, sums, ahead)
        else:
            for half in range(2):
                out, q = sums + half * 64 * width, p
                added = tile_load_f32(zero, out)
                for b in range((end - start) // 32):
                    if ahead > 0 and half == 0:
                        prefetch_lines(q + ahead, lines)
                    products = dot(start_sums(zero, total + b * step), q + half * half_bytes, x + b * 8 * step)
                    added = add(added, products, q, half, scale + b * step, total + b * step, out)
                    q += block_bytes
                if _IN_REGISTERS:
                    tile_store(added, out)

    return tile
