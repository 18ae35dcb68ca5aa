"""Raises the logits of the green tokens of a watermark (Kirchenbauer et al., arXiv:2301.10226).

Which tokens are green after a token follows from a hash of each id with two seeds: nothing is sorted or permuted.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.kernel import kernel
from cpu_kernels.records import argument
from cpu_kernels.self_check import Sample
from cpu_kernels.simd.arithmetic import (
    add_f32,
    add_i32,
    max_f32,
    mul_i32,
    shift_right,
    shift_right_signed,
    xor_i32,
)
from cpu_kernels.simd.doubles import count_up, load_first, where_f32
from cpu_kernels.simd.vectors import get_f32, get_i32, load_f32, splat_f32, splat_i32, store_f32

HASHES = 1 << 24
"""Hashes are below it."""
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32


class Raise(Arguments):
    """Arguments of raise_green."""

    logits: int  # floats
    raised: int  # the result, with room for a multiple of sixteen; may be the same array
    count: int  # logits
    seeds: int  # two 32-bit integers
    bound: int  # tokens with a hash below it are green
    delta: int  # a float, at least 0: what is added


_RAISE = indices_of(Raise)


def hashes(ids: NDArray[Any], first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.uint32]:
    """The hash of each id, below HASHES, with the seeds of its place (uint32): a mixer by Chris Wellons, lowbias32."""
    mixed = ids.astype(np.uint32) ^ first
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(_FIRST) + second
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(_SECOND % 2**32)
    return (mixed ^ (mixed >> np.uint32(16))) >> np.uint32(8)


def _samples() -> Iterator[Sample]:
    for count in (70, 5):
        s = Sample()
        seeds = s.array(s.random.integers(-(2**31), 2**31, 2), np.int32)
        yield s.arguments(s.normal(count), s.zeros((count + 15) // 16 * 16), count, seeds, HASHES // 3, s.array([2.0]))


@kernel(Raise, _samples)
def raise_green(op: int, step: int, thread: int, threads: int) -> None:
    """Write the logits, those of green tokens higher by delta, by the first thread."""
    if thread == 0:
        x, to, n = argument(op, _RAISE.logits), argument(op, _RAISE.raised), argument(op, _RAISE.count)
        seeds = argument(op, _RAISE.seeds)
        first, second = splat_i32(get_i32(seeds)), splat_i32(get_i32(seeds + 4))
        below, delta = splat_i32(-argument(op, _RAISE.bound)), splat_f32(get_f32(argument(op, _RAISE.delta)))
        one, two = splat_i32(_FIRST), splat_i32(_SECOND)
        for i in range(0, n, 16):
            mixed = xor_i32(count_up(i), first)
            mixed = add_i32(mul_i32(xor_i32(mixed, shift_right(mixed, 16)), one), second)
            mixed = mul_i32(xor_i32(mixed, shift_right(mixed, 15)), two)
            mixed = shift_right(xor_i32(mixed, shift_right(mixed, 16)), 8)
            values = load_f32(x + 4 * i) if n - i >= 16 else load_first(x + 4 * i, n - i)
            green = shift_right_signed(add_i32(mixed, below), 31)
            store_f32(to + 4 * i, max_f32(where_f32(green, add_f32(values, delta)), values))
