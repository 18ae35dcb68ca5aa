"""All packed formats, each a short declaration, by the name of the GGUF block type.

A format declares the layout of its blocks in a file (cpu_kernels.formats.source), the arrangement of its values in
vectors (cpu_kernels.formats.codec), and its factors; the kernels follow from that. Layouts and tables are ggml's
(ggml-common.h).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType

import numpy as np

from cpu_kernels.declarations import inner
from cpu_kernels.formats import blocks_32, floats, grids, scaled_blocks, super_blocks, transposed, words
from cpu_kernels.formats.blocks_32 import Blocks32
from cpu_kernels.formats.codec import (
    BYTES,
    EIGHT_OF_TWO_BITS,
    FIVE_BITS,
    NIBBLES,
    SIGN_BITS,
    SIX_BITS,
    THREE_BITS,
    TWO_BITS,
    Codec,
)
from cpu_kernels.formats.floats import Floats
from cpu_kernels.formats.panels import panel_tiles
from cpu_kernels.formats.scaled_blocks import ScaledBlocks
from cpu_kernels.formats.source import Plane, Source
from cpu_kernels.formats.super_blocks import Minima, SuperBlock
from cpu_kernels.formats.transposed import Transposed
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.isa import POLICY
from cpu_kernels.matmul import plain_tiles
from cpu_kernels.records import TILE_WIDTHS, Form
from cpu_kernels.simd.vectors import get_f16, get_i16, get_i32, get_u8, put_f32, put_i32
from cpu_kernels.words import BLOCK

_SIX_BITS, _UPPER_BITS, _NIBBLES = 0x3F3F3F3F, 0x30303030, 0x0F0F0F0F
_TWO_BITS, _FIVE_BITS, _FIFTH_BIT = 0x03030303, 0x1F1F1F1F, 0x20202020
_IQ4 = Codec(NIBBLES.steps, table=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
# FP4 (E2M1) times two.
_FP4 = Codec(NIBBLES.steps, table=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))


@inner
def _put_scale_iq4_xs(row: int, b: int, to: int) -> None:
    """d * (6-bit scale - 32)."""
    block, j = row + b // 8 * 136, b % 8
    low, high = get_u8(block + 4 + j // 2) >> (j % 2 * 4) & 15, get_i16(block + 2) >> (2 * j) & 3
    put_f32(to, get_f16(block) * np.float32((low | high << 4) - 32))


@inner
def _put_scale_mxfp4(row: int, b: int, to: int) -> None:
    """2 ** (exponent - 127) / 2, since the table of values is doubled; exponents 0 and 1 give subnormal numbers."""
    exponent = get_u8(row + b * 17)
    put_i32(to, (exponent - 1) << 23 if exponent >= 2 else 0x00200000 << exponent)


@inner
def _pack_bytes(block: int, to: int, stride: int, scales: int) -> None:
    """Copy sixteen one-byte scales unchanged."""
    for quarter in range(4):
        put_i32(to + quarter * stride, get_i32(block + scales + 4 * quarter))


@inner
def _pack_scales_q2_k(block: int, to: int, stride: int) -> None:
    _pack_bytes(block, to, stride, 0)


@inner
def _pack_scales_q3_k(block: int, to: int, stride: int) -> None:
    """Widen sixteen 6-bit scales, which are stored with a bias of 32.

    They take twelve bytes: the first eight hold the lower four bits of two scales each, the last four the upper two
    bits of four scales each.
    """
    upper = get_i32(block + 104)
    for quarter in range(4):
        lower = get_i32(block + 96 + quarter % 2 * 4) >> (quarter // 2 * 4) & _NIBBLES
        scales = lower | (upper >> (2 * quarter) & _TWO_BITS) << 4
        negative = ~scales & _FIFTH_BIT
        put_i32(to + quarter * stride, scales & _FIVE_BITS | negative * 7)


@inner
def _pack_scales_q6_k(block: int, to: int, stride: int) -> None:
    _pack_bytes(block, to, stride, 192)


@inner
def _pack_six_bits(block: int, to: int, stride: int) -> None:
    """Widen eight 6-bit scales and eight 6-bit minima.

    They take twelve bytes: the first four hold the first four scales and the next four the first four minima, in six
    bits each. The last four hold the lower four bits of the other scales and minima, whose upper two bits are the upper
    two bits of the first eight bytes.
    """
    first, second, rest = get_i32(block + 4), get_i32(block + 8), get_i32(block + 12)
    put_i32(to, first & _SIX_BITS)
    put_i32(to + stride, rest & _NIBBLES | first >> 2 & _UPPER_BITS)
    put_i32(to + 64, second & _SIX_BITS)
    put_i32(to + stride + 64, rest >> 4 & _NIBBLES | second >> 2 & _UPPER_BITS)


_BLOCKS_32 = (
    Blocks32(name="Q8_0", source=Source(nbytes=34, planes=[Plane(2, 8, 32)], halves=(0,)), codec=BYTES),
    Blocks32(name="Q4_0", source=Source(nbytes=18, planes=[Plane(2, 4, 16)], halves=(0,)), codec=NIBBLES, bias=8),
    Blocks32(name="Q4_1", source=Source(nbytes=20, planes=[Plane(4, 4, 16)], halves=(0, 2)), codec=NIBBLES, minimum=2),
    Blocks32(
        name="Q5_0",
        source=Source(nbytes=22, planes=[Plane(6, 4, 16), Plane(2, 1, 1, 4)], halves=(0,)),
        codec=FIVE_BITS,
        bias=16,
    ),
    Blocks32(
        name="Q5_1",
        source=Source(nbytes=24, planes=[Plane(8, 4, 16), Plane(4, 1, 1, 4)], halves=(0, 2)),
        codec=FIVE_BITS,
        minimum=2,
    ),
    Blocks32(name="IQ4_NL", source=Source(nbytes=18, planes=[Plane(2, 4, 16)], halves=(0,)), codec=_IQ4),
    Blocks32(
        name="IQ4_XS",
        source=Source(nbytes=136, values=256, planes=[Plane(8, 4, 16)], halves=(0,)),
        codec=_IQ4,
        put_scale=_put_scale_iq4_xs,
        blocks_together=8,
    ),
    Blocks32(
        name="MXFP4",
        source=Source(nbytes=17, planes=[Plane(1, 4, 16)], exponents=(0,)),
        codec=_FP4,
        put_scale=_put_scale_mxfp4,
    ),
)
_SCALED_BLOCKS = (
    ScaledBlocks(name="NVFP4", source=Source(nbytes=36, values=64, planes=[Plane(4, 4, 8)]), codec=_FP4, span=16),
    ScaledBlocks(
        name="Q1_0",
        source=Source(nbytes=18, values=128, planes=[Plane(2, 1, 1, 1)], halves=(0,)),
        codec=SIGN_BITS,
        span=128,
        bias=1,
    ),
    ScaledBlocks(
        name="Q2_0",
        source=Source(nbytes=18, values=64, planes=[Plane(2, 2, 1)], halves=(0,)),
        codec=EIGHT_OF_TWO_BITS,
        span=64,
        bias=1,
    ),
)
_SUPER_BLOCKS = (
    SuperBlock(
        name="Q2_K",
        source=Source(nbytes=84, values=256, planes=[Plane(16, 2, 32)], halves=(80, 82)),
        codec=TWO_BITS,
        sub_block=16,
        pack_scales=_pack_scales_q2_k,
        minima=Minima.NIBBLES,
        d=80,
        dmin=82,
    ),
    SuperBlock(
        name="Q3_K",
        source=Source(nbytes=110, values=256, planes=[Plane(32, 2, 32, 3), Plane(0, 1, 32, 5)], halves=(108,)),
        codec=THREE_BITS,
        sub_block=16,
        pack_scales=_pack_scales_q3_k,
        bias=32,
        unit=8,
        d=108,
    ),
    SuperBlock(
        name="Q4_K",
        source=Source(nbytes=144, values=256, planes=[Plane(16, 4, 32)], halves=(0, 2)),
        codec=NIBBLES,
        sub_block=32,
        pack_scales=_pack_six_bits,
        minima=Minima.BYTES,
        d=0,
        dmin=2,
    ),
    SuperBlock(
        name="Q5_K",
        source=Source(nbytes=176, values=256, planes=[Plane(48, 4, 32), Plane(16, 1, 32, 4)], halves=(0, 2)),
        codec=FIVE_BITS,
        sub_block=32,
        pack_scales=_pack_six_bits,
        minima=Minima.BYTES,
        d=0,
        dmin=2,
    ),
    SuperBlock(
        name="Q6_K",
        source=Source(nbytes=210, values=256, planes=[Plane(0, 4, 64), Plane(128, 2, 32, 4)], halves=(208,)),
        codec=SIX_BITS,
        sub_block=16,
        pack_scales=_pack_scales_q6_k,
        bias=32,
        d=208,
    ),
)


def _of_blocks(layout: Blocks32 | ScaledBlocks, kind: ModuleType, block: int) -> WeightFormat:
    """kind: the module with the layout's functions. block: values per block."""
    tile = kind.tile_adder(layout)
    return WeightFormat(
        name=layout.name,
        form=Form.BLOCKS_32,
        source=layout.source,
        group_rows=32,
        block=block,
        group_block_bytes=layout.nbytes,
        pack_row=kind.row_packer(layout),
        unpack_row=kind.row_unpacker(layout),
        tiles=[plain_tiles(tile, width, 2) for width in TILE_WIDTHS],
    )


