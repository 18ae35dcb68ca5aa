"""Floats rounded to 16-bit words, with a unit (the value of a word of 1) for each part of a row.

The unit is the smallest for which the words' Euclidean norm is at most NORM and no word exceeds WORD. So no sum of
products of two parts overflows 32 bits (Cauchy-Schwarz), and rounding a part x adds an error of 6e-6 |x| |y| to its
product with y (standard deviation).
"""

import math
from typing import Any

import numpy as np

from cpu_kernels.declarations import inner
from cpu_kernels.simd.arithmetic import fma, largest_magnitude, magnitude, max_i32, mul_f32, round_i32, sum_f32
from cpu_kernels.simd.vectors import load_f32, put_f32, scatter_i16x2, splat_f32, zero_f32, zero_i32

BLOCK = 128
"""Values of a weight's or an activation's row that share a unit."""
NORM = np.float32(46300.0)
WORD = np.float32(32767.0)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
LEAST = np.float32(1e-30)
"""A part whose numbers are all smaller becomes zeros: the reciprocal of its unit would be infinite."""


def largest_getter(load: Any, size: int) -> Any:
    """Function largest(x, count): the largest magnitude of numbers of `size` bytes, which `load` reads; NaN if any is.

    count: a multiple of 16.
    """

    @inner
    def largest(x: int, count: int) -> np.float32:
        found = zero_i32()
        for i in range(0, count, 16):
            found = max_i32(found, magnitude(load(x + i * size)))
        return largest_magnitude(found)

    return largest


def unit_getter(load: Any, size: int) -> Any:
    """Function unit(x, count) of as many numbers, see largest_getter; not finite if one of them is not."""
    largest = largest_getter(load, size)

    @inner
    def unit(x: int, count: int) -> np.float32:
        bound = largest(x, count)
        if bound < LEAST:
            return _ZERO
        inverse, squares = splat_f32(_ONE / bound), zero_f32()
        for i in range(0, count, 16):
            part = mul_f32(load(x + i * size), inverse)
            squares = fma(part, part, squares)
        norm = np.float32(math.sqrt(sum_f32(squares)))
        return bound * max(norm / NORM, _ONE / WORD)

    return unit


largest_of, unit_of = largest_getter(load_f32, 4), unit_getter(load_f32, 4)


@inner
def reciprocal(unit: np.float32) -> np.float32:
    """1 / unit, or 0 for a unit of 0."""
    return _ZERO if unit == _ZERO else _ONE / unit


@inner
def pack_words(source: int, blocks: int, pitch: int, words: int, units: int) -> None:
    """Round blocks of one row of floats. pitch: 4 * tile width, the distance between a row's neighbouring pairs."""
    for b in range(blocks):
        x = source + b * BLOCK * 4
        unit = unit_of(x, BLOCK)
        put_f32(units + b * pitch, unit)
        inverse = splat_f32(reciprocal(unit))
        for i in range(0, BLOCK, 16):
            rounded = round_i32(mul_f32(load_f32(x + i * 4), inverse))
            scatter_i16x2(words + (b * BLOCK + i) // 2 * pitch, pitch, rounded)
