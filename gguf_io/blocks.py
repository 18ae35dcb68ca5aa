"""Every block format that a GGUF tensor can have, and its values as float32.

Ids, items and bytes per block are those of ggml's type traits (ggml/src/ggml.c, ggml-common.h).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BlockType:
    """One storage format: every `items` consecutive values of a row take `bytes` bytes."""

    type_id: int
    name: str
    items: int
    bytes: int

    def row_bytes(self, row_items: int) -> int:
        """Bytes of a row of `row_items` values, which must be a multiple of `items`."""
        return row_items // self.items * self.bytes


_ROWS = (
    BlockType(0, "F32", 1, 4),
    BlockType(1, "F16", 1, 2),
    BlockType(2, "Q4_0", 32, 18),
    BlockType(3, "Q4_1", 32, 20),
    BlockType(6, "Q5_0", 32, 22),
    BlockType(7, "Q5_1", 32, 24),
    BlockType(8, "Q8_0", 32, 34),
    BlockType(9, "Q8_1", 32, 36),  # gguf.constants says 40, as before 2024; ggml keeps d and s as float16
    BlockType(10, "Q2_K", 256, 84),
    BlockType(11, "Q3_K", 256, 110),
    BlockType(12, "Q4_K", 256, 144),
    BlockType(13, "Q5_K", 256, 176),
    BlockType(14, "Q6_K", 256, 210),
    BlockType(15, "Q8_K", 256, 292),
    BlockType(16, "IQ2_XXS", 256, 66),
    BlockType(17, "IQ2_XS", 256, 74),
    BlockType(18, "IQ3_XXS", 256, 98),
    BlockType(19, "IQ1_S", 256, 50),
    BlockType(20, "IQ4_NL", 32, 18),
    BlockType(21, "IQ3_S", 256, 110),
    BlockType(22, "IQ2_S", 256, 82),
    BlockType(23, "IQ4_XS", 256, 136),
    BlockType(24, "I8", 1, 1),
    BlockType(25, "I16", 1, 2),
    BlockType(26, "I32", 1, 4),
    BlockType(27, "I64", 1, 8),
    BlockType(28, "F64", 1, 8),
    BlockType(29, "IQ1_M", 256, 56),
    BlockType(30, "BF16", 1, 2),
    BlockType(34, "TQ1_0", 256, 54),
    BlockType(35, "TQ2_0", 256, 66),
    BlockType(39, "MXFP4", 32, 17),
    BlockType(40, "NVFP4", 64, 36),
    BlockType(41, "Q1_0", 128, 18),
    BlockType(42, "Q2_0", 64, 18),
)

BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType({row.type_id: row for row in _ROWS})
"""All formats by type id. Ids that are absent (4, 5, 31-33, 36-38) were withdrawn from the format."""

_PLAIN = {"F32": "<f4", "F16": "<f2", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}

# Fields of the blocks that gguf.quants does not read, as in ggml-common.h.
_SCALED_INT8 = {
    "Q8_1": np.dtype([("d", "<f2"), ("s", "<f2"), ("qs", "i1", 32)]),
    "Q8_K": np.dtype([("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)]),
}
_SCALED_BITS = {
    "Q1_0": np.dtype([("d", "<f2"), ("bits", "u1", 16)]),
    "Q2_0": np.dtype([("d", "<f2"), ("bits", "u1", 16)]),
}


def dequantize(data: NDArray[np.uint8], block_type: BlockType) -> NDArray[np.float32]:
    """The values of whole rows as a new float32 array.

    data: uint8, C-contiguous, shape (..., row_bytes). Returns shape (..., row_items). Values equal gguf.quants to
    the bit for the formats that it supports. A damaged scale yields NaN or infinity, without a warning.
    """
    if data.shape[-1] % block_type.bytes:
        raise ValueError(f"{block_type.name} rows are multiples of {block_type.bytes} bytes, not {data.shape[-1]}")
    shape = (*data.shape[:-1], data.shape[-1] // block_type.bytes * block_type.items)
    with np.errstate(invalid="ignore", over="ignore"):
        return _values(data, block_type).reshape(shape)


def _values(data: NDArray[np.uint8], block_type: BlockType) -> NDArray[np.float32]:
    name = block_type.name
    if name in _PLAIN:
        return data.view(_PLAIN[name]).astype(np.float32)
    if name in _SCALED_INT8:
        blocks = data.view(_SCALED_INT8[name])
        return blocks["d"][..., None].astype(np.float32) * blocks["qs"].astype(np.float32)
    if name in _SCALED_BITS:
        blocks = data.view(_SCALED_BITS[name])
        bits = np.unpackbits(blocks["bits"], axis=-1, bitorder="little").astype(np.float32)
        numbers = bits * 2 - 1 if name == "Q1_0" else bits[..., ::2] + bits[..., 1::2] * 2 - 1
        return blocks["d"][..., None].astype(np.float32) * numbers
    from gguf import GGMLQuantizationType, quants  # here: it imports sentencepiece and yaml, which headers do not need

    values: NDArray[np.float32] = quants.dequantize(data, GGMLQuantizationType(block_type.type_id))
    return values
