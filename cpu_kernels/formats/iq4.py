"""IQ4_NL, IQ4_XS and MXFP4: nibbles that index a table of sixteen values, and a scale for 32 of them.

All three are packed alike (see cpu_kernels.formats.blocks_32). IQ4_XS's scale is d * (6-bit scale - 32) and MXFP4's a
power of two beyond half precision, so both are widened to f32: 640 bytes per block of 32 rows, against 576 for IQ4_NL.
Tables and layouts are ggml's (ggml-common.h).
"""

from typing import Any

import numpy as np

from cpu_kernels.formats.blocks_32 import Blocks32, blocks_32_format, copy_nibbles, nibble
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import inner
from cpu_kernels.simd.arithmetic import mask_bits, shift_right
from cpu_kernels.simd.dot import BYTE_OFFSET
from cpu_kernels.simd.lookup import lookup
from cpu_kernels.simd.vectors import (
    get_f16,
    get_f32,
    get_i16,
    get_u8,
    load_f16,
    load_f32,
    load_i32,
    put_f32,
    put_i16,
    put_i32,
)

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# FP4 (E2M1) times two.
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_HALF_BYTES, _SCALES = 256, 512
_NARROW_BYTES, _WIDE_BYTES = 576, 640
_NL_SOURCE, _XS_SOURCE, _MX_SOURCE = 18, 136, 17
_NIBBLES = 0x0F0F0F0F


@inner
def _pack_row_nl(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 32):
        block = source + b * _NL_SOURCE
        packed = group + b * _NARROW_BYTES
        put_i16(packed + _SCALES + lane * 2, get_i16(block))
        copy_nibbles(block + 2, packed + lane // 16 * _HALF_BYTES + lane % 16 * 4)


@inner
def _pack_row_xs(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 32):
        block, j = source + b // 8 * _XS_SOURCE, b % 8
        packed = group + b * _WIDE_BYTES
        low = get_u8(block + 4 + j // 2) >> (j % 2 * 4) & 15
        high = get_i16(block + 2) >> (2 * j) & 3
        put_f32(packed + _SCALES + lane * 4, get_f16(block) * np.float32((low | high << 4) - 32))
        copy_nibbles(block + 8 + j * 16, packed + lane // 16 * _HALF_BYTES + lane % 16 * 4)


@inner
def _pack_row_mx(source: int, group: int, lane: int, k: int) -> None:
    for b in range(k // 32):
        block = source + b * _MX_SOURCE
        packed = group + b * _WIDE_BYTES
        exponent = get_u8(block)
        # Half of 2 ** (exponent - 127), as the table is doubled; the lowest two are subnormal.
        bits = (exponent - 1) << 23 if exponent >= 2 else 0x00200000 << exponent
        put_i32(packed + _SCALES + lane * 4, bits)
        copy_nibbles(block + 1, packed + lane // 16 * _HALF_BYTES + lane % 16 * 4)


def _format(name: str, table: tuple[int, ...], pack_row: Any, wide: bool) -> WeightFormat:
    weights = lookup(f"lookup_{name}", tuple((value + BYTE_OFFSET) % 256 for value in table))

    @inner
    def low_steps(p: int) -> Any:
        return (
            weights(mask_bits(load_i32(p), _NIBBLES)),
            weights(mask_bits(load_i32(p + 64), _NIBBLES)),
            weights(mask_bits(load_i32(p + 128), _NIBBLES)),
            weights(mask_bits(load_i32(p + 192), _NIBBLES)),
        )

    @inner
    def high_steps(p: int) -> Any:
        return (
            weights(mask_bits(shift_right(load_i32(p), 4), _NIBBLES)),
            weights(mask_bits(shift_right(load_i32(p + 64), 4), _NIBBLES)),
            weights(mask_bits(shift_right(load_i32(p + 128), 4), _NIBBLES)),
            weights(mask_bits(shift_right(load_i32(p + 192), 4), _NIBBLES)),
        )

    @inner
    def value(at: int, i: int) -> int:
        return table[nibble(at, i)]

    layout = Blocks32(
        half_bytes=_HALF_BYTES,
        low_steps=low_steps,
        high_steps=high_steps,
        largest=255,
        spare_bits=0,
        value=value,
        load_scale=load_f32 if wide else load_f16,
        get_scale=get_f32 if wide else get_f16,
        scale_bytes=4 if wide else 2,
    )
    return blocks_32_format(name, layout, pack_row)


IQ4_NL_FORMAT = _format("IQ4_NL", _NONLINEAR, _pack_row_nl, wide=False)
IQ4_XS_FORMAT = _format("IQ4_XS", _NONLINEAR, _pack_row_xs, wide=True)
MXFP4_FORMAT = _format("MXFP4", _FP4, _pack_row_mx, wide=True)
