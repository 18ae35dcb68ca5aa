"""Formats of super-blocks: 256 small values in sub-blocks with small integer scales, and one or two factors for all.

Layout of a packed group of 16 rows, per super-block, in the order in which it is read: scales, one byte per sub-block,
four sub-blocks per lane; minima likewise, unless they share the scales' bytes; d and dmin in half precision; the
codec's vectors of values.

A sub-block's products are summed as integers and multiplied by its scale; the whole super-block is summed as integers
before d converts it to floats. Values with a bias are centred by starting their sums at minus the bias times the
activations' sum. With 16-bit accumulators, a sub-block whose sum would overflow is added in two parts.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from cpu_kernels.declarations import inner
from cpu_kernels.formats.codec import Codec
from cpu_kernels.formats.source import Source
from cpu_kernels.isa import POLICY
from cpu_kernels.records import Act, field
from cpu_kernels.simd.arithmetic import (
    mask_bits,
    mul_f32,
    neg_f32,
    prefetch_lines,
    shift_left,
    shift_right,
    shift_right_signed,
)
from cpu_kernels.simd.bytes import partial_factor
from cpu_kernels.simd.tiles import (
    add_partial,
    tile_add_scaled_in_memory,
    tile_broadcast,
    tile_dot2,
    tile_width,
)
from cpu_kernels.simd.vectors import (
    get_f16,
    get_i16,
    get_u8,
    load_f16,
    load_i32,
    put_f32,
    put_i16,
    splat_f32,
)

_WORDS = 0x00FF00FF
_Q, _SCALE, _PAIRS, _SUM16 = int(Act.Q256), int(Act.SCALE256), int(Act.PAIRS256), int(Act.SUM16)
# Undoes the factor of the packed activations' -32 * sum. Its sign remains, since minima are subtracted.
_PER_SUM = np.float32(1.0 / 32.0)


class Minima(Enum):
    """Where a format stores the minima of its sub-blocks.

    BYTES: in separate vectors, for sub-blocks of 32. NIBBLES: in the upper half of the scales' bytes.
    """

    NONE = 0
    BYTES = 1
    NIBBLES = 2


@dataclass(frozen=True, kw_only=True)
class SuperBlock:
    """A format of super-blocks.

    sub_block: values that share a scale, 16 or 32. bias: added to values as stored: 32, with signed scales, or 0. unit:
    power of two that stored values are multiplied by. pack_scales(block, to): writes a row's scales, and minima behind
    them, from a block of the file into its lane. d, dmin: offsets of the factors in the file's block.
    """

    name: str
    source: Source
    codec: Codec
    sub_block: int
    pack_scales: Any
    d: int
    dmin: int = 0
    bias: int = 0
    unit: int = 1
    minima: Minima = Minima.NONE

    @property
    def scale_vectors(self) -> int:
        """Number of vectors of scales."""
        return 256 // self.sub_block // 4

    @property
    def minima_at(self) -> int:
        """Offset of the minima in a packed block: that of the scales if they share bytes."""
        return 64 * self.scale_vectors if self.minima is Minima.BYTES else 0

    @property
    def d_at(self) -> int:
        """Offset of d; dmin is 32 bytes behind it."""
        return 64 * self.scale_vectors * (2 if self.minima is Minima.BYTES else 1)

    @property
    def values_at(self) -> int:
        """Offset of the values."""
        return self.d_at + 64

    @property
    def unit_steps(self) -> int:
        """K steps of a unit, which is one set of the codec's vectors."""
        return len(self.codec.steps)

    @property
    def units(self) -> int:
        """Number of units in a super-block."""
        return 64 // self.unit_steps

    @property
    def parts(self) -> int:
        """Parts of a unit that are summed separately: each has its own scale, or fits into 16-bit accumulators."""
        steps = self.sub_block // 4
        if POLICY.int16_accumulators:
            steps = min(steps, self.codec.partial_steps)
        return max(1, self.unit_steps // steps)

    @property
    def nbytes(self) -> int:
        """Bytes of a packed super-block of 16 rows."""
        return self.values_at + self.units * self.codec.nbytes


def row_packer(layout: SuperBlock) -> Any:
    """Return pack_row(source, group, lane, k), which packs a row of a file's blocks into its lane of a group."""
    four, put, pack_scales = layout.source.reader(), layout.codec.put, layout.pack_scales
    source_bytes, block_bytes, values_at, d_at = layout.source.nbytes, layout.nbytes, layout.values_at, layout.d_at
    unit_bytes, units, steps = layout.codec.nbytes, layout.units, layout.unit_steps
    d, dmin, minima = layout.d, layout.dmin, layout.minima is not Minima.NONE

    @inner
    def pack_row(source: int, group: int, lane: int, k: int) -> None:
        for b in range(k // 256):
            block, packed = source + b * source_bytes, group + b * block_bytes
            put_i16(packed + d_at + lane * 2, get_i16(block + d))
            if minima:
                put_i16(packed + d_at + 32 + lane * 2, get_i16(block + dmin))
            pack_scales(block, packed + lane * 4)
            for unit in range(units):
                for step in range(steps):
                    values = four(block, (unit * steps + step) * 4)
                    put(packed + values_at + unit * unit_bytes + lane * 4, step, values)

    return pack_row


def row_unpacker(layout: SuperBlock) -> Any:
    """Return unpack_row(group, lane, k, out, memory), which writes a lane's values as floats."""
    value, block_bytes, values_at, d_at = layout.codec.value, layout.nbytes, layout.values_at, layout.d_at
    unit_bytes, unit_values, sub_block = layout.codec.nbytes, 4 * layout.unit_steps, layout.sub_block
    minima_at, minima, nibbles = layout.minima_at, layout.minima is not Minima.NONE, layout.minima is Minima.NIBBLES
    bias, sign, per_unit = layout.bias, 128 if layout.bias else 0, np.float32(1 / layout.unit)

    @inner
    def unpack_row(group: int, lane: int, k: int, out: int, memory: int) -> None:
        for b in range(k // 256):
            packed = group + b * block_bytes
            d, dmin = get_f16(packed + d_at + lane * 2) * per_unit, get_f16(packed + d_at + 32 + lane * 2)
            for i in range(256):
                j = i // sub_block
                where = packed + j // 4 * 64 + lane * 4 + j % 4
                scale, minimum = (get_u8(where) ^ sign) - sign, get_u8(where + minima_at)
                if nibbles:
                    scale, minimum = scale & 15, minimum >> 4
                at = packed + values_at + i // unit_values * unit_bytes + lane * 4
                number = d * np.float32(scale) * np.float32(value(at, i % unit_values) - bias)
                if minima:
                    number -= dmin * np.float32(minimum)
                put_f32(out + (b * 256 + i) * 4, number)

    return unpack_row


def scale_getter(layout: SuperBlock) -> Any:
    """Return a function that turns the scale in the lowest byte of each lane into a factor of a partial sum."""

    @inner
    def unsigned(scales: Any) -> Any:
        return partial_factor(mask_bits(scales, 0xFF))

    @inner
    def signed(scales: Any) -> Any:
        return partial_factor(shift_right_signed(shift_left(scales, 24), 24))

    @inner
    def nibble(scales: Any) -> Any:
        return partial_factor(mask_bits(scales, 15))

    if layout.minima is Minima.NIBBLES:
        return nibble
    return signed if layout.bias else unsigned


def start_getter(layout: SuperBlock) -> Any:
    """Return start(zero, sums), the initial partial sums: `zero`, or the activations' -32 * sums at `sums`."""

    @inner
    def start_at_zero(zero: Any, sums: int) -> Any:
        return zero

    @inner
    def start_centred(zero: Any, sums: int) -> Any:
        return tile_broadcast(zero, sums)

    return start_centred if layout.bias else start_at_zero


def _add_products(layout: SuperBlock) -> Any:
    """Return a function that sums the products of all sub-blocks, times their scales."""
    codec, parts = layout.codec, layout.parts
    steps = layout.unit_steps // parts
    dot_first, dot_second = codec.dot(0, steps, partial=True), codec.dot(layout.unit_steps - steps, steps, partial=True)
    start, factor, sums_of_part = start_getter(layout), scale_getter(layout), steps // 4
    several, own_scales = parts > 1, layout.sub_block == 4 * steps
    units_of_vector = layout.units // layout.scale_vectors
    values_at, unit_bytes, unit_steps = layout.values_at, codec.nbytes, layout.unit_steps
    scale_vectors, lines, header_lines = layout.scale_vectors, unit_bytes // 64, values_at // 64

    @inner
    def add_unit(products: Any, zero: Any, scales: Any, p: int, x: int, sums: int) -> Any:
        """Add one unit; return the sums, and the scales shifted to the next unit's."""
        step = 4 * tile_width(zero)
        part = dot_first(start(zero, sums), p, x)
        products = add_partial(products, part, factor(scales))
        if several:
            if own_scales:
                scales = shift_right(scales, 8)
            part = dot_second(start(zero, sums + sums_of_part * step), p, x + steps * step)
            products = add_partial(products, part, factor(scales))
        return products, shift_right(scales, 8)

    @inner
    def add_products(zero: Any, p: int, x: int, sums: int, ahead: int) -> Any:
        step = 4 * tile_width(zero)
        products = zero
        if ahead > 0:
            prefetch_lines(p + ahead, header_lines)
        values = p + values_at
        for v in range(scale_vectors):
            scales = load_i32(p + v * 64)
            for _ in range(units_of_vector):
                if ahead > 0:
                    prefetch_lines(values + ahead, lines)
                products, scales = add_unit(products, zero, scales, values, x, sums)
                values += unit_bytes
                x += unit_steps * step
                sums += unit_steps // 4 * step
        return products

    return add_products


def minima_adder(layout: SuperBlock) -> Any:
    """Return a function that sums all sub-blocks' minima times the activations' sums, as integers."""
    minima_at = layout.minima_at

    @inner
    def none(zero: Any, p: int, pairs: int, sums: int) -> Any:
        return zero

    @inner
    def of_bytes(zero: Any, p: int, pairs: int, sums: int) -> Any:
        step = 4 * tile_width(zero)
        total = zero
        for v in range(2):
            minima = load_i32(p + minima_at + v * 64)
            total = tile_dot2(total, mask_bits(minima, _WORDS), pairs + 2 * v * step)
            total = tile_dot2(total, mask_bits(shift_right(minima, 8), _WORDS), pairs + (2 * v + 1) * step)
        return total

    @inner
    def of_nibbles(zero: Any, p: int, pairs: int, sums: int) -> Any:
        step = 4 * tile_width(zero)
        total = zero
        for v in range(4):
            both = load_i32(p + v * 64)
            for i in range(4):
                minimum = mask_bits(shift_right(both, 4), 15)
                total = add_partial(total, tile_broadcast(zero, sums + (v * 4 + i) * step), partial_factor(minimum))
                both = shift_right(both, 8)
        return total

    return {Minima.NONE: none, Minima.BYTES: of_bytes, Minima.NIBBLES: of_nibbles}[layout.minima]


def values_factor(layout: SuperBlock) -> Any:
    """Return a function that loads the factor of the sums of products, from the address of d."""
    per_unit = np.float32(1 / layout.unit)

    @inner
    def of_units(p: int) -> Any:
        return mul_f32(load_f16(p), splat_f32(per_unit))

    return load_f16 if layout.unit == 1 else of_units


def minima_factor(layout: SuperBlock) -> Any:
    """Return a function that loads the factor of the sums of minima, from the address of dmin."""

    @inner
    def of_bytes(p: int) -> Any:
        return neg_f32(load_f16(p))

    @inner
    def of_nibbles(p: int) -> Any:
        return mul_f32(load_f16(p), splat_f32(_PER_SUM))

    return of_nibbles if layout.minima is Minima.NIBBLES else of_bytes


def tile_adder(layout: SuperBlock) -> Any:
    """Return the function that cpu_kernels.matmul calls for a register tile."""
    add_products, add_minima = _add_products(layout), minima_adder(layout)
    factor, factor_of_minima = values_factor(layout), minima_factor(layout)
    block_bytes, d_at, minima = layout.nbytes, layout.d_at, layout.minima is not Minima.NONE

    @inner
    def tile(zero: Any, group: int, k: int, act: int, index: int, sums: int, start: int, end: int, ahead: int) -> None:
        width = tile_width(zero)
        first, step = index * (k // 256) + start // 256, 4 * width
        x, scale = field(act, _Q) + first * 64 * step, field(act, _SCALE) + first * step
        pairs, sums16 = field(act, _PAIRS) + first * 4 * step, field(act, _SUM16) + first * 16 * step
        p = group + start // 256 * block_bytes
        for _ in range(start, end, 256):
            # A single token is limited by memory; hardware prefetchers follow sequential reads: minima precede values.
            least = add_minima(zero, p, pairs, sums16) if width == 1 else zero
            products = add_products(zero, p, x, sums16, ahead)
            tile_add_scaled_in_memory(products, factor(p + d_at), scale, sums)
            if minima:
                if width > 1:
                    least = add_minima(zero, p, pairs, sums16)
                tile_add_scaled_in_memory(least, factor_of_minima(p + d_at + 32), scale, sums)
            p += block_bytes
            x += 64 * step
            scale += step
            pairs += 4 * step
            sums16 += 16 * step

    return tile
