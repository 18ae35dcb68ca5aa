"""Q4_0: blocks of 32 nibbles less 8 with a half-precision scale (576 bytes per block of 32 rows)."""

from typing import Any

from cpu_kernels.formats.blocks_32 import Blocks32, blocks_32_format, copy_nibbles, nibble
from cpu_kernels.kernel import inner
from cpu_kernels.simd.arithmetic import mask_bits, shift_right
from cpu_kernels.simd.dot import has_short_sums
from cpu_kernels.simd.vectors import get_i16, load_i32, put_i16

_SOURCE_BYTES, _BLOCK_BYTES = 18, 576
_HALF_BYTES, _SCALES = 256, 512
_LOW = 0x0F0F0F0F
_DOWN, _HIGH = (4, _LOW) if has_short_sums() else (0, _LOW << 4)


@inner
def low_nibbles(p: int) -> Any:
    """The first four k steps."""
    return (
        mask_bits(load_i32(p), _LOW),
        mask_bits(load_i32(p + 64), _LOW),
        mask_bits(load_i32(p + 128), _LOW),
        mask_bits(load_i32(p + 192), _LOW),
    )


@inner
def high_nibbles(p: int) -> Any:
    """The last four k steps, times 16 where short sums are not too short for that."""
    return (
        mask_bits(shift_right(load_i32(p), _DOWN), _HIGH),
        mask_bits(shift_right(load_i32(p + 64), _DOWN), _HIGH),
        mask_bits(shift_right(load_i32(p + 128), _DOWN), _HIGH),
        mask_bits(shift_right(load_i32(p + 192), _DOWN), _HIGH),
    )


@inner
def _pack_row(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 32):
        block = source + b * _SOURCE_BYTES
        packed = group + b * _BLOCK_BYTES
        put_i16(packed + _SCALES + lane * 2, get_i16(block))
        copy_nibbles(block + 2, packed + lane // 16 * _HALF_BYTES + lane % 16 * 4)


@inner
def _value(at: int, i: int) -> int:
    return nibble(at, i) - 8


_LAYOUT = Blocks32(
    half_bytes=_HALF_BYTES,
    low_steps=low_nibbles,
    high_steps=high_nibbles,
    largest=15,
    spare_bits=4,
    value=_value,
)
FORMAT = blocks_32_format("Q4_0", _LAYOUT, _pack_row)
