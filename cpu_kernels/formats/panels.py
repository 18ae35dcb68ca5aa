"""Products of many tokens where registers hold few of them (AVX2): weights are unpacked once for a round of tokens.

A tile of four tokens fills sixteen registers, and unpacking bits anew for each tile takes up to a quarter of all
instructions. Here a panel, the values of sixteen rows in a super-block, is unpacked into first-level cache; then all
tiles of the round multiply it: bytes as the products want them, factors as pairs of words. What is added to a token's
result, and in which order, is what the format's product of one row adds.

A panel: 64 vectors of values (a k step each), 16 of factors, 4 of minima in pairs of words, f32 d and -dmin. Blocks of
32 were no faster so: they take less unpacking, and their sums in floats, which a panel keeps in memory, are eight times
as many.
"""

from dataclasses import dataclass
from typing import Any

from cpu_kernels.kernel import inner
from cpu_kernels.matmul import Tiles, put_sum
from cpu_kernels.records import Act, field
from cpu_kernels.simd.arithmetic import mask_bits, neg_f32, shift_right
from cpu_kernels.simd.tiles import (
    add_short,
    broadcast_like,
    short_dot4_steps,
    short_factor,
    tile_dot2,
    tile_scale_add_to_memory,
    zero_tile_i32,
)
from cpu_kernels.simd.vectors import load_f16, load_f32, load_i32, store_f32, store_i32, zero_f32

_WORDS = 0x00FF00FF
_FACTORS, _MINIMA, _D, _DMIN = 4096, 5120, 5376, 5440
_PANEL_BYTES = 5504
# A round: tokens whose sums stay in first-level cache, and bytes of packed tokens that stay in half of a second-level
# cache, while weights stream past.
_ROUND_TOKENS, _ROUND_BYTES = 96, 256 << 10
# Tiles that are worth a panel: unpacking takes the time in which one or two would be computed while weights arrive.
_MANY = 4
SCRATCH_BYTES = _PANEL_BYTES + 64 * _ROUND_TOKENS
"""Memory that a thread needs for a panel and a round's sums."""

_Q, _SCALE, _PAIRS, _SUM16 = int(Act.Q256), int(Act.SCALE256), int(Act.PAIRS256), int(Act.SUM16)


@dataclass(frozen=True, kw_only=True)
class Panels:
    """How a format of super-blocks uses panels.

    block_bytes: bytes of sixteen rows' packed super-block. unpack(p, panel): unpack one. factors: how many it has, 8 or
    16. sums: how many short sums, likewise. centred: whether they begin with -32 times the activations' sums. minima:
    whether there are any.
    """

    block_bytes: int
    unpack: Any
    factors: int
    sums: int
    centred: bool = False
    minima: bool = False


def panel_tiles(panels: Panels, few: Tiles) -> Tiles:
    """Tiles that share panels; where there are few, `few` computes them."""
    width, compute_few, block_bytes, unpack = few.width, few.compute, panels.block_bytes, panels.unpack
    add = _add(panels, width)

    @inner
    def compute_many(group: int, k: int, act: int, first: int, tiles: int, out: Any, panel: int) -> None:
        y, y_stride, addend, addend_stride = out
        sums = panel + _PANEL_BYTES
        for t in range(tiles * width):
            store_f32(sums + 64 * t, zero_f32())
        for b in range(k // 256):
            unpack(group + b * block_bytes, panel)
            add(panel, act, first, tiles, k, b, sums)
        for t in range(tiles * width):
            put_sum(load_f32(sums + 64 * t), y + t * y_stride, addend + t * addend_stride if addend != 0 else 0)

    @inner
    def compute(group: int, k: int, act: int, first: int, tiles: int, out: Any, memory: int) -> None:
        if tiles < _MANY:
            compute_few(group, k, act, first, tiles, out, memory)
        else:
            compute_many(group, k, act, first, tiles, out, memory)

    return Tiles(compute, width, _ROUND_TOKENS, _ROUND_BYTES)


@inner
def put_values(to: int, first: int, steps: Any) -> None:
    """Store four k steps of values, from step `first` on, in the panel at `to`."""
    w0, w1, w2, w3 = steps
    store_i32(to + first * 64, w0)
    store_i32(to + first * 64 + 64, w1)
    store_i32(to + first * 64 + 128, w2)
    store_i32(to + first * 64 + 192, w3)


@inner
def put_factors(to: int, first: int, factors: Any) -> None:
    """Store a super-block's factor (a small integer a lane) from index `first` on."""
    store_i32(to + _FACTORS + first * 64, short_factor(factors))


@inner
def put_d(to: int, d: Any) -> None:
    """Store a super-block's d."""
    store_f32(to + _D, d)


@inner
def put_scales(to: int, p: int) -> None:
    """Store a super-block's eight scales, its minima and factors, packed at p as cpu_kernels.formats.q4_k does."""
    for half in range(2):
        scales = load_i32(p + half * 64)
        for i in range(4):
            put_factors(to, half * 4 + i, mask_bits(scales, 0xFF))
            scales = shift_right(scales, 8)
        minima = load_i32(p + 128 + half * 64)
        store_i32(to + _MINIMA + half * 128, mask_bits(minima, _WORDS))
        store_i32(to + _MINIMA + half * 128 + 64, mask_bits(shift_right(minima, 8), _WORDS))
    store_f32(to + _D, load_f16(p + 256))
    store_f32(to + _DMIN, neg_f32(load_f16(p + 288)))


@inner
def _four(p: int) -> Any:
    return load_i32(p), load_i32(p + 64), load_i32(p + 128), load_i32(p + 192)


def _add(panels: Panels, width: int) -> Any:
    """The function that adds a panel's products with some tiles to their sums, 64 bytes a token."""
    sums, centred, minima = panels.sums, panels.centred, panels.minima
    quads, sums_of_factor = 16 // sums, sums // panels.factors
    step = 4 * width

    @inner
    def add_minima(panel: int, pairs: int, scale: int, totals: int) -> None:
        total = tile_dot2(zero_tile_i32(width), load_i32(panel + _MINIMA), pairs)
        total = tile_dot2(total, load_i32(panel + _MINIMA + 64), pairs + step)
        total = tile_dot2(total, load_i32(panel + _MINIMA + 128), pairs + 2 * step)
        total = tile_dot2(total, load_i32(panel + _MINIMA + 192), pairs + 3 * step)
        tile_scale_add_to_memory(total, load_f32(panel + _DMIN), scale, totals)

    @inner
    def add(panel: int, act: int, first: int, tiles: int, k: int, block: int, totals: int) -> None:
        x = field(act, _Q) + (first * k + block * 256) * width
        at = (first * (k // 256) + block) * step
        for _ in range(tiles):
            products = zero_tile_i32(width)
            for i in range(sums):
                values, operands = panel + i * quads * 256, x + i * quads * 4 * step
                part = zero_tile_i32(width)
                if centred:
                    part = broadcast_like(part, field(act, _SUM16) + at * 16 + i * step, 0)
                part = short_dot4_steps(part, _four(values), operands)
                if quads == 2:
                    part = short_dot4_steps(part, _four(values + 256), operands + 4 * step)
                products = add_short(products, part, load_i32(panel + _FACTORS + i // sums_of_factor * 64))
            scale = field(act, _SCALE) + at
            tile_scale_add_to_memory(products, load_f32(panel + _D), scale, totals)
            if minima:
                add_minima(panel, field(act, _PAIRS) + at * 4, scale, totals)
            x += k * width
            at += k // 256 * step
            totals += 64 * width

    return add
