"""Formats whose values are points of a grid, four or eight neighbouring values together, times signs; and ternary ones.

What a code stands for is in tables of one word for each point: value j's nibble is in the lower half of byte j, value
4 + j's in the upper half. A nibble is the number of a level, and above it the sign. The grids are those of gguf.quants.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.declarations import inner
from cpu_kernels.formats.source import Source
from cpu_kernels.formats.transposed import SCALES_AT, Transposed
from cpu_kernels.simd.arithmetic import add_i32, mask_bits, or_i32, shift_left, shift_right, shift_right_signed
from cpu_kernels.simd.bytes import byte_values, numbers_table
from cpu_kernels.simd.vectors import get_i16, load_i32, put_i16, splat_i32, store_i32

_NIBBLES = 0x0F0F0F0F
_SIGNS = 0x88888888


def _grid(name: str) -> Any:
    """An intrinsic that gives the words of grid points."""

    @functools.cache
    def entries() -> NDArray[np.uint32]:
        from gguf import GGMLQuantizationType, quants  # here: it takes long, and compiled kernels do without

        grid = quants._type_traits[GGMLQuantizationType[name]]
        grid.init_grid()
        points = grid.grid.reshape(grid.grid_shape)
        levels = np.searchsorted(np.array(grid.grid_map, np.float32), points).astype(np.uint32)
        return _words(levels)

    return numbers_table(f"localllm.grid.{name}", entries)


def _words(nibbles: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Nibbles of four or eight values each as a word: uint32[points]."""
    found = np.zeros(len(nibbles), np.uint32)
    for i, column in enumerate(nibbles.T):
        found |= column << np.uint32(i % 4 * 8 + i // 4 * 4)
    return found


def _sign_words(signs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _words((signs[:, None] >> np.arange(8, dtype=np.uint32) & 1) * np.uint32(8))


def _even_signs() -> NDArray[np.uint32]:
    """Seven signs, and an eighth that makes the number of negative ones even."""
    seven = np.arange(128, dtype=np.uint32)
    odd = np.bitwise_xor.reduce(seven[:, None] >> np.arange(7, dtype=np.uint32) & 1, axis=1)
    return _sign_words(seven | odd << 7)


_signs_of_7 = numbers_table("localllm.signs_of_7", _even_signs)
_signs_of_8 = numbers_table("localllm.signs_of_8", lambda: _sign_words(np.arange(256, dtype=np.uint32)))


def _signed(levels: tuple[int, ...]) -> Any:
    """An intrinsic that gives the values of nibbles: eight levels, then their negatives."""
    padded = levels + (0,) * (8 - len(levels))
    return byte_values(padded + tuple(-level for level in padded))


_levels_2 = _signed((8, 25, 43))
_levels_3_xxs = _signed((4, 12, 20, 28, 36, 44, 52, 62))
_levels_3_s = _signed((1, 3, 5, 7, 9, 11, 13, 15))
# Eight times -1, 0 and 1, plus 1, or minus 1 where the upper bit says so.
_levels_1 = byte_values((-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0))
_ternary = byte_values((-1, 0, 1) + (0,) * 13)
_points_2_xxs, _points_2_xs, _points_2_s = _grid("IQ2_XXS"), _grid("IQ2_XS"), _grid("IQ2_S")
_points_3_xxs, _points_3_s, _points_1 = _grid("IQ3_XXS"), _grid("IQ3_S"), _grid("IQ1_S")


def _eight(levels: Any) -> Any:
    """Function put(nibbles, to): store the values of eight nibbles, two k steps."""

    @inner
    def put(nibbles: Any, to: int) -> None:
        store_i32(to, levels(mask_bits(nibbles, _NIBBLES)))
        store_i32(to + 64, levels(mask_bits(shift_right(nibbles, 4), _NIBBLES)))

    return put


_put_2, _put_3_xxs, _put_3_s, _put_1 = map(_eight, (_levels_2, _levels_3_xxs, _levels_3_s, _levels_1))


@inner
def _odd(bits: Any) -> Any:
    """Twice a number, plus one: what scales stand for."""
    return add_i32(add_i32(bits, bits), splat_i32(1))


@inner
def _unpack_iq2_xxs(p: int, panel: int) -> None:
    """For 32 values: four points of a byte, then four times seven signs and four bits of scale."""
    for b in range(8):
        points, signs = load_i32(p + b * 128), load_i32(p + b * 128 + 64)
        store_i32(panel + SCALES_AT + 64 * b, _odd(shift_right(signs, 28)))
        for g in range(4):
            nibbles = or_i32(_points_2_xxs(mask_bits(points, 255)), _signs_of_7(mask_bits(signs, 127)))
            _put_2(nibbles, panel + b * 512 + g * 128)
            points, signs = shift_right(points, 8), shift_right(signs, 7)


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
)
