"""Formats of super-blocks: 256 small values in sub-blocks with small integer scales, and one or two factors for all.

Layout of a packed group of 16 rows, per super-block, in the order in which it is read: d and dmin in half precision,
then a section for every four sub-blocks: a vector of their scales, one byte each; a vector of their minima, unless
they share the scales' bytes; the codec's vectors of their values.

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
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.isa import POLICY
from cpu_kernels.records import Act, Form, field
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
    opaque,
    put_f32,
    put_i16,
    splat_f32,
)

WORDS = 0x00FF00FF
# Undoes the factor of the packed activations' -32 * sum. Its sign remains, since minima are subtracted.
_PER_SUM = np.float32(1.0 / 32.0)
DMIN_AT, SECTIONS_AT = 32, 64
"""Offsets of dmin and of the first section in a packed super-block, which begins with d."""


class Minima(Enum):
    """Where a format stores the minima of its sub-blocks.

    BYTES: in separate vectors, for sub-blocks of 32. NIBBLES: in the upper half of the scales' bytes.
    """

    NONE = 0
    BYTES = 1
    NIBBLES = 2


@dataclass(kw_only=True, eq=False)
class SuperBlock(WeightFormat):
    """A format of super-blocks.

    sub_block: values that share a scale, 16 or 32. bias: added to values as stored: 32, with signed scales, or 0. unit:
    power of two that stored values are multiplied by. pack_scales(block, to, stride): writes a row's scales from a
    block of the file into its lane, four every `stride` bytes, and separate minima 64 bytes behind their scales. d,
    dmin: offsets of the factors in the file's block.
    """

    form, group_rows, block = Form.BLOCKS_256, 16, 256
    codec: Codec
    sub_block: int
    pack_scales: Any
    d: int
    dmin: int = 0
    bias: int = 0
    unit: int = 1
    minima: Minima = Minima.NONE

    @property
    def sections(self) -> int:
        """Number of sections."""
        return 256 // self.sub_block // 4

    @property
    def section_header(self) -> int:
        """Bytes of a section's scales and minima."""
        return 128 if self.minima is Minima.BYTES else 64

    @property
    def section_bytes(self) -> int:
        """Bytes of a section."""
        return self.section_header + self.section_units * self.codec.nbytes

    @property
    def unit_steps(self) -> int:
        """K steps of a unit, which is one set of the codec's vectors."""
        return len(self.codec.steps)

    @property
    def section_units(self) -> int:
        """Number of units in a section."""
        return 64 // self.unit_steps // self.sections

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
        return SECTIONS_AT + self.sections * self.section_bytes

    def row_packer(self) -> Any:
        """See WeightFormat."""
        four, put, pack_scales = self.source.reader(), self.codec.put, self.pack_scales
        source_bytes, block_bytes, section_bytes = self.source.nbytes, self.nbytes, self.section_bytes
        unit_bytes, units, steps = self.codec.nbytes, self.section_units, self.unit_steps
        sections, values_at = self.sections, self.section_header
        d, dmin, minima = self.d, self.dmin, self.minima is not Minima.NONE

        @inner
        def pack_row(source: int, group: int, lane: int, k: int) -> None:
            for b in range(k // 256):
                block, packed = source + b * source_bytes, group + b * block_bytes
                put_i16(packed + lane * 2, get_i16(block + d))
                if minima:
                    put_i16(packed + DMIN_AT + lane * 2, get_i16(block + dmin))
                place = packed + SECTIONS_AT + lane * 4
                pack_scales(block, place, section_bytes)
                for unit in range(sections * units):
                    to = place + unit // units * section_bytes + values_at + unit % units * unit_bytes
                    for step in range(steps):
                        put(to, step, four(block, (unit * steps + step) * 4))

        return pack_row

    def row_unpacker(self) -> Any:
        """See WeightFormat."""
        value, block_bytes, section_bytes = self.codec.value, self.nbytes, self.section_bytes
        unit_bytes, unit_values, sub_block = self.codec.nbytes, 4 * self.unit_steps, self.sub_block
        minima, nibbles = self.minima is not Minima.NONE, self.minima is Minima.NIBBLES
        values_at, bias, sign, per_unit = (
            self.section_header,
            self.bias,
            128 if self.bias else 0,
            np.float32(1 / self.unit),
        )

        @inner
        def unpack_row(group: int, lane: int, k: int, out: int, memory: int) -> None:
            for b in range(k // 256):
                packed = group + b * block_bytes
                d, dmin = get_f16(packed + lane * 2) * per_unit, get_f16(packed + DMIN_AT + lane * 2)
                for i in range(256):
                    section, offset = i // (4 * sub_block), i % (4 * sub_block)
                    place = packed + SECTIONS_AT + section * section_bytes + lane * 4
                    where = place + offset // sub_block
                    scale, minimum = (get_u8(where) ^ sign) - sign, get_u8(where if nibbles else where + 64)
                    if nibbles:
                        scale, minimum = scale & 15, minimum >> 4
                    at = place + values_at + offset // unit_values * unit_bytes
                    number = d * np.float32(scale) * np.float32(value(at, i % unit_values) - bias)
                    if minima:
                        number -= dmin * np.float32(minimum)
                    put_f32(out + (b * 256 + i) * 4, number)

        return unpack_row

    def scale_getter(self) -> Any:
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

        if self.minima is Minima.NIBBLES:
            return nibble
        return signed if self.bias else unsigned

    def start_getter(self) -> Any:
        """Return start(zero, sums), the initial partial sums: `zero`, or the activations' -32 * sums at `sums`."""

        @inner
        def start_at_zero(zero: Any, sums: int) -> Any:
            return zero

        @inner
        def start_centred(zero: Any, sums: int) -> Any:
            return tile_broadcast(zero, sums)

        return start_centred if self.bias else start_at_zero

    def _add_section(self) -> Any:
        """Return a function that adds the products of a section's sub-blocks, times their scales."""
        codec, parts = self.codec, self.parts
        steps = self.unit_steps // parts
        dot_first, dot_second = (
            codec.dot(0, steps, partial=True),
            codec.dot(self.unit_steps - steps, steps, partial=True),
        )
        start, factor, sums_of_part = self.start_getter(), self.scale_getter(), steps // 4
        several, own_scales = parts > 1, self.sub_block == 4 * steps
        units, values_at, unit_steps = self.section_units, self.section_header, self.unit_steps
        unit_bytes, lines, header_lines = codec.nbytes, codec.nbytes // 64, self.section_header // 64

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
        def add_section(products: Any, zero: Any, p: int, x: int, sums: int, ahead: int) -> Any:
            step, one = 4 * tile_width(zero), tile_width(zero) == 1
            if one or ahead > 0:
                prefetch_lines(p + ahead, header_lines)
            scales = load_i32(p)
            p += values_at
            for _ in range(opaque(units) if one else units):
                if one or ahead > 0:
                    prefetch_lines(p + ahead, lines)
                products, scales = add_unit(products, zero, scales, p, x, sums)
                p += unit_bytes
                x += unit_steps * step
                sums += unit_steps // 4 * step
            return products

        return add_section

    def _minima_adder(self) -> Any:
        """Return a function that adds the minima of a section's sub-blocks times the activations' sums."""

        @inner
        def of_bytes(least: Any, zero: Any, p: int, pairs: int, sums: int) -> Any:
            minima = load_i32(p + 64)
            least = tile_dot2(least, mask_bits(minima, WORDS), pairs)
            return tile_dot2(least, mask_bits(shift_right(minima, 8), WORDS), pairs + 4 * tile_width(zero))

        @inner
        def of_nibbles(least: Any, zero: Any, p: int, pairs: int, sums: int) -> Any:
            both = load_i32(p)
            for i in range(4):
                minimum = mask_bits(shift_right(both, 4), 15)
                total = tile_broadcast(zero, sums + i * 4 * tile_width(zero))
                least = add_partial(least, total, partial_factor(minimum))
                both = shift_right(both, 8)
            return least

        return of_nibbles if self.minima is Minima.NIBBLES else of_bytes

    def values_factor(self) -> Any:
        """Return a function that loads the factor of the sums of products, from the address of d."""
        per_unit = np.float32(1 / self.unit)

        @inner
        def of_units(p: int) -> Any:
            return mul_f32(load_f16(p), splat_f32(per_unit))

        return load_f16 if self.unit == 1 else of_units

    def minima_factor(self) -> Any:
        """Return a function that loads the factor of the sums of minima, from the address of dmin."""

        @inner
        def of_bytes(p: int) -> Any:
            return neg_f32(load_f16(p))

        @inner
        def of_nibbles(p: int) -> Any:
            return mul_f32(load_f16(p), splat_f32(_PER_SUM))

        return of_nibbles if self.minima is Minima.NIBBLES else of_bytes

    def tile_adder(self) -> Any:
        """See WeightFormat.

        A single token is limited by memory: it reads each super-block once from front to back, as hardware prefetchers
        expect, and its loops stay loops. LLVM would unroll them, move all prefetches to the front and keep a pointer
        for each offset, more than there are registers.
        """
        add_section, add_minima = self._add_section(), self._minima_adder()
        factor, factor_of_minima = self.values_factor(), self.minima_factor()
        block_bytes, minima = self.nbytes, self.minima is not Minima.NONE
        sections, section_bytes, section_steps = self.sections, self.section_bytes, self.sub_block

        @inner
        def tile(
            zero: Any, group: int, k: int, act: int, index: int, sums: int, start: int, end: int, ahead: int
        ) -> None:
            width = tile_width(zero)
            first, step = index * (k // 256) + start // 256, 4 * width
            x, scale = field(act, Act.Q256) + first * 64 * step, field(act, Act.SCALE256) + first * step
            pairs, sums16 = field(act, Act.PAIRS256) + first * 4 * step, field(act, Act.SUM16) + first * 16 * step
            p = group + start // 256 * block_bytes
            for _ in range(start, end, 256):
                products, least = zero, zero
                if width == 1 or ahead > 0:
                    prefetch_lines(p + ahead, 1)
                for s in range(opaque(sections) if width == 1 else sections):
                    q, sums_of_section = p + SECTIONS_AT + s * section_bytes, sums16 + s * section_steps // 4 * step
                    if minima and width == 1:
                        least = add_minima(least, zero, q, pairs + 2 * s * step, sums_of_section)
                    products = add_section(products, zero, q, x + s * section_steps * step, sums_of_section, ahead)
                tile_add_scaled_in_memory(products, factor(p), scale, sums)
                if minima:
                    if width > 1:
                        for s in range(sections):
                            q, sums_of_section = (
                                p + SECTIONS_AT + s * section_bytes,
                                sums16 + s * section_steps // 4 * step,
                            )
                            least = add_minima(least, zero, q, pairs + 2 * s * step, sums_of_section)
                    tile_add_scaled_in_memory(least, factor_of_minima(p + DMIN_AT), scale, sums)
                p += block_bytes
                x += 64 * step
                scale += step
                pairs += 4 * step
                sums16 += 16 * step

        return tile
