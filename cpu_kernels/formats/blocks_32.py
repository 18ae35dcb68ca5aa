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
from cpu_kernels.formats.codec import BYTES, FIVE_BITS, FP4, NIBBLES, Codec
from cpu_kernels.formats.source import Plane, Source
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.isa import POLICY
from cpu_kernels.records import TILE_WIDTHS, Act, Form, field
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
    get_u8,
    load_f16,
    load_f32,
    put_f32,
    put_i16,
    put_i32,
    splat_f32,
)

_IN_REGISTERS = POLICY.sums_in_registers
# The most tokens of a tile for which registers hold the sums of both halves of a block.
_BOTH_HALVES = 4
# Undoes the factor in the packed activations' -128 * sum.
_PER_SUM = np.float32(-1.0 / 128.0)
_IQ4 = Codec(NIBBLES.steps, table=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))


@dataclass(kw_only=True, eq=False)
class Blocks32(WeightFormat):
    """A format of blocks of 32 values.

    bias: added to values as stored: a power of two below 128, or 0. minima: whether a minimum in half precision follows
    the scale in the file's block. put_scale(row, b, to): writes the scale of a row's block b in single precision; None
    if the file's block begins with it in half precision.
    """

    form, group_rows, block = Form.BLOCKS_32, 32, 32
    codec: Codec
    bias: int = 0
    minima: bool = False
    put_scale: Any = None

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
        return self.minima_at + 64 * self.minima

    def row_packer(self) -> Any:
        """See WeightFormat."""
        four, put, together = self.source.reader(), self.codec.put, self.source.values // 32
        source_bytes, block_bytes, half_bytes = self.source.nbytes, self.nbytes, self.half_bytes
        scales_at, scale_bytes, minima_at = 2 * half_bytes, self.scale_bytes, self.minima_at
        minima, flip = self.minima, BYTE_OFFSET * 0x01010101 if self.codec.is_offset and not self.codec.table else 0

        @inner
        def copy_half(row: int, b: int, to: int) -> None:
            put_i16(to, get_i16(row + b // together * source_bytes))

        put_scale = self.put_scale or copy_half

        @inner
        def pack_row(source: int, group: int, lane: int, k: int) -> None:
            for b in range(k // 32):
                block, packed = source + b // together * source_bytes, group + b * block_bytes
                put_scale(source, b, packed + scales_at + lane * scale_bytes)
                if minima:
                    put_i16(packed + minima_at + lane * 2, get_i16(block + 2))
                for step in range(8):
                    values = four(block, b % together * 32 + 4 * step) ^ flip
                    put(packed + lane // 16 * half_bytes + lane % 16 * 4, step, values)

        return pack_row

    def row_unpacker(self) -> Any:
        """See WeightFormat."""
        value, half_bytes, block_bytes = self.codec.value, self.half_bytes, self.nbytes
        scales_at, scale_bytes, minima_at = 2 * half_bytes, self.scale_bytes, self.minima_at
        get_scale, minima, bias = get_f32 if scale_bytes == 4 else get_f16, self.minima, self.bias
        # Signed bytes may be stored in offset binary.
        sign, bias = (BYTE_OFFSET ^ 128, 128) if self.codec.is_offset and not self.codec.table else (0, bias)

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

    def _start(self) -> Any:
        """Return start(zero, sums), the initial accumulators. sums: address of the activations' -128 * sums."""

        @inner
        def start_at_zero(zero: Any, sums: int) -> Any:
            return zero

        if self.minima:
            return start_at_zero
        return start_offset if self.codec.is_offset else start_biased(self.bias)

    def _adder(self, most: int) -> Any:
        """Return add(sums, products, p, half, scale, total, out): adds the products of 16 rows, times their scales.

        The block's minima are added, too. Sums of tiles of up to `most` tokens are in registers, others at `out`.
        """
        scales_at, half_scales, minima_at = 2 * self.half_bytes, 16 * self.scale_bytes, self.minima_at
        load_scale, minima = load_f32 if self.scale_bytes == 4 else load_f16, self.minima

        @inner
        def add(sums: Any, products: Any, p: int, half: int, scale: int, total: int, out: int) -> Any:
            factor = load_scale(p + scales_at + half * half_scales)
            if tile_width(products) <= most:
                sums = tile_add_scaled(sums, products, factor, scale)
            else:
                tile_add_scaled_in_memory(products, factor, scale, out)
            if minima:
                factor = mul_f32(load_f16(p + minima_at + half * 32), splat_f32(_PER_SUM))
                totals = tile_broadcast(products, total)
                if tile_width(products) <= most:
                    sums = tile_add_scaled(sums, totals, factor, scale)
                else:
                    tile_add_scaled_in_memory(totals, factor, scale, out)
            return sums

        return add

    def tile_adder(self) -> Any:
        """See WeightFormat.

        The tile that waits for the weights reads each block once from front to back, as prefetchers expect. Later tiles
        find a group in the second-level cache and multiply its halves one after the other, with all sums in registers.
        Where those are few, tiles alternate (cpu_kernels.matmul), so only single tokens read in order.
        """
        dot, start_sums = self.codec.dot(0, 8), self._start()
        half_bytes, block_bytes, lines = self.half_bytes, self.nbytes, (self.nbytes + 63) // 64
        most = _BOTH_HALVES if _IN_REGISTERS else 1
        add_both, add_half = self._adder(most), self._adder(max(TILE_WIDTHS) if _IN_REGISTERS else 0)

        @inner
        def both_halves(zero: Any, p: int, blocks: int, x: int, scale: int, total: int, sums: int, ahead: int) -> None:
            step = 4 * tile_width(zero)
            out = sums + 16 * step
            first, second = tile_load_f32(zero, sums), tile_load_f32(zero, out)
            for b in range(blocks):
                prefetch_lines(p + ahead, lines)
                at, at_scale, at_total = x + b * 8 * step, scale + b * step, total + b * step
                products = dot(start_sums(zero, at_total), p, at)
                first = add_both(first, products, p, 0, at_scale, at_total, sums)
                products = dot(start_sums(zero, at_total), p + half_bytes, at)
                second = add_both(second, products, p, 1, at_scale, at_total, out)
                p += block_bytes
            if tile_width(zero) <= most:
                tile_store(first, sums)
                tile_store(second, out)

        @inner
        def tile(
            zero: Any, group: int, k: int, act: int, index: int, sums: int, start: int, end: int, ahead: int
        ) -> None:
            width = tile_width(zero)
            first, step = index * (k // 32) + start // 32, 4 * width
            x, scale = field(act, Act.Q32) + first * 8 * step, field(act, Act.SCALE32) + first * step
            total, p = field(act, Act.SUM32) + first * step, group + start // 32 * block_bytes
            if width <= most or (_IN_REGISTERS and ahead > 0):
                both_halves(zero, p, (end - start) // 32, x, scale, total, sums, ahead)
            else:
                for half in range(2):
                    out, q = sums + half * 64 * width, p
                    added = tile_load_f32(zero, out)
                    for b in range((end - start) // 32):
                        if ahead > 0 and half == 0:
                            prefetch_lines(q + ahead, lines)
                        products = dot(start_sums(zero, total + b * step), q + half * half_bytes, x + b * 8 * step)
                        added = add_half(added, products, q, half, scale + b * step, total + b * step, out)
                        q += block_bytes
                    if _IN_REGISTERS:
                        tile_store(added, out)

        return tile


@inner
def _put_scale_iq4_xs(row: int, b: int, to: int) -> None:
    """d * (6-bit scale - 32)."""
    block, j = row + b // 8 * 136, b % 8
    low, high = get_u8(block + 4 + j // 2) >> (j % 2 * 4) & 15, get_i16(block + 2) >> (2 * j) & 3
    put_f32(to, get_f16(block) * np.float32((low | high << 4) - 32))


@inner
def _put_scale_mxfp4(row: int, b: int, to: int) -> None:
    """2 ** (exponent - 127) / 2, since the table of values is doubled; exponents 0 and 1 give subnormal numbers."""
    exponent = get_u8(row + b * 17)
    put_i32(to, (exponent - 1) << 23 if exponent >= 2 else 0x00200000 << exponent)


FORMATS = {
    each.name: each
    for each in (
        Blocks32(name="Q8_0", source=Source(nbytes=34, planes=[Plane(2, 8, 32)], halves=(0,)), codec=BYTES),
        Blocks32(name="Q4_0", source=Source(nbytes=18, planes=[Plane(2, 4, 16)], halves=(0,)), codec=NIBBLES, bias=8),
        Blocks32(
            name="Q4_1", source=Source(nbytes=20, planes=[Plane(4, 4, 16)], halves=(0, 2)), codec=NIBBLES, minima=True
        ),
        Blocks32(
            name="Q5_0",
            source=Source(nbytes=22, planes=[Plane(6, 4, 16), Plane(2, 1, 1, 4)], halves=(0,)),
            codec=FIVE_BITS,
            bias=16,
        ),
        Blocks32(
            name="Q5_1",
            source=Source(nbytes=24, planes=[Plane(8, 4, 16), Plane(4, 1, 1, 4)], halves=(0, 2)),
            codec=FIVE_BITS,
            minima=True,
        ),
        Blocks32(name="IQ4_NL", source=Source(nbytes=18, planes=[Plane(2, 4, 16)], halves=(0,)), codec=_IQ4),
        Blocks32(
            name="IQ4_XS",
            source=Source(nbytes=136, values=256, planes=[Plane(8, 4, 16)], halves=(0,)),
            codec=_IQ4,
            put_scale=_put_scale_iq4_xs,
        ),
        Blocks32(
            name="MXFP4",
            source=Source(nbytes=17, planes=[Plane(1, 4, 16)], exponents=(0,)),
            codec=FP4,
            put_scale=_put_scale_mxfp4,
        ),
    )
}
