"""Super-blocks times many tokens if registers hold few tokens: weights are unpacked once per round of tokens.

If a tile of four tokens fills the registers, unpacking weights again for each tile takes up to a quarter of all
instructions. So a panel, the values of sixteen rows in a super-block, is unpacked into first-level cache, with bytes
and factors in the form that products need; then all tiles of the round multiply it. A token's result is the sum of the
same products in the same order as with the format's own tiles.

A panel: 64 vectors of values (one per k step), 16 of factors, 16 of minima, f32 d and the factor of the minima. Panels
are not faster for blocks of 32: those take less unpacking, and they have eight times as many float sums, which panels
keep in memory.
"""

from dataclasses import replace
from typing import Any

from cpu_kernels.declarations import inner
from cpu_kernels.formats.codec import SMALL_BYTES
from cpu_kernels.formats.super_blocks import (
    DMIN_AT,
    SECTIONS_AT,
    Minima,
    SuperBlock,
)
from cpu_kernels.matmul import Tiles, panel_tiles
from cpu_kernels.records import Act, field
from cpu_kernels.simd.arithmetic import mask_bits, prefetch_lines, shift_right
from cpu_kernels.simd.bytes import partial_factor
from cpu_kernels.simd.tiles import (
    add_partial,
    tile_add_scaled_in_memory,
    tile_broadcast,
    tile_dot2,
    zero_tile_i32,
)
from cpu_kernels.simd.vectors import load_f32, load_i32, store_f32, store_i32

_WORDS = 0x00FF00FF
_FACTORS, _MINIMA, _D, _DMIN = 4096, 5120, 6144, 6208

_Q, _SCALE, _PAIRS, _SUM16 = int(Act.Q256), int(Act.SCALE256), int(Act.PAIRS256), int(Act.SUM16)


def tiles(layout: SuperBlock, few: Tiles, fewest: int) -> Tiles:
    """Tiles that share panels; fewer than `fewest` tiles are computed by `few` instead."""
    width, compute_few = few.width, few.compute
    many = panel_tiles(_unpack(layout), _add(layout, width), width, layout.nbytes)
    compute_many = many.compute

    @inner
    def compute(group: int, k: int, act: int, first: int, tiles: int, out: Any, memory: int, ahead: int) -> None:
        if tiles < fewest:
            compute_few(group, k, act, first, tiles, out, memory, ahead)
        else:
            compute_many(group, k, act, first, tiles, out, memory, ahead)

    return replace(many, compute=compute)


def _unpack(layout: SuperBlock) -> Any:
    """Return unpack(p, panel, ahead) for a packed super-block."""
    values = layout.codec.unpacker()
    unit_bytes, unit_steps, units = layout.codec.nbytes, layout.unit_steps, layout.section_units
    sections, section_bytes, values_at = layout.sections, layout.section_bytes, layout.section_header
    header_lines, lines = values_at // 64, unit_bytes // 64
    factor, factor_of_values, factor_of_minima = layout.scale_getter(), layout.values_factor(), layout.minima_factor()
    of_bytes, of_nibbles = layout.minima is Minima.BYTES, layout.minima is Minima.NIBBLES

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
            store_i32(panel + _MINIMA + s * 128, mask_bits(minima, _WORDS))
            store_i32(panel + _MINIMA + s * 128 + 64, mask_bits(shift_right(minima, 8), _WORDS))

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


def _add(layout: SuperBlock, width: int) -> Any:
    """Return the function that adds a panel's products with some tiles to their sums, 64 bytes per token."""
    steps = min(layout.sub_block // 4, layout.unit_steps // layout.parts)
    parts, parts_of_factor = 64 // steps, layout.sub_block // 4 // steps
    dot, start = SMALL_BYTES.dot(0, 4, partial=True), layout.start_getter()
    of_bytes, of_nibbles, twice = layout.minima is Minima.BYTES, layout.minima is Minima.NIBBLES, steps == 8
    step = 4 * width

    @inner
    def add_minima(panel: int, act: int, at: int) -> Any:
        total = zero_tile_i32(width)
        if of_bytes:
            for i in range(4):
                total = tile_dot2(total, load_i32(panel + _MINIMA + i * 64), field(act, _PAIRS) + at * 4 + i * step)
        if of_nibbles:
            for i in range(16):
                sums = tile_broadcast(zero_tile_i32(width), field(act, _SUM16) + at * 16 + i * step)
                total = add_partial(total, sums, load_i32(panel + _MINIMA + i * 64))
        return total

    @inner
    def add(panel: int, act: int, first: int, tiles: int, k: int, block: int, totals: int) -> None:
        x = field(act, _Q) + (first * k + block * 256) * width
        at = (first * (k // 256) + block) * step
        for _ in range(tiles):
            products = zero_tile_i32(width)
            for i in range(parts):
                values, operands = panel + i * steps * 64, x + i * steps * step
                part = start(zero_tile_i32(width), field(act, _SUM16) + at * 16 + i * step)
                part = dot(part, values, operands)
                if twice:
                    part = dot(part, values + 256, operands + 4 * step)
                products = add_partial(products, part, load_i32(panel + _FACTORS + i // parts_of_factor * 64))
            scale = field(act, _SCALE) + at
            tile_add_scaled_in_memory(products, load_f32(panel + _D), scale, totals)
            if of_bytes or of_nibbles:
                tile_add_scaled_in_memory(add_minima(panel, act, at), load_f32(panel + _DMIN), scale, totals)
            x += k * width
            at += k // 256 * step
            totals += 64 * width

    return add
