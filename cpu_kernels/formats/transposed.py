"""Formats of super-blocks that are packed as in the file, word by word: grids of values, and base-3 digits.

Layout of a packed group of 16 rows, per super-block: the 32-bit words of the rows' blocks, word i of all rows in
vector i; then d in half precision. This is no larger than in the file, except where the file stores the bits of d in
other fields.

Unpacking such values takes many instructions. So a super-block of sixteen rows is unpacked into a panel in first-level
cache, which all tokens of a round multiply, even a single one. A panel: 64 vectors of values (one per k step, bytes in
offset binary), a vector of integer scales for each sub-block, and f32 d.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_kernels.declarations import inner
from cpu_kernels.formats import grids
from cpu_kernels.formats.codec import BYTES
from cpu_kernels.formats.grids import SCALES_AT
from cpu_kernels.formats.source import Source
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.matmul import Tiles, panel_tiles
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd.arithmetic import mul_f32, prefetch_lines
from cpu_kernels.simd.bytes import BYTE_OFFSET
from cpu_kernels.simd.tiles import add_offset, add_tiles, multiplied, tile_add_scaled_in_memory, zero_tile_i32
from cpu_kernels.simd.vectors import (
    get_f16,
    get_i16,
    get_i32,
    get_u8,
    load_f16,
    load_f32,
    load_i32,
    put_f32,
    put_i16,
    put_i32,
    splat_f32,
    store_f32,
)

_D_AT = SCALES_AT + 16 * 64
_PANEL_BYTES = _D_AT + 64


@dataclass(kw_only=True, eq=False)
class Transposed(WeightFormat):
    """A format that is packed word by word.

    words_at, words: offset of the words in the file's block, and their number. unpack(p, panel): writes the values and
    scales of a packed super-block. sub_block: values that share a scale, 16 or 32; 256 if there are no scales.
    d: offset of the factor in the file's block. put_d(block, to): writes the factor, if it is not at one offset. unit:
    power of two by which unpacked values are too large; d is divided by it.
    """

    form, group_rows, block = Form.BLOCKS_256, 16, 256
    words: int
    unpack: Any
    sub_block: int
    words_at: int = 0
    d: int = 0
    put_d: Any = None
    unit: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of a packed super-block of 16 rows."""
        return 64 * self.words + 32

    def row_packer(self) -> Any:
        """See WeightFormat."""
        source_bytes, block_bytes, words, words_at = self.source.nbytes, self.nbytes, self.words, self.words_at
        d = self.d

        @inner
        def copy_d(block: int, to: int) -> None:
            put_i16(to, get_i16(block + d))

        put_d = self.put_d or copy_d

        @inner
        def pack_row(source: int, group: int, lane: int, k: int) -> None:
            for b in range(k // 256):
                block, packed = source + b * source_bytes, group + b * block_bytes
                for i in range(words):
                    put_i32(packed + i * 64 + lane * 4, get_i32(block + words_at + 4 * i))
                put_d(block, packed + words * 64 + lane * 2)

        return pack_row

    def row_unpacker(self) -> Any:
        """See WeightFormat."""
        unpack, block_bytes, d_at, sub_block = self.unpack, self.nbytes, 64 * self.words, self.sub_block
        per_unit, scales, flip = np.float32(1 / self.unit), self.sub_block < 256, BYTE_OFFSET ^ 128

        @inner
        def unpack_row(group: int, lane: int, k: int, out: int, panel: int) -> None:
            for b in range(k // 256):
                packed = group + b * block_bytes
                unpack(packed, panel)
                d = get_f16(packed + d_at + lane * 2) * per_unit
                for i in range(256):
                    value = (get_u8(panel + i // 4 * 64 + lane * 4 + i % 4) ^ flip) - 128
                    if scales:
                        value *= get_i32(panel + SCALES_AT + i // sub_block * 64 + lane * 4)
                    put_f32(out + (b * 256 + i) * 4, d * np.float32(value))

        return unpack_row

    def tiles(self, width: int) -> Tiles:
        """Tiles that share panels."""
        unpack, d_at, lines = self.unpack, 64 * self.words, (self.nbytes + 63) // 64
        per_unit = np.float32(1 / self.unit)

        @inner
        def unpack_all(p: int, panel: int, ahead: int) -> None:
            prefetch_lines(p + ahead, lines)
            unpack(p, panel)
            store_f32(panel + _D_AT, mul_f32(load_f16(p + d_at), splat_f32(per_unit)))

        return panel_tiles(unpack_all, self._adder(width), width, self.nbytes, _PANEL_BYTES)

    def _adder(self, width: int) -> Any:
        """Return the function that adds a panel's products with some tiles to their sums, 64 bytes per token."""
        scales, length = self.sub_block < 256, min(self.sub_block, 32)
        parts, sixteens = 256 // length, length // 16
        dot, step = BYTES.dot(0, 4), 4 * width

        @inner
        def add(panel: int, act: int, first: int, tiles: int, k: int, block: int, totals: int) -> None:
            x = field(act, Act.Q256) + (first * k + block * 256) * width
            at = (first * (k // 256) + block) * step
            for _ in range(tiles):
                products = zero_tile_i32(width)
                values, operands, sums = panel, x, field(act, Act.SUM16) + at * 16
                for i in range(parts):
                    part = zero_tile_i32(width)
                    for _ in range(sixteens):
                        part = dot(add_offset(part, sums), values, operands)
                        values += 256
                        operands += 4 * step
                        sums += step
                    if scales:
                        part = multiplied(part, load_i32(panel + SCALES_AT + i * 64))
                    products = add_tiles(products, part)
                tile_add_scaled_in_memory(products, load_f32(panel + _D_AT), field(act, Act.SCALE256) + at, totals)
                x += k * width
                at += k // 256 * step
                totals += 64 * width

        return add


FORMATS = {
    each.name: each
    for each in (
        Transposed(
            name="IQ2_XXS",
            source=Source(nbytes=66, values=256, halves=(0,)),
            words_at=2,
            words=16,
            unpack=grids.unpack_iq2_xxs,
            sub_block=32,
            unit=8,
        ),
        Transposed(
            name="IQ2_XS",
            source=Source(nbytes=74, values=256, halves=(0,)),
            words_at=2,
            words=18,
            unpack=grids.unpack_iq2_xs,
            sub_block=16,
            unit=8,
        ),
        Transposed(
            name="IQ2_S",
            source=Source(nbytes=82, values=256, halves=(0,)),
            words_at=2,
            words=20,
            unpack=grids.unpack_iq2_s,
            sub_block=16,
            unit=8,
        ),
        Transposed(
            name="IQ3_XXS",
            source=Source(nbytes=98, values=256, halves=(0,)),
            words_at=2,
            words=24,
            unpack=grids.unpack_iq3_xxs,
            sub_block=32,
            unit=4,
        ),
        Transposed(
            name="IQ3_S",
            source=Source(nbytes=110, values=256, halves=(0,)),
            words_at=2,
            words=27,
            unpack=grids.unpack_iq3_s,
            sub_block=32,
        ),
        Transposed(
            name="IQ1_S",
            source=Source(nbytes=50, values=256, halves=(0,)),
            words_at=2,
            words=12,
            unpack=grids.unpack_iq1_s,
            sub_block=32,
            unit=8,
        ),
        Transposed(
            name="IQ1_M",
            source=Source(nbytes=56, values=256),
            words=14,
            unpack=grids.unpack_iq1_m,
            sub_block=16,
            put_d=grids.put_d_iq1_m,
            unit=8,
        ),
        Transposed(
            name="TQ1_0",
            source=Source(nbytes=54, values=256, halves=(52,)),
            words=13,
            unpack=grids.unpack_tq1_0,
            sub_block=256,
            d=52,
        ),
        Transposed(
            name="TQ2_0",
            source=Source(nbytes=66, values=256, halves=(64,)),
            words=16,
            unpack=grids.unpack_tq2_0,
            sub_block=256,
            d=64,
        ),
    )
}
