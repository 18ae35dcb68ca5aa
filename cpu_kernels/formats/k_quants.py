"""K-quants: super-blocks with the layouts and tables of ggml (ggml-common.h).

If a tile of four tokens fills the registers, unpacking weights again for each tile takes up to a quarter of all
instructions. So a panel, the values of sixteen rows in a super-block, is unpacked into first-level cache, with bytes
and factors in the form that products need; then all tiles of the round multiply it. A token's result is the sum of the
same products in the same order as with plain tiles.

A panel: 64 vectors of values (one per k step), 16 of factors, 16 of minima, f32 d and the factor of the minima. Panels
are not faster for blocks of 32: those take less unpacking, and they have eight times as many float sums, which panels
keep in memory.
"""

from dataclasses import replace
from typing import Any

from cpu_kernels.declarations import inner
from cpu_kernels.formats.codec import FIVE_BITS, NIBBLES, Codec, Piece
from cpu_kernels.formats.source import Plane, Source
from cpu_kernels.formats.super_blocks import DMIN_AT, SECTIONS_AT, WORDS, Minima, SuperBlock
from cpu_kernels.isa import POLICY
from cpu_kernels.matmul import Tiles, panel_tiles
from cpu_kernels.records import Act, field
from cpu_kernels.simd.arithmetic import mask_bits, prefetch_lines, shift_right
from cpu_kernels.simd.bytes import partial_factor
from cpu_kernels.simd.tiles import add_partial, tile_add_scaled_in_memory, tile_broadcast, tile_dot2, zero_tile_i32
from cpu_kernels.simd.vectors import get_i32, load_f32, load_i32, put_i32, store_f32, store_i32

