"""Q5_0: blocks of 32 five-bit values less 16 with a half-precision scale (704 bytes per block of 32 rows)."""

from cpu_kernels.formats.blocks_32 import Blocks32, blocks_32_format
from cpu_kernels.formats.five_bits import LARGEST_FIVE, five_bits, high_fives, low_fives, pack_five_bit_block
from cpu_kernels.kernel import inner
from cpu_kernels.simd.vectors import get_i16, get_i32, put_i16

_SOURCE_BYTES, _BLOCK_BYTES = 22, 704
_HALF_BYTES, _SCALES = 320, 640


@inner
def _pack_row(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 32):
        block = source + b * _SOURCE_BYTES
        packed = group + b * _BLOCK_BYTES
        put_i16(packed + _SCALES + lane * 2, get_i16(block))
        pack_five_bit_block(block + 6, get_i32(block + 2), packed + lane // 16 * _HALF_BYTES + lane % 16 * 4)


@inner
def _value(at: int, i: int) -> int:
    return five_bits(at, i) - 16


_LAYOUT = Blocks32(
    half_bytes=_HALF_BYTES,
    low_steps=low_fives,
    high_steps=high_fives,
    largest=LARGEST_FIVE,
    spare_bits=3,
    value=_value,
)
FORMAT = blocks_32_format("Q5_0", _LAYOUT, _pack_row)
