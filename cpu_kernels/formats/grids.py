"""Formats whose values are grid points (four or eight neighbouring values each) times signs, and ternary formats.

A table has one word for each grid point: the lower half of byte j is value j's nibble, the upper half is value 4 + j's.
A nibble is the index of a level, with the sign as its upper bit. The grids are those of gguf.quants.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.declarations import inner
from cpu_kernels.simd.arithmetic import add_i32, mask_bits, mul_i32, or_i32, shift_left, shift_right, shift_right_signed
from cpu_kernels.simd.bytes import byte_values
from cpu_kernels.simd.lookups import base_3_digits, points_table, sign_words, spread, with_even_bits
from cpu_kernels.simd.vectors import get_i16, load_i32, put_i16, splat_i32, store_i32

SCALES_AT = 4096
"""Offset of the scales in a panel, see cpu_kernels.formats.transposed."""
_NIBBLES = 0x0F0F0F0F
_SIGNS = 0x88888888
_TWO_BITS, _LOWER_BYTES, _UPPER_BYTES = 0x03030303, 0x00FF00FF, 0xFF00FF00


def _grid(name: str) -> Any:
    """An intrinsic that looks up the words of grid points."""

    @functools.cache
    def entries() -> NDArray[np.uint32]:
        from gguf import GGMLQuantizationType, quants  # imported here: it is slow, and compiled kernels do not need it

        grid = quants._type_traits[GGMLQuantizationType[name]]
        grid.init_grid()
        points = grid.grid.reshape(grid.grid_shape)
        levels = np.searchsorted(np.array(grid.grid_map, np.float32), points).astype(np.uint32)
        return _words(levels)

    return points_table(f"localllm.grid.{name}", entries)


def _words(nibbles: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Combine the nibbles of four or eight values per point into a word: uint32[points]."""
    found = np.zeros(len(nibbles), np.uint32)
    for i, column in enumerate(nibbles.T):
        found |= column << np.uint32(i % 4 * 8 + i // 4 * 4)
    return found


def _signed(levels: tuple[int, ...]) -> Any:
    """An intrinsic that looks up the values of nibbles: up to eight levels, then their negatives."""
    padded = levels + (0,) * (8 - len(levels))
    return byte_values(padded + tuple(-level for level in padded))


_levels_2 = _signed((8, 25, 43))
_levels_3_xxs = _signed((4, 12, 20, 28, 36, 44, 52, 62))
_levels_3_s = _signed((1, 3, 5, 7, 9, 11, 13, 15))
# Eight times -1, 0 and 1, plus 1, or minus 1 if the upper bit is set.
_levels_1 = byte_values((-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0))
# Two bits may also hold 2, which no quantiser writes.
_ternary = byte_values((-1, 0, 1, 2) + (0,) * 12)
_points_2_xxs, _points_2_xs, _points_2_s = _grid("IQ2_XXS"), _grid("IQ2_XS"), _grid("IQ2_S")
_points_3_xxs, _points_3_s, _points_1 = _grid("IQ3_XXS"), _grid("IQ3_S"), _grid("IQ1_S")


def _group(levels: Any) -> Any:
    """Return put(points, signs, to), which stores 32 values, eight k steps: four vectors of nibbles and of signs."""

    @inner
    def put_eight(nibbles: Any, to: int) -> None:
        store_i32(to, levels(mask_bits(nibbles, _NIBBLES)))
        store_i32(to + 64, levels(mask_bits(shift_right(nibbles, 4), _NIBBLES)))

    @inner
    def put(points: Any, signs: Any, to: int) -> None:
        first, second, third, fourth = points
        sign_1, sign_2, sign_3, sign_4 = signs
        put_eight(or_i32(first, sign_1), to)
        put_eight(or_i32(second, sign_2), to + 128)
        put_eight(or_i32(third, sign_3), to + 256)
        put_eight(or_i32(fourth, sign_4), to + 384)

    return put


_put_2, _put_3_xxs, _put_3_s, _put_1 = map(_group, (_levels_2, _levels_3_xxs, _levels_3_s, _levels_1))


@inner
def _pairs(first: Any, second: Any) -> Any:
    """Join eight points of four values into four of eight: every second one goes to the upper nibbles."""
    a, b, c, d = first
    e, f, g, h = second
    return (
        or_i32(a, shift_left(b, 4)),
        or_i32(c, shift_left(d, 4)),
        or_i32(e, shift_left(f, 4)),
        or_i32(g, shift_left(h, 4)),
    )


@inner
def _even_signs(bits: Any) -> Any:
    """Signs of four groups of seven bits; an eighth makes the number of negative values even."""
    return sign_words(with_even_bits(spread(bits, 7)))


@inner
def _odd(bits: Any) -> Any:
    """2 * bits + 1, the value of a stored scale."""
    return add_i32(add_i32(bits, bits), splat_i32(1))


@inner
def _put_16_scales(p: int, panel: int) -> None:
    """Write a panel's 16 scales, one per 16 values: 4 bits each, eight in each of two vectors."""
    for half in range(2):
        scales = load_i32(p + half * 64)
        for i in range(half * 8, half * 8 + 8):
            store_i32(panel + SCALES_AT + 64 * i, _odd(mask_bits(scales, 15)))
            scales = shift_right(scales, 4)


@inner
def unpack_iq2_xxs(p: int, panel: int) -> None:
    """Per 32 values: four one-byte points, then four times seven signs and a 4-bit scale."""
    for b in range(8):
        points, signs = load_i32(p + b * 128), load_i32(p + b * 128 + 64)
        store_i32(panel + SCALES_AT + 64 * b, _odd(shift_right(signs, 28)))
        _put_2(_points_2_xxs(points, points), _even_signs(signs), panel + b * 512)


@inner
def unpack_iq2_xs(p: int, panel: int) -> None:
    """Per 8 values: a 9-bit point and seven signs. Behind all points: a 4-bit scale per 16 values."""
    _put_16_scales(p + 1024, panel)
    for b in range(8):
        # Of two words, the values in the order first, third, second, fourth: a byte of each half of a word.
        first, second = load_i32(p + b * 128), load_i32(p + b * 128 + 64)
        low = or_i32(mask_bits(first, _LOWER_BYTES), shift_left(mask_bits(second, _LOWER_BYTES), 8))
        high = or_i32(shift_right(mask_bits(first, _UPPER_BYTES), 8), mask_bits(second, _UPPER_BYTES))
        signs = with_even_bits(mask_bits(shift_right(high, 1), 0x7F7F7F7F))
        one, three, two, four = _points_2_xs(low, mask_bits(high, 0x01010101))
        sign_1, sign_3, sign_2, sign_4 = sign_words(signs)
        _put_2((one, two, three, four), (sign_1, sign_2, sign_3, sign_4), panel + b * 512)


@inner
def unpack_iq2_s(p: int, panel: int) -> None:
    """A byte of the point per 8 values, then signs, then two more bits per point, then a 4-bit scale per 16 values."""
    _put_16_scales(p + 1152, panel)
    for half in range(2):
        upper = load_i32(p + 1024 + half * 64)
        for b in range(half * 4, half * 4 + 4):
            points = _points_2_s(load_i32(p + b * 64), spread(upper, 2))
            _put_2(points, sign_words(load_i32(p + 512 + b * 64)), panel + b * 512)
            upper = shift_right(upper, 8)


@inner
def unpack_iq3_xxs(p: int, panel: int) -> None:
    """A one-byte point per 4 values. Behind all points, per 32 values: four times seven signs and a 4-bit scale."""
    for b in range(8):
        signs = load_i32(p + 1024 + b * 64)
        store_i32(panel + SCALES_AT + 64 * b, _odd(shift_right(signs, 28)))
        first, second = load_i32(p + b * 128), load_i32(p + b * 128 + 64)
        points = _pairs(_points_3_xxs(first, first), _points_3_xxs(second, second))
        _put_3_xxs(points, _even_signs(signs), panel + b * 512)


@inner
def unpack_iq3_s(p: int, panel: int) -> None:
    """A byte of the point per 4 values, then the points' ninth bits, then signs, then a 4-bit scale per 32 values."""
    scales = load_i32(p + 1664)
    for quarter in range(2):
        upper = load_i32(p + 1024 + quarter * 64)
        for b in range(quarter * 4, quarter * 4 + 4):
            store_i32(panel + SCALES_AT + 64 * b, _odd(mask_bits(scales, 15)))
            scales = shift_right(scales, 4)
            first = _points_3_s(load_i32(p + b * 128), spread(upper, 1))
            second = _points_3_s(load_i32(p + b * 128 + 64), spread(shift_right(upper, 4), 1))
            _put_3_s(_pairs(first, second), sign_words(load_i32(p + 1152 + b * 64)), panel + b * 512)
            upper = shift_right(upper, 8)


@inner
def unpack_iq1_s(p: int, panel: int) -> None:
    """A byte of the point per 8 values; then per 32 values the points' upper three bits, a 3-bit scale and a sign."""
    for pair in range(4):
        rest = load_i32(p + 512 + pair * 64)
        for b in range(2 * pair, 2 * pair + 2):
            store_i32(panel + SCALES_AT + 64 * b, _odd(mask_bits(shift_right(rest, 12), 7)))
            sign = mask_bits(shift_right_signed(shift_left(rest, 16), 31), _SIGNS)
            _put_1(_points_1(load_i32(p + b * 64), spread(rest, 3)), (sign, sign, sign, sign), panel + b * 512)
            rest = shift_right(rest, 16)


@inner
def unpack_iq1_m(p: int, panel: int) -> None:
    """A byte of the point per 8 values, then each point's upper three bits and a sign; a 3-bit scale per 16 values.

    Four scales are in the lower twelve bits of a 16-bit word; its upper four bits are a part of d.
    """
    for pair in range(4):
        upper = load_i32(p + 512 + pair * 64)
        scales = load_i32(p + 768 + pair // 2 * 64)
        if pair % 2 == 1:
            scales = shift_right(scales, 16)
        for b in range(2 * pair, 2 * pair + 2):
            for i in range(2 * b, 2 * b + 2):
                store_i32(panel + SCALES_AT + 64 * i, _odd(mask_bits(scales, 7)))
                scales = shift_right(scales, 3)
            bits = spread(upper, 4)
            # All signs of a group are its one: bytes of 0 or 255.
            signs = sign_words(mul_i32(mask_bits(shift_right(bits, 3), 0x01010101), splat_i32(255)))
            _put_1(_points_1(load_i32(p + b * 64), mask_bits(bits, 0x07070707)), signs, panel + b * 512)
            upper = shift_right(upper, 16)


@inner
def put_d_iq1_m(block: int, to: int) -> None:
    """Assemble d from the upper four bits of four words, lowest first."""
    d = 0
    for i in range(4):
        d |= (get_i16(block + 48 + 2 * i) >> 12 & 15) << (4 * i)
    put_i16(to, d)


@inner
def _put_digits(word: Any, to: int, stride: int) -> Any:
    """Store four digits of base 3 of each byte; return the fifth."""
    first, second, third, fourth, fifth = base_3_digits(word)
    store_i32(to, _ternary(first))
    store_i32(to + stride, _ternary(second))
    store_i32(to + 2 * stride, _ternary(third))
    store_i32(to + 3 * stride, _ternary(fourth))
    return fifth


@inner
def unpack_tq1_0(p: int, panel: int) -> None:
    """Five digits per byte in 32 and in 16 bytes, four in the last 4; neighbouring values are in neighbouring bytes."""
    for i in range(8):
        store_i32(panel + 2048 + i * 64, _ternary(_put_digits(load_i32(p + i * 64), panel + i * 64, 512)))
    for i in range(4):
        fifth = _put_digits(load_i32(p + 512 + i * 64), panel + 2560 + i * 64, 256)
        store_i32(panel + 3584 + i * 64, _ternary(fifth))
    _put_digits(load_i32(p + 768), panel + 3840, 64)


@inner
def unpack_tq2_0(p: int, panel: int) -> None:
    """Two bits per value; neighbouring values are in neighbouring bytes, in runs of 32."""
    for half in range(2):
        for i in range(8):
            word = load_i32(p + half * 512 + i * 64)
            for j in range(4):
                store_i32(panel + half * 2048 + j * 512 + i * 64, _ternary(mask_bits(word, _TWO_BITS)))
                word = shift_right(word, 2)
