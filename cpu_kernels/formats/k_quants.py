"""K-quants: super-blocks with the layouts and tables of ggml (ggml-common.h)."""

from cpu_kernels.declarations import inner
from cpu_kernels.formats import panels
from cpu_kernels.formats.codec import FIVE_BITS, NIBBLES, SIX_BITS, THREE_BITS, TWO_BITS
from cpu_kernels.formats.source import Plane, Source
from cpu_kernels.formats.super_blocks import Minima, SuperBlock
from cpu_kernels.isa import POLICY
from cpu_kernels.matmul import Tiles
from cpu_kernels.simd.vectors import get_i32, put_i32

_SIX_BITS, _UPPER_BITS, _NIBBLES = 0x3F3F3F3F, 0x30303030, 0x0F0F0F0F
_TWO_BITS, _FIVE_BITS, _FIFTH_BIT = 0x03030303, 0x1F1F1F1F, 0x20202020


class KQuant(SuperBlock):
    """A K-quant, which is multiplied by panels where that is faster."""

    def tiles(self, width: int) -> Tiles:
        """Tiles that share panels if there are many, or that each unpack the weights."""
        fewest = POLICY.panel_tiles
        return (
            super().tiles(width) if width == 1 or fewest is None else panels.tiles(self, super().tiles(width), fewest)
        )


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


FORMATS = {
    each.name: each
    for each in (
        KQuant(
            name="Q2_K",
            source=Source(nbytes=84, values=256, planes=[Plane(16, 2, 32)], halves=(80, 82)),
            codec=TWO_BITS,
            sub_block=16,
            pack_scales=_pack_scales_q2_k,
            minima=Minima.NIBBLES,
            d=80,
            dmin=82,
        ),
        KQuant(
            name="Q3_K",
            source=Source(nbytes=110, values=256, planes=[Plane(32, 2, 32, 3), Plane(0, 1, 32, 5)], halves=(108,)),
            codec=THREE_BITS,
            sub_block=16,
            pack_scales=_pack_scales_q3_k,
            bias=32,
            unit=8,
            d=108,
        ),
        KQuant(
            name="Q4_K",
            source=Source(nbytes=144, values=256, planes=[Plane(16, 4, 32)], halves=(0, 2)),
            codec=NIBBLES,
            sub_block=32,
            pack_scales=_pack_six_bits,
            minima=Minima.BYTES,
            d=0,
            dmin=2,
        ),
        KQuant(
            name="Q5_K",
            source=Source(nbytes=176, values=256, planes=[Plane(48, 4, 32), Plane(16, 1, 32, 4)], halves=(0, 2)),
            codec=FIVE_BITS,
            sub_block=32,
            pack_scales=_pack_six_bits,
            minima=Minima.BYTES,
            d=0,
            dmin=2,
        ),
        KQuant(
            name="Q6_K",
            source=Source(nbytes=210, values=256, planes=[Plane(0, 4, 64), Plane(128, 2, 32, 4)], halves=(208,)),
            codec=SIX_BITS,
            sub_block=16,
            pack_scales=_pack_scales_q6_k,
            bias=32,
            d=208,
        ),
    )
}
