"""Q4_1: blocks of 32 nibbles with a half-precision scale and minimum (640 bytes per block of 32 rows)."""

from cpu_kernels.formats.blocks_32 import Blocks32, blocks_32_format, copy_nibbles, nibble
from cpu_kernels.formats.q4_0 import high_nibbles, low_nibbles
from cpu_kernels.kernel import inner
from cpu_kernels.simd.vectors import get_i16, put_i16

_SOURCE_BYTES, _BLOCK_BYTES = 20, 640
_HALF_BYTES, _SCALES, _MINIMA = 256, 512, 576


@inner
def _pack_row(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 32):
        block = source + b * _SOURCE_BYTES
        packed = group + b * _BLOCK_BYTES
        put_i16(packed + _SCALES + lane * 2, get_i16(block))
        put_i16(packed + _MINIMA + lane * 2, get_i16(block + 2))
        copy_nibbles(block + 4, packed + lane // 16 * _HALF_BYTES + lane % 16 * 4)


_LAYOUT = Blocks32(
    half_bytes=_HALF_BYTES,
    low_steps=low_nibbles,
    high_steps=high_nibbles,
    largest=15,
    spare_bits=4,
    value=nibble,
    minima=True,
)
FORMAT = blocks_32_format("Q4_1", _LAYOUT, _pack_row)