def _of_super_blocks(layout: SuperBlock) -> WeightFormat:
    tile, fewest = super_blocks.tile_adder(layout), POLICY.panel_tiles
    tiles = [plain_tiles(tile, width, 1) for width in TILE_WIDTHS]
    if fewest is not None:
        tiles[1:] = [panel_tiles(layout, few, fewest) for few in tiles[1:]]
    return WeightFormat(
        name=layout.name,
        form=Form.BLOCKS_256,
        source=layout.source,
        group_rows=16,
        block=256,
        group_block_bytes=layout.nbytes,
        pack_row=super_blocks.row_packer(layout),
        unpack_row=super_blocks.row_unpacker(layout),
        tiles=tiles,
    )


def _of_transposed(layout: Transposed) -> WeightFormat:
    return WeightFormat(
        name=layout.name,
        form=Form.BLOCKS_256,
        source=layout.source,
        group_rows=16,
        block=256,
        group_block_bytes=layout.nbytes,
        pack_row=transposed.row_packer(layout),
        unpack_row=transposed.row_unpacker(layout),
        tiles=[transposed.tiles(layout, width) for width in TILE_WIDTHS],
    )


def _of_floats(layout: Floats) -> WeightFormat:
    tile = floats.tile_adder(layout)
    return WeightFormat(
        name=layout.name,
        form=Form.FLOATS,
        source=layout.source,
        group_rows=32,
        block=1,
        group_block_bytes=32 * layout.value_bytes,
        pack_row=floats.row_packer(layout),
        unpack_row=floats.row_unpacker(layout),
        tiles=[plain_tiles(tile, width, 2) for width in TILE_WIDTHS],
    )


