"""Block layouts in GGUF files, as tables of which bits of which bytes form a value (ggml-common.h)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.declarations import inner
from cpu_kernels.simd.vectors import get_i32, get_u8


class Plane(NamedTuple):
    """A bit field of all values of a block.

    offset: of the field's bytes in the block. bits: per value. position: of the field's lowest bit in the value. run:
    number of consecutive values in consecutive bytes; the next run uses the next higher bits of the same bytes until
    they are full. A run of 1 is a plain bit string of values of one or two bits, lowest first.
    """

    offset: int
    bits: int
    run: int
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class Source:
    """Layout of a block of `values` values in `nbytes` bytes. Blocks of one value are floats.

    planes: the values' bit fields. halves: offsets of factors in half precision. exponents: offsets of exponent bytes.
    """

    nbytes: int
    planes: Sequence[Plane] = ()
    values: int = 32
    halves: tuple[int, ...] = ()
    exponents: tuple[int, ...] = ()

    def random(self, random: "np.random.Generator", blocks: int) -> NDArray[np.uint8]:
        """Blocks of random bits with factors (or floats) of a realistic magnitude: uint8[blocks, nbytes]."""
        if self.values == 1:
            # The upper half of a single-precision float is an ordinary number in 16-bit types too.
            floats = random.standard_normal((blocks, 1)).astype(np.float32)
            return np.ascontiguousarray(floats.view(np.uint8)[:, 4 - self.nbytes :])
        raw = random.integers(0, 256, (blocks, self.nbytes), np.uint8)
        for offset in self.halves:
            raw[:, offset : offset + 2] = (random.standard_normal((blocks, 1)) / 64).astype(np.float16).view(np.uint8)
        for offset in self.exponents:
            raw[:, offset] = random.integers(115, 130, blocks)
        return raw

    def reader(self) -> Any:
        """Return four(block, i), which returns values i..i+3 of the block at an address as the bytes of an integer."""
        low, low_position = _reader(self.planes[0]), self.planes[0].position

        @inner
        def one_plane(block: int, i: int) -> int:
            return int(low(block, i) << low_position)

        if len(self.planes) == 1:
            return one_plane
        high, position = _reader(self.planes[1]), self.planes[1].position

        @inner
        def four(block: int, i: int) -> int:
            return int(low(block, i) << low_position | high(block, i) << position)

        return four


def _reader(plane: Plane) -> Any:
    offset, bits, run = plane.offset, plane.bits, plane.run
    chunk, mask = run * (8 // bits), ((1 << bits) - 1) * 0x01010101

    @inner
    def bytes_of_block(block: int, i: int) -> int:
        return int(get_i32(block + offset + i))

    @inner
    def bits_of_run(block: int, i: int) -> int:
        place = block + offset + i // chunk * run + i % run
        return int(get_i32(place) >> (i % chunk // run * bits) & mask)

    @inner
    def single_bits(block: int, i: int) -> int:
        return int((get_u8(block + offset + i // 8) >> (i % 8) & 15) * 0x00204081 & 0x01010101)

    @inner
    def pairs_of_bits(block: int, i: int) -> int:
        pairs = get_u8(block + offset + i // 4)
        pairs = (pairs | pairs << 12) & 0x000F000F
        return int((pairs | pairs << 6) & 0x03030303)

    if bits == 8:
        return bytes_of_block
    if run == 1 and bits == 2:
        return pairs_of_bits
    return single_bits if run == 1 else bits_of_run
