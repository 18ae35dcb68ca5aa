"""Formats with a scale per 16 small values, or per multiple of 32.

Activations have a scale per 32 values, so a unit is 32 values of 32 rows. Layout, per block of one or more units with
the same scales: for each unit the codec's vectors of the first 16 rows, then of the second; then the scales of 32 rows,
once for the block, or for the first and second 16 values of its only unit. This is no larger than in the file.

NVFP4's scales are bytes: four bits of exponent and three of mantissa, like OCP's E4M3 without a sign (ggml's ue4m3).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from cpu_kernels.declarations import address, define, float32, inner
from cpu_kernels.formats.codec import FP4, Codec, Piece
from cpu_kernels.formats.source import Plane, Source
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.isa import POLICY
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import prefetch_lines
from cpu_kernels.simd.bytes import BYTE_OFFSET
from cpu_kernels.simd.tiles import (
    add_tiles,
    multiplied,
    start_biased,
    start_offset,
    tile_add_scaled,
    tile_add_scaled_in_memory,
    tile_dot4,
    tile_load_f32,
    tile_store,
    tile_width,
)
from cpu_kernels.simd.vectors import (
    F32,
    I8,
    I32,
    constant,
    f32x16,
    get_f16,
    get_i16,
    get_u8,
    i32x16,
    load,
    load_f16,
    put_f32,
    put_i16,
    put_u8,
    splat_i32,
    view,
)

_IN_REGISTERS = POLICY.sums_in_registers
_ONES = 0x01010101
# Exponents have a bias of 7, single precision 127, and the table of values is doubled: 127 - 7 - 1.
_E4M3_UNIT, _E4M3_SHIFT, _E4M3_NAN = 2.0**119, 20, 0x7F


def _number(codes: Any) -> Any:
    return (codes.astype(np.uint32) << np.uint32(_E4M3_SHIFT)).view(np.float32) * np.float32(_E4M3_UNIT)


def _emit_number(builder: ir.IRBuilder, codes: ir.Value, integers: ir.Type, floats: ir.Type) -> ir.Value:
    bits = builder.shl(builder.zext(codes, integers), constant(integers, _E4M3_SHIFT))
    return builder.fmul(builder.bitcast(bits, floats), constant(floats, _E4M3_UNIT))


_load_e4m3 = define(
    "load_e4m3",
    [address],
    f32x16,
    lambda b, p: _emit_number(b, load(b, p, ir.VectorType(I8, 16), 1), i32x16.llvm, f32x16.llvm),
    lambda p: _number(view(p, np.uint8)),
)
_get_e4m3 = define(
    "get_e4m3",
    [address],
    float32,
    lambda b, p: _emit_number(b, load(b, p, I8), I32, F32),
    lambda p: _number(view(p, np.uint8, 1))[0],
)


@inner
def _put_bytes(block: int, part: int, to: int) -> None:
    for i in range(2):
        code = get_u8(block + 2 * part + i)
        put_u8(to + 32 * i, 0 if code == _E4M3_NAN else code & _E4M3_NAN)


@inner
def _put_half(block: int, part: int, to: int) -> None:
    put_i16(to, get_i16(block))


@inner
def _scaled(sums: Any, products: Any, factor: Any, scale: int, out: int) -> Any:
    """Add products times their scales to sums in registers or at `out`; return the sums."""
    if _IN_REGISTERS or tile_width(products) == 1:
        return tile_add_scaled(sums, products, factor, scale)
    tile_add_scaled_in_memory(products, factor, scale, out)
    return sums


@dataclass(kw_only=True, eq=False)
class ScaledBlocks(WeightFormat):
    """span: values that share a scale: 16, with byte scales, or a multiple of 32, with half-precision scales.

    bias: added to values as stored: a power of two below 128, or 0.
    """

    form, group_rows = Form.BLOCKS_32, 32
    codec: Codec
    span: int
    bias: int = 0

    @property
    def units(self) -> int:
        """Number of units in a packed block."""
        return max(self.span // 32, 1)

    @property
    def block(self) -> int:
        """Values of a row in a packed block."""
        return 32 * self.units

    @property
    def half_bytes(self) -> int:
        """Bytes of 16 rows' values in a unit."""
        return self.codec.nbytes * 8 // len(self.codec.steps)

    @property
    def scales_at(self) -> int:
        """Offset of the scales in a packed block."""
        return self.units * 2 * self.half_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a packed block of 32 rows. Scales take two bytes per row: two of one byte, or one of two."""
        return self.scales_at + 64

    def row_packer(self) -> Any:
        """See WeightFormat."""
        four, put, together = self.source.reader(), self.codec.put, self.source.values // self.block
        source_bytes, block_bytes, half_bytes = self.source.nbytes, self.nbytes, self.half_bytes
        units, scales_at = self.units, self.scales_at
        put_scales, scale_bytes = (_put_bytes, 1) if self.span == 16 else (_put_half, 2)

        @inner
        def pack_row(source: int, group: int, lane: int, k: int) -> None:
            for b in range(k // (32 * units)):
                block, packed = source + b // together * source_bytes, group + b * block_bytes
                put_scales(block, b % together, packed + scales_at + lane * scale_bytes)
                where = packed + lane // 16 * half_bytes + lane % 16 * 4
                for step in range(8 * units):
                    values = four(block, (b % together * units * 8 + step) * 4)
                    put(where + step // 8 * 2 * half_bytes, step % 8, values)

        return pack_row

    def row_unpacker(self) -> Any:
        """See WeightFormat."""
        value, half_bytes, block_bytes = self.codec.value, self.half_bytes, self.nbytes
        values, scales_at, bias, bytewise = self.block, self.scales_at, self.bias, self.span == 16

        @inner
        def unpack_row(group: int, lane: int, k: int, out: int, memory: int) -> None:
            for b in range(k // values):
                packed = group + b * block_bytes
                where = packed + lane // 16 * half_bytes + lane % 16 * 4
                for i in range(values):
                    if bytewise:
                        scale = _get_e4m3(packed + scales_at + i // 16 * 32 + lane)
                    else:
                        scale = get_f16(packed + scales_at + lane * 2)
                    number = value(where + i // 32 * 2 * half_bytes, i % 32) - bias
                    put_f32(out + (b * values + i) * 4, scale * np.float32(number))

        return unpack_row

    def _adder_of_16(self) -> Any:
        """Return add(sums, zero, p, at, x, scale, total, out): adds a unit's products of 16 rows, 16 values per scale.

        In offset binary, sums start at -128 times the activations' sum. Packed activations have that sum only for all
        32 values, so the first 16 values' sum is computed here.
        """
        low, high, begins = self.codec.dot(0, 4), self.codec.dot(4, 4), BYTE_OFFSET != 0

        @inner
        def add(sums: Any, zero: Any, p: int, at: int, x: int, scale: int, total: int, out: int) -> Any:
            step = 4 * tile_width(zero)
            first, second = zero, zero
            if begins:
                ones = splat_i32(_ONES)
                some = tile_dot4(tile_dot4(zero, ones, x), ones, x + step)
                some = tile_dot4(tile_dot4(some, ones, x + 2 * step), ones, x + 3 * step)
                first = multiplied(some, splat_i32(-128))
                second = add_tiles(start_offset(zero, total), multiplied(some, splat_i32(128)))
            sums = _scaled(sums, low(first, p, x), _load_e4m3(at), scale, out)
            return _scaled(sums, high(second, p, x + 4 * step), _load_e4m3(at + 32), scale, out)

        return add

    def _adder_of_more(self) -> Any:
        """Like _adder_of_16, with one scale for the unit."""
        dot, start = self.codec.dot(0, 8), start_biased(self.bias)

        @inner
        def add(sums: Any, zero: Any, p: int, at: int, x: int, scale: int, total: int, out: int) -> Any:
            return _scaled(sums, dot(start(zero, total), p, x), load_f16(at), scale, out)

        return add

    def tile_adder(self) -> Any:
        """See WeightFormat."""
        add = self._adder_of_16() if self.span == 16 else self._adder_of_more()
        units, values, half_bytes, block_bytes = self.units, self.block, self.half_bytes, self.nbytes
        scales_at, second_at = self.scales_at, 16 if self.span == 16 else 32
        lines = (block_bytes + 63) // 64

        @inner
        def one_token(zero: Any, p: int, blocks: int, x: int, scale: int, total: int, sums: int, ahead: int) -> None:
            first, second = tile_load_f32(zero, sums), tile_load_f32(zero, sums + 64)
            for b in range(blocks):
                prefetch_lines(p + ahead, lines)
                at = p + scales_at
                for u in range(units):
                    unit, q = b * units + u, p + u * 2 * half_bytes
                    first = add(first, zero, q, at, x + 32 * unit, scale + 4 * unit, total + 4 * unit, sums)
                    q += half_bytes
                    second = add(
                        second, zero, q, at + second_at, x + 32 * unit, scale + 4 * unit, total + 4 * unit, sums
                    )
                p += block_bytes
            tile_store(first, sums)
            tile_store(second, sums + 64)

        @inner
        def tile(
            zero: Any, group: int, k: int, act: int, index: int, sums: int, start: int, end: int, ahead: int
        ) -> None:
            width = tile_width(zero)
            first, step = index * (k // 32) + start // 32, 4 * width
            x, scale = field(act, Act.Q32) + first * 8 * step, field(act, Act.SCALE32) + first * step
            total, p = field(act, Act.SUM32) + first * step, group + start // values * block_bytes
            blocks = (end - start) // values
            if width == 1:
                one_token(zero, p, blocks, x, scale, total, sums, ahead)
            else:
                for half in range(2):
                    out, block = sums + half * 64 * width, p
                    added = tile_load_f32(zero, out)
                    for b in range(blocks):
                        if ahead > 0 and half == 0:
                            prefetch_lines(block + ahead, lines)
                        at = block + scales_at + half * second_at
                        for u in range(units):
                            unit, q = b * units + u, block + (2 * u + half) * half_bytes
                            added = add(
                                added, zero, q, at, x + unit * 8 * step, scale + unit * step, total + unit * step, out
                            )
                        block += block_bytes
                    if _IN_REGISTERS:
                        tile_store(added, out)

        return tile


# Of Q1_0, each of whose bits stands for -1 or 1: values are 0 or 2, with a bias of 1. Of Q2_0.
_Q1 = Codec([[Piece(0, step, 1, 1)] for step in range(8)])
_Q2 = Codec([[Piece(step // 4, step % 4 * 2, 2)] for step in range(8)])
FORMATS = {
    each.name: each
    for each in (
        ScaledBlocks(name="NVFP4", source=Source(nbytes=36, values=64, planes=[Plane(4, 4, 8)]), codec=FP4, span=16),
        ScaledBlocks(
            name="Q1_0",
            source=Source(nbytes=18, values=128, planes=[Plane(2, 1, 1, 1)], halves=(0,)),
            codec=_Q1,
            span=128,
            bias=1,
        ),
        ScaledBlocks(
            name="Q2_0",
            source=Source(nbytes=18, values=64, planes=[Plane(2, 2, 1)], halves=(0,)),
            codec=_Q2,
            span=64,
            bias=1,
        ),
    )
}