_FACTORS, _MINIMA, _D, _DMIN = 4096, 5120, 6144, 6208
"""Offsets in a panel."""
_SIX_BITS, _UPPER_BITS, _NIBBLES = 0x3F3F3F3F, 0x30303030, 0x0F0F0F0F
_TWO_BITS, _FIVE_BITS, _FIFTH_BIT = 0x03030303, 0x1F1F1F1F, 0x20202020
# Of Q2_K. Of Q3_K, whose values are multiples of eight: six k steps fill the lower six bits of three vectors; the bits
# of the last two steps are spread over the upper two bits. Of Q6_K, and of values in a panel.
_Q2 = Codec([[Piece(0, 2 * step, 2)] for step in range(4)])
_Q3 = Codec(
    [[Piece(step // 2, step % 2 * 3, 3, 3)] for step in range(6)]
    + [[Piece(step, 6, 2, 4), Piece(2, 6 + step, 1, 3)] for step in range(2)]
)
_Q6 = Codec([[Piece(step // 2, step % 2 * 4, 4), Piece(2, 2 * step, 2, 4)] for step in range(4)])
_PANEL = Codec([[Piece(step, 0, 8)] for step in range(4)], largest=63)


class KQuant(SuperBlock):
    """A K-quant. With many tiles, a panel of weights is unpacked once for all of them, if that is faster."""

    def tiles(self, width: int) -> Tiles:
        """See WeightFormat."""
        few, fewest = super().tiles(width), POLICY.panel_tiles
        if width == 1 or fewest is None:
            return few
        many = panel_tiles(self._unpack(), self._add(width), width, self.nbytes)
        compute_few, compute_many = few.compute, many.compute

        @inner
        def compute(group: int, k: int, act: int, first: int, tiles: int, out: Any, memory: int, ahead: int) -> None:
            if tiles < fewest:
                compute_few(group, k, act, first, tiles, out, memory, ahead)
            else:
                compute_many(group, k, act, first, tiles, out, memory, ahead)

        return replace(many, compute=compute)

    def _unpack(self) -> Any:
        """Return unpack(p, panel, ahead) for a packed super-block."""
        values = self.codec.unpacker()
        unit_bytes, unit_steps, units = self.codec.nbytes, self.unit_steps, self.section_units
        sections, section_bytes, values_at = self.sections, self.section_bytes, self.section_header
        header_lines, lines = values_at // 64, unit_bytes // 64
        factor, factor_of_values, factor_of_minima = self.scale_getter(), self.values_factor(), self.minima_factor()
        of_bytes, of_nibbles = self.minima is Minima.BYTES, self.minima is Minima.NIBBLES

        @inner
        def unpack_header(p: int, s: int, panel: int) -> None:
            scales = load_i32(p)
            for i in range(s * 4, s * 4 + 4):
                store_i32(panel + _FACTORS + i * 64, factor(scales))
                if of_nibbles:
                    minimum = mask_bits(shift_right(scales, 4), 15)
                    store_i32(panel + _MINIMA + i * 64, partial_factor(minimum))
                scales = shift_right(scales, 8)
            if of_bytes:
                minima = load_i32(p + 64)
                store_i32(panel + _MINIMA + s * 128, mask_bits(minima, WORDS))
                store_i32(panel + _MINIMA + s * 128 + 64, mask_bits(shift_right(minima, 8), WORDS))

        @inner
        def unpack(p: int, panel: int, ahead: int) -> None:
            prefetch_lines(p + ahead, 1)
            store_f32(panel + _D, factor_of_values(p))
            store_f32(panel + _DMIN, factor_of_minima(p + DMIN_AT))
            for s in range(sections):
                section = p + SECTIONS_AT + s * section_bytes
                prefetch_lines(section + ahead, header_lines)
                unpack_header(section, s, panel)
                for unit in range(units):
                    place = section + values_at + unit * unit_bytes
                    prefetch_lines(place + ahead, lines)
                    values(place, panel + (s * units + unit) * unit_steps * 64)

        return unpack

    def _add(self, width: int) -> Any:
        """Return the function that multiplies a panel of weights by tiles of activations and adds to their sums.

        A token's sums take 64 bytes.
        """
        steps = min(self.sub_block // 4, self.unit_steps // self.parts)
        parts, parts_of_factor = 64 // steps, self.sub_block // 4 // steps
        dot, start = _PANEL.dot(0, 4, partial=True), self.start_getter()
        of_bytes, of_nibbles, twice = self.minima is Minima.BYTES, self.minima is Minima.NIBBLES, steps == 8
        step = 4 * width

        @inner
        def add_minima(panel: int, act: int, at: int) -> Any:
            total = zero_tile_i32(width)
            if of_bytes:
                for i in range(4):
                    total = tile_dot2(
                        total, load_i32(panel + _MINIMA + i * 64), field(act, Act.PAIRS256) + at * 4 + i * step
                    )
            if of_nibbles:
                for i in range(16):
                    sums = tile_broadcast(zero_tile_i32(width), field(act, Act.SUM16) + at * 16 + i * step)
                    total = add_partial(total, sums, load_i32(panel + _MINIMA + i * 64))
            return total

        @inner
        def add(panel: int, act: int, first: int, tiles: int, k: int, block: int, totals: int) -> None:
            x = field(act, Act.Q256) + (first * k + block * 256) * width
            at = (first * (k // 256) + block) * step
            for _ in range(tiles):
                products = zero_tile_i32(width)
                for i in range(parts):
                    values, operands = panel + i * steps * 64, x + i * steps * step
                    part = start(zero_tile_i32(width), field(act, Act.SUM16) + at * 16 + i * step)
                    part = dot(part, values, operands)
                    if twice:
                        part = dot(part, values + 256, operands + 4 * step)
                    products = add_partial(products, part, load_i32(panel + _FACTORS + i // parts_of_factor * 64))
                scale = field(act, Act.SCALE256) + at
                tile_add_scaled_in_memory(products, load_f32(panel + _D), scale, totals)
                if of_bytes or of_nibbles:
                    tile_add_scaled_in_memory(add_minima(panel, act, at), load_f32(panel + _DMIN), scale, totals)
                x += k * width
                at += k // 256 * step
                totals += 64 * width

        return add


@inner
def _pack_bytes(block: int, to: int, stride: int, scales: int) -> None:
    """Copy sixteen one-byte scales unchanged."""
    for quarter in range(4):
        put_i32(to + quarter * stride, get_i32(block + scales + 4 * quarter))


@inner
def _pack_scales_q2_k(block: int, to: int, stride: int) -> None:
    _pack_bytes(block, to, stride, 0)


@inner
def _pack_scales_q3_k(block: int, to: int, stride: int) -> None:
    """Widen sixteen 6-bit scales, which are stored with a bias of 32.

    They take twelve bytes: the first eight hold the lower four bits of two scales each, the last four the upper two
    bits of four scales each.
    """
    upper = get_i32(block + 104)
    for quarter in range(4):
        lower = get_i32(block + 96 + quarter % 2 * 4) >> (quarter // 2 * 4) & _NIBBLES
        scales = lower | (upper >> (2 * quarter) & _TWO_BITS) << 4
        negative = ~scales & _FIFTH_BIT
        put_i32(to + quarter * stride, scales & _FIVE_BITS | negative * 7)


@inner
def _pack_scales_q6_k(block: int, to: int, stride: int) -> None:
    _pack_bytes(block, to, stride, 192)


@inner
def _pack_six_bits(block: int, to: int, stride: int) -> None:
    """Widen eight 6-bit scales and eight 6-bit minima.

    They take twelve bytes: the first four hold the first four scales and the next four the first four minima, in six
    bits each. The last four hold the lower four bits of the other scales and minima, whose upper two bits are the upper
    two bits of the first eight bytes.
    """
    first, second, rest = get_i32(block + 4), get_i32(block + 8), get_i32(block + 12)
    put_i32(to, first & _SIX_BITS)
    put_i32(to + stride, rest & _NIBBLES | first >> 2 & _UPPER_BITS)
    put_i32(to + 64, second & _SIX_BITS)
    put_i32(to + stride + 64, rest >> 4 & _NIBBLES | second >> 2 & _UPPER_BITS)


FORMATS = {
    each.name: each
    for each in (
        KQuant(
            name="Q2_K",
            source=Source(nbytes=84, values=256, planes=[Plane(16, 2, 32)], halves=(80, 82)),
            codec=_Q2,
            sub_block=16,
            pack_scales=_pack_scales_q2_k,
            minima=Minima.NIBBLES,
            d=80,
            dmin=82,
        ),
        KQuant(
            name="Q3_K",
            source=Source(nbytes=110, values=256, planes=[Plane(32, 2, 32, 3), Plane(0, 1, 32, 5)], halves=(108,)),
            codec=_Q3,
            sub_block=16,
            pack_scales=_pack_scales_q3_k,
            bias=32,
            unit=8,
            d=108,
        ),
        KQuant(
            name="Q4_K",
            source=Source(nbytes=144, values=256, planes=[Plane(16, 4, 32)], halves=(0, 2)),
            codec=NIBBLES,
            sub_block=32,
            pack_scales=_pack_six_bits,
            minima=Minima.BYTES,
            d=0,
            dmin=2,
        ),
        KQuant(
            name="Q5_K",
            source=Source(nbytes=176, values=256, planes=[Plane(48, 4, 32), Plane(16, 1, 32, 4)], halves=(0, 2)),
            codec=FIVE_BITS,
            sub_block=32,
            pack_scales=_pack_six_bits,
            minima=Minima.BYTES,
            d=0,
            dmin=2,
        ),
        KQuant(
            name="Q6_K",
            source=Source(nbytes=210, values=256, planes=[Plane(0, 4, 64), Plane(128, 2, 32, 4)], halves=(208,)),
            codec=_Q6,
            sub_block=16,
            pack_scales=_pack_scales_q6_k,
            bias=32,
            d=208,
        ),
    )
}
