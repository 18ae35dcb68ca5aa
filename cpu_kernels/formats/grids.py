"""Formats whose values are grid points (four or eight neighbouring values each) times signs, and ternary formats.

A table has one word for each grid point: the lower half of byte j is value j's nibble, the upper half is value 4 + j's.
A nibble is the index of a level, with the sign as its upper bit. The grids are those of gguf.quants.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.declarations import inner
from cpu_kernels.formats.source import Source
from cpu_kernels.formats.transposed import SCALES_AT, Transposed
from cpu_kernels.simd.arithmetic import add_i32, mask_bits, mul_i32, or_i32, shift_left, shift_right, shift_right_signed
from cpu_kernels.simd.bytes import byte_values, numbers_table
from cpu_kernels.simd.vectors import get_i16, load_i32, put_i16, splat_i32, store_i32

_NIBBLES = 0x0F0F0F0F
_SIGNS = 0x88888888
_LOWEST, _EIGHTH, _SEVEN_APART = 0x11111111, 0x10000000, 1 | 1 << 7 | 1 << 14 | 1 << 21
_TWO_BITS, _EVEN, _ODD = 0x03030303, 0x00FF00FF, 0x03000300


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

    return numbers_table(f"localllm.grid.{name}", entries)


def _words(nibbles: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Combine the nibbles of four or eight values per point into a word: uint32[points]."""
    found = np.zeros(len(nibbles), np.uint32)
    for i, column in enumerate(nibbles.T):
        found |= column << np.uint32(i % 4 * 8 + i // 4 * 4)
    return found


@inner
def _first_signs(bits: Any) -> Any:
    """Spread the lowest seven bits to the lowest bits of nibbles: the product repeats them every seven bits."""
    return mask_bits(mul_i32(mask_bits(bits, 127), splat_i32(_SEVEN_APART)), _LOWEST)


@inner
def _signs_of_7(bits: Any) -> Any:
    """A word of seven signs, and an eighth that makes the number of minus signs even: a sum in the top nibble."""
    signs = _first_signs(bits)
    total = mul_i32(signs, splat_i32(_LOWEST))
    return shift_left(or_i32(signs, mask_bits(total, _EIGHTH)), 3)


@inner
def _signs_of_8(bits: Any) -> Any:
    """A word of eight signs."""
    return shift_left(or_i32(_first_signs(bits), mask_bits(shift_left(bits, 21), _EIGHTH)), 3)


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


def _eight(levels: Any) -> Any:
    """Return put(nibbles, to), which stores the values of eight nibbles: two k steps."""

    @inner
    def put(nibbles: Any, to: int) -> None:
        store_i32(to, levels(mask_bits(nibbles, _NIBBLES)))
        store_i32(to + 64, levels(mask_bits(shift_right(nibbles, 4), _NIBBLES)))

    return put


_put_2, _put_3_xxs, _put_3_s, _put_1 = map(_eight, (_levels_2, _levels_3_xxs, _levels_3_s, _levels_1))


@inner
def _odd(bits: Any) -> Any:
    """2 * bits + 1, the value of a stored scale."""
    return add_i32(add_i32(bits, bits), splat_i32(1))


@inner
def _unpack_iq2_xxs(p: int, panel: int) -> None:
    """Per 32 values: four one-byte points, then four times seven signs and a 4-bit scale."""
    for b in range(8):
        points, signs = load_i32(p + b * 128), load_i32(p + b * 128 + 64)
        store_i32(panel + SCALES_AT + 64 * b, _odd(shift_right(signs, 28)))
        for g in range(4):
            nibbles = or_i32(_points_2_xxs(mask_bits(points, 255)), _signs_of_7(signs))
            _put_2(nibbles, panel + b * 512 + g * 128)
            points, signs = shift_right(points, 8), shift_right(signs, 7)


@inner
def _unpack_iq2_xs(p: int, panel: int) -> None:
    """Per 8 values: a 9-bit point and seven signs. Behind all points: a 4-bit scale per 16 values."""
    for half in range(2):
        scales = load_i32(p + 1024 + half * 64)
        for i in range(half * 8, half * 8 + 8):
            store_i32(panel + SCALES_AT + 64 * i, _odd(mask_bits(scales, 15)))
            scales, points = shift_right(scales, 4), load_i32(p + i * 64)
            for g in range(2):
                nibbles = or_i32(_points_2_xs(mask_bits(points, 511)), _signs_of_7(shift_right(points, 9)))
                _put_2(nibbles, panel + i * 256 + g * 128)
                points = shift_right(points, 16)


@inner
def _unpack_iq2_s(p: int, panel: int) -> None:
    """A byte of the point per 8 values, then signs, then two more bits per point, then a 4-bit scale per 16 values."""
    for half in range(2):
        upper, scales = load_i32(p + 1024 + half * 64), load_i32(p + 1152 + half * 64)
        for b in range(half * 4, half * 4 + 4):
            points, signs = load_i32(p + b * 64), load_i32(p + 512 + b * 64)
            for g in range(4):
                if g % 2 == 0:
                    store_i32(panel + SCALES_AT + 64 * (2 * b + g // 2), _odd(mask_bits(scales, 15)))
                    scales = shift_right(scales, 4)
                point = or_i32(mask_bits(points, 255), shift_left(mask_bits(upper, 3), 8))
                _put_2(or_i32(_points_2_s(point), _signs_of_8(signs)), panel + b * 512 + g * 128)
                points, signs, upper = shift_right(points, 8), shift_right(signs, 8), shift_right(upper, 2)


@inner
def _unpack_iq3_xxs(p: int, panel: int) -> None:
    """A one-byte point per 4 values. Behind all points, per 32 values: four times seven signs and a 4-bit scale."""
    for b in range(8):
        signs = load_i32(p + 1024 + b * 64)
        store_i32(panel + SCALES_AT + 64 * b, _odd(shift_right(signs, 28)))
        for half in range(2):
            points = load_i32(p + b * 128 + half * 64)
            for g in range(2):
                second = _points_3_xxs(mask_bits(shift_right(points, 8), 255))
                nibbles = or_i32(_points_3_xxs(mask_bits(points, 255)), shift_left(second, 4))
                nibbles = or_i32(nibbles, _signs_of_7(signs))
                _put_3_xxs(nibbles, panel + b * 512 + half * 256 + g * 128)
                points, signs = shift_right(points, 16), shift_right(signs, 7)


@inner
def _unpack_iq3_s(p: int, panel: int) -> None:
    """A byte of the point per 4 values, then the points' ninth bits, then signs, then a 4-bit scale per 32 values."""
    scales = load_i32(p + 1664)
    for quarter in range(2):
        upper = load_i32(p + 1024 + quarter * 64)
        for b in range(quarter * 4, quarter * 4 + 4):
            signs = load_i32(p + 1152 + b * 64)
            store_i32(panel + SCALES_AT + 64 * b, _odd(mask_bits(scales, 15)))
            scales = shift_right(scales, 4)
            for half in range(2):
                points = load_i32(p + b * 128 + half * 64)
                for g in range(2):
                    first = or_i32(mask_bits(points, 255), shift_left(mask_bits(upper, 1), 8))
                    points, upper = shift_right(points, 8), shift_right(upper, 1)
                    second = or_i32(mask_bits(points, 255), shift_left(mask_bits(upper, 1), 8))
                    points, upper = shift_right(points, 8), shift_right(upper, 1)
                    nibbles = or_i32(_points_3_s(first), shift_left(_points_3_s(second), 4))
                    nibbles = or_i32(nibbles, _signs_of_8(signs))
                    _put_3_s(nibbles, panel + b * 512 + half * 256 + g * 128)
                    signs = shift_right(signs, 8)


@inner
def _unpack_iq1_s(p: int, panel: int) -> None:
    """A byte of the point per 8 values; then per 32 values the points' upper three bits, a 3-bit scale and a sign."""
    for pair in range(4):
        rest = load_i32(p + 512 + pair * 64)
        for b in range(2 * pair, 2 * pair + 2):
            points = load_i32(p + b * 64)
            store_i32(panel + SCALES_AT + 64 * b, _odd(mask_bits(shift_right(rest, 12), 7)))
            sign = mask_bits(shift_right_signed(shift_left(rest, 16), 31), _SIGNS)
            upper = rest
            for g in range(4):
                point = or_i32(mask_bits(points, 255), shift_left(mask_bits(upper, 7), 8))
                _put_1(or_i32(_points_1(point), sign), panel + b * 512 + g * 128)
                points, upper = shift_right(points, 8), shift_right(upper, 3)
            rest = shift_right(rest, 16)


@inner
def _unpack_iq1_m(p: int, panel: int) -> None:
    """A byte of the point per 8 values, then each point's upper three bits and a sign; a 3-bit scale per 16 values.

    Four scales are in the lower twelve bits of a 16-bit word; its upper four bits are a part of d.
    """
    for pair in range(4):
        upper = load_i32(p + 512 + pair * 64)
        scales = load_i32(p + 768 + pair // 2 * 64)
        if pair % 2 == 1:
            scales = shift_right(scales, 16)
        for b in range(2 * pair, 2 * pair + 2):
            points = load_i32(p + b * 64)
            for g in range(4):
                if g % 2 == 0:
                    store_i32(panel + SCALES_AT + 64 * (2 * b + g // 2), _odd(mask_bits(scales, 7)))
                    scales = shift_right(scales, 3)
                point = or_i32(mask_bits(points, 255), shift_left(mask_bits(upper, 7), 8))
                sign = mask_bits(shift_right_signed(shift_left(upper, 28), 31), _SIGNS)
                _put_1(or_i32(_points_1(point), sign), panel + b * 512 + g * 128)
                points, upper = shift_right(points, 8), shift_right(upper, 4)


@inner
def _put_d_iq1_m(block: int, to: int) -> None:
    """Assemble d from the upper four bits of four words, lowest first."""
    d = 0
    for i in range(4):
        d |= (get_i16(block + 48 + 2 * i) >> 12 & 15) << (4 * i)
    put_i16(to, d)


@inner
def _put_digits(word: Any, count: int, to: int, stride: int) -> None:
    """Store the base-3 digits of bytes, the highest first. A byte holds its digits as a fraction of 256."""
    even, odd = mask_bits(word, _EVEN), mask_bits(shift_right(word, 8), _EVEN)
    for i in range(count):
        even, odd = add_i32(add_i32(even, even), even), add_i32(add_i32(odd, odd), odd)
        digits = or_i32(mask_bits(shift_right(even, 8), _EVEN), mask_bits(odd, _ODD))
        store_i32(to + i * stride, _ternary(digits))
        even, odd = mask_bits(even, _EVEN), mask_bits(odd, _EVEN)


@inner
def _unpack_tq1_0(p: int, panel: int) -> None:
    """Five digits per byte in 32 and in 16 bytes, four in the last 4; neighbouring values are in neighbouring bytes."""
    for i in range(8):
        _put_digits(load_i32(p + i * 64), 5, panel + i * 64, 512)
    for i in range(4):
        _put_digits(load_i32(p + 512 + i * 64), 5, panel + 2560 + i * 64, 256)
    _put_digits(load_i32(p + 768), 4, panel + 3840, 64)


@inner
def _unpack_tq2_0(p: int, panel: int) -> None:
    """Two bits per value; neighbouring values are in neighbouring bytes, in runs of 32."""
    for half in range(2):
        for i in range(8):
            word = load_i32(p + half * 512 + i * 64)
            for j in range(4):
                store_i32(panel + half * 2048 + j * 512 + i * 64, _ternary(mask_bits(word, _TWO_BITS)))
                word = shift_right(word, 2)


TRANSPOSED = (
    Transposed(
        name="IQ2_XXS",
        source=Source(nbytes=66, values=256, halves=(0,)),
        words_at=2,
        words=16,
        unpack=_unpack_iq2_xxs,
        sub_block=32,
        unit=8,
    ),
    Transposed(
        name="IQ2_XS",
        source=Source(nbytes=74, values=256, halves=(0,)),
        words_at=2,
        words=18,
        unpack=_unpack_iq2_xs,
        sub_block=16,
        unit=8,
    ),
    Transposed(
        name="IQ2_S",
        source=Source(nbytes=82, values=256, halves=(0,)),
        words_at=2,
        words=20,
        unpack=_unpack_iq2_s,
        sub_block=16,
        unit=8,
    ),
    Transposed(
        name="IQ3_XXS",
        source=Source(nbytes=98, values=256, halves=(0,)),
        words_at=2,
        words=24,
        unpack=_unpack_iq3_xxs,
        sub_block=32,
        unit=4,
    ),
    Transposed(
        name="IQ3_S",
        source=Source(nbytes=110, values=256, halves=(0,)),
        words_at=2,
        words=27,
        unpack=_unpack_iq3_s,
        sub_block=32,
    ),
    Transposed(
        name="IQ1_S",
        source=Source(nbytes=50, values=256, halves=(0,)),
        words_at=2,
        words=12,
        unpack=_unpack_iq1_s,
        sub_block=32,
        unit=8,
    ),
    Transposed(
        name="IQ1_M",
        source=Source(nbytes=56, values=256),
        words=14,
        unpack=_unpack_iq1_m,
        sub_block=16,
        put_d=_put_d_iq1_m,
        unit=8,
    ),
    Transposed(
        name="TQ1_0",
        source=Source(nbytes=54, values=256, halves=(52,)),
        words=13,
        unpack=_unpack_tq1_0,
        sub_block=256,
        d=52,
    ),
    Transposed(
        name="TQ2_0",
        source=Source(nbytes=66, values=256, halves=(64,)),
        words=16,
        unpack=_unpack_tq2_0,
        sub_block=256,
        d=64,
    ),
)