def _of_words(layout: Floats) -> WeightFormat:
    return WeightFormat(
        name=f"{layout.name}_WORDS",
        form=Form.WORDS,
        source=layout.source,
        group_rows=32,
        block=BLOCK,
        group_block_bytes=words.BLOCK_BYTES,
        pack_row=words.row_packer(layout),
        unpack_row=words.unpack_row,
        tiles=[plain_tiles(words.tile, width, 2) for width in TILE_WIDTHS],
    )


class _Formats(Mapping[str, WeightFormat]):
    """Formats by name. A format is created, and its kernels declared, on first access: a model uses only a few."""

    def __init__(self, makers: Mapping[str, Callable[[], WeightFormat]]) -> None:
        self._makers = makers
        self._made: dict[str, WeightFormat] = {}

    def __getitem__(self, name: str) -> WeightFormat:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = _Formats(
    {layout.name: partial(_of_floats, layout) for layout in floats.FLOATS}
    | {layout.name: partial(_of_blocks, layout, blocks_32, 32) for layout in _BLOCKS_32}
    | {layout.name: partial(_of_blocks, layout, scaled_blocks, layout.values) for layout in _SCALED_BLOCKS}
    | {layout.name: partial(_of_super_blocks, layout) for layout in _SUPER_BLOCKS}
    | {layout.name: partial(_of_transposed, layout) for layout in grids.TRANSPOSED}
)
WORD_FORMATS: Mapping[str, WeightFormat] = _Formats(
    {layout.name: partial(_of_words, layout) for layout in floats.FLOATS if layout.value_bytes == 2}
)
"""Formats that round weights to words, by the name of the GGUF type that they are packed from."""


def format_named(name: str) -> WeightFormat:
    """The format of this name. Raises KeyError for another name."""
    source = name.removesuffix("_WORDS")
    return WEIGHT_FORMATS[name] if source == name else WORD_FORMATS[source]
