"""Five-bit values in five vectors for eight k steps: what Q5_0, Q5_1 and Q5_K share.

Byte of vector i (0-3): the whole value of step i in bits 0-4, the upper three bits of step i + 4 in bits 5-7. The fifth
vector holds the lower two bits of step i + 4 in bits 2 i. So half the values cost one mask, and the others stand in
bits 3-7, as value * 8.
"""

from typing import Any

from cpu_kernels.kernel import inner
from cpu_kernels.simd.arithmetic import mask_bits, or_i32, shift_left, shift_right
from cpu_kernels.simd.dot import has_short_sums
from cpu_kernels.simd.vectors import get_i32, load_i32, put_i32

# Short sums have no room for values * 8.
HIGH_FACTOR_BITS = 0 if has_short_sums() else 3
LARGEST_FIVE = 31
_DOWN = 3 - HIGH_FACTOR_BITS
_FIVE, _THREE, _TWO = 0x1F1F1F1F, 0x07070707, 0x03030303
_TOP, _REST = 0xE0E0E0E0, 0x18181818


@inner
def pack_pair(to: int, i: int, low: int, high: int) -> None:
    """Add steps i and i + 4 (four five-bit values each, as bytes of an integer) to the lane at `to`, zeroed before."""
    put_i32(to + i * 64, low | (high >> 2 & _THREE) << 5)
    put_i32(to + 256, get_i32(to + 256) | (high & _TWO) << (2 * i))


@inner
def five_bits(at: int, i: int) -> int:
    """Value i of the 32 in the lane at an address."""
    shift = i % 4 * 8
    byte = int(get_i32(at + i // 4 % 4 * 64)) >> shift
    rest = int(get_i32(at + 256)) >> shift >> (i // 4 % 4 * 2)
    return (byte & 31) if i < 16 else (byte >> 3 & 28) | (rest & 3)


@inner
def low_fives(p: int) -> Any:
    """The first four k steps."""
    return (
        mask_bits(load_i32(p), _FIVE),
        mask_bits(load_i32(p + 64), _FIVE),
        mask_bits(load_i32(p + 128), _FIVE),
        mask_bits(load_i32(p + 192), _FIVE),
    )


@inner
def _joined(top: Any, rest: Any) -> Any:
    return shift_right(or_i32(mask_bits(top, _TOP), mask_bits(rest, _REST)), _DOWN)


@inner
def high_fives(p: int) -> Any:
    """The last four k steps, times 2**HIGH_FACTOR_BITS."""
    rest = load_i32(p + 256)
    return (
        _joined(load_i32(p), shift_left(rest, 3)),
        _joined(load_i32(p + 64), shift_left(rest, 1)),
        _joined(load_i32(p + 128), shift_right(rest, 1)),
        _joined(load_i32(p + 192), shift_right(rest, 3)),
    )


@inner
def pack_five_bit_block(nibbles: int, high: int, to: int) -> None:
    """Pack a block's sixteen bytes of nibbles (value j low, value j + 16 high) and its 32 fifth bits into a lane."""
    for i in range(4):
        packed = get_i32(nibbles + 4 * i)
        low_bits = _spread(high >> (4 * i) & 15) << 4
        high_bits = _spread(high >> (4 * i + 16) & 15) << 4
        pack_pair(to, i, packed & 0x0F0F0F0F | low_bits, packed >> 4 & 0x0F0F0F0F | high_bits)


@inner
def _spread(bits: int) -> int:
    """Four bits, one a byte."""
    return bits * 0x00204081 & 0x01010101
