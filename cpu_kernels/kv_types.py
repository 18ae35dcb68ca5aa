"""The storage types of keys and values, and the layout of a page of 16 tokens of one head in each.

For keys, a kernel's vector is the sixteen tokens of a page; for values, sixteen values of a head. D is the size of a
head, padded to a multiple of 32, in image encoders of 16, which only i16 allows.

i16    16-bit words times a factor (scale) in single precision, one for each token's key and one for its value
       (cpu_kernels.attention_i16). Words come in pairs, because one instruction multiplies two pairs and adds the
       products: keys [D / 2][token][2], values [D / 16][token / 2][16][2]. Then the factors, [token].
f16    Rows of latents in half precision: keys [D][token].
q8_0   32 values of a token share a scale in half precision, their largest magnitude / 127, as in a Q8_0 block. The
       values are signed bytes, laid out like the words of i16. Then the scales, [D / 32][token].
q4_0   Keys and values go through a Hadamard transform (cpu_kernels.attention_q4_0), and 32 of them are stored like an
       IQ4_NL block: four bits select one of 16 levels, times a scale in half precision. A 32-bit lane holds eight
       numbers, two of which are extracted at a time, from the lower and the upper half of the lane: keys
       [D / 8][token], numbers 2 i and 2 i + 1 at bits 4 i and 16 + 4 i; values [D / 32][token / 4][16], whose bytes
       belong to tokens 0, 2, 1 and 3 and hold value i of the 32 in their lower and value i + 16 in their upper half, so
       that no two tokens share a byte. Then the scales, [D / 32][token].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_TOKENS = 16
SCALED_TOGETHER = 32


class KVType(StrEnum):
    """Storage type of keys or values."""

    I16 = "i16"
    F16 = "f16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"


OF_HEADS = (KVType.I16, KVType.Q8_0, KVType.Q4_0)
OF_LATENTS = (KVType.F16, KVType.Q8_0)
"""The types of heads' keys and values, and of latents, which are both key and value."""


@dataclass(frozen=True)
class Plane:
    """An array in a page, at an offset in bytes. token_axes together index the page's tokens."""

    offset: int
    dtype: type[np.generic]
    shape: tuple[int, ...]
    token_axes: tuple[int, ...]

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of one token's elements."""
        return tuple(size for axis, size in enumerate(self.shape) if axis not in self.token_axes)

    @property
    def nbytes(self) -> int:
        """Bytes in a page."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def tokens(self, pages: NDArray[np.uint8]) -> NDArray[np.generic]:
        """The tokens' elements in pages [layer][head][page][bytes], as [layer][head][token][...]."""
        layers, heads, count, _ = pages.shape
        return self._by_token(pages).reshape(layers, heads, count * PAGE_TOKENS, *self.token_shape)

    def put(self, page: NDArray[np.uint8], slots: NDArray[np.intp], tokens: NDArray[np.generic]) -> None:
        """Write the elements of tokens, [layer][head][token][...], into these slots of page [layer][head][bytes]."""
        places: Any = np.unravel_index(slots, [self.shape[axis] for axis in self.token_axes])
        self._by_token(page)[:, :, *places] = tokens

    def _by_token(self, pages: NDArray[np.uint8]) -> NDArray[np.generic]:
        """A view of the plane in pages [...][bytes] with the token axes first."""
        part = pages[..., self.offset : self.offset + self.nbytes].view(self.dtype)
        lead = pages.ndim - 1
        axes = [lead + axis for axis in self.token_axes]
        return np.moveaxis(part.reshape(*pages.shape[:-1], *self.shape), axes, range(lead, lead + len(axes)))


@dataclass(frozen=True)
class PageLayout:
    """The planes of a page of keys or of values, in the order of their offsets."""

    planes: Sequence[Plane]

    @property
    def page_bytes(self) -> int:
        """Bytes of one head's page."""
        last = self.planes[-1]
        return last.offset + last.nbytes


def key_layout(kind: KVType, padded: int) -> PageLayout:
    """Layout of a page of keys for heads of `padded` (D) values."""
    if kind is KVType.F16:
        return PageLayout([Plane(0, np.float16, (padded, PAGE_TOKENS), (1,))])
    if kind is KVType.I16:
        return PageLayout([Plane(0, np.uint32, (padded // 2, PAGE_TOKENS), (1,)), _factors(padded)])
    if kind is KVType.Q4_0:
        return PageLayout([Plane(0, np.uint32, (padded // 8, PAGE_TOKENS), (1,)), _scales(padded, 4)])
    return PageLayout([Plane(0, np.uint16, (padded // 2, PAGE_TOKENS), (1,)), _scales(padded, 8)])


def value_layout(kind: KVType, padded: int) -> PageLayout:
    """Layout of a page of values for heads of `padded` (D) values."""
    if kind is KVType.I16:
        words = Plane(0, np.int16, (padded // 16, PAGE_TOKENS // 2, 16, 2), (1, 3))
        return PageLayout([words, _factors(padded)])
    if kind is KVType.Q4_0:
        of_bytes = Plane(0, np.uint8, (padded // 32, PAGE_TOKENS // 4, 16, 2, 2), (1, 4, 3))
        return PageLayout([of_bytes, _scales(padded, 4)])
    return PageLayout([Plane(0, np.int8, (padded // 16, PAGE_TOKENS // 2, 16, 2), (1, 3)), _scales(padded, 8)])


def _factors(padded: int) -> Plane:
    return Plane(padded * PAGE_TOKENS * 2, np.float32, (PAGE_TOKENS,), (0,))


def _scales(padded: int, bits: int) -> Plane:
    return Plane(padded * PAGE_TOKENS * bits // 8, np.float16, (padded // SCALED_TOGETHER, PAGE_TOKENS), (1,))
