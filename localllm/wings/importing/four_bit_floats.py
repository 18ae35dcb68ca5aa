"""Blocks of four-bit floats that GGUF also has, MXFP4 and NVFP4. They are kept, with their values reordered.

Sources: OCP's Microscaling Formats; transformers (integrations/mxfp4.py); compressed-tensors 0.20 (compressors/nvfp4);
ggml-common.h.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.text import shortened
from localllm.wings.importing.checkpoint import StoredTensor
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.matrices import Floats, Numbers

Codes = NDArray[np.uint8]
_SPAN = 16  # values of NVFP4 that share a scale
_TOGETHER = 64  # values of an NVFP4 block in GGUF
_SIGN, _NOT_A_NUMBER = 0x80, 0x7F


@dataclass(frozen=True)
class Mxfp4:
    """OCP's MXFP4: 32 four-bit values share an exponent. packed: ... x rows x blocks of a row x 16 bytes."""

    packed: StoredTensor
    scales: StoredTensor
    exact: str = "MXFP4"
    factor: float = 1.0

    def __post_init__(self) -> None:
        fit = len(self.packed.shape) > 2 and self.packed.shape[-1] == 16 and self.packed.shape[:-1] == self.scales.shape
        if not fit or {self.packed.dtype, self.scales.dtype} != {"U8"}:
            raise ValueError("blocks without exponents")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-2], self.packed.shape[-2] * 32)

    def blocks(self, rows: Numbers) -> Codes:
        """GGUF's blocks: the exponent, then the values."""
        count = self.packed.shape[-2]
        nibbles = _half_a_span_apart(self.packed.raw().reshape(-1, count, 16)[rows], 32)
        exponents = self.scales.raw().reshape(-1, count, 1)[rows]
        return np.concatenate([exponents, nibbles], axis=-1).reshape(len(rows), -1)

    def floats(self, rows: Numbers) -> Floats:
        from gguf import GGMLQuantizationType, quants

        return np.asarray(quants.dequantize(self.blocks(rows), GGMLQuantizationType.MXFP4), np.float32)


@dataclass(frozen=True)
class Nvfp4:
    """NVFP4: 16 four-bit values share an eight-bit scale. packed: rows x pairs. factor: of the whole matrix."""

    packed: StoredTensor
    scales: StoredTensor
    factor: float

    def __post_init__(self) -> None:
        rows, width = self.shape
        if self.packed.dtype != "U8" or self.scales.dtype != "F8_E4M3" or self.scales.shape != (rows, width // _SPAN):
            raise ValueError("values without scales")

    @property
    def shape(self) -> tuple[int, ...]:
        rows, pairs = self.packed.shape
        return rows, 2 * pairs

    @property
    def exact(self) -> str:
        return "F16" if self.shape[-1] % _TOGETHER else "NVFP4"

    def blocks(self, rows: Numbers) -> Codes:
        """GGUF's blocks: four scales, then the values. Raises CheckpointError for scales that are negative or NaN."""
        pairs, scales = self.packed.raw()[rows], self.scales.raw()[rows]
        magnitudes = scales & ~np.uint8(_SIGN)
        if np.any(magnitudes == _NOT_A_NUMBER) or np.any(scales > _SIGN):
            raise CheckpointError(
                f"{self.scales.path}: {shortened(self.scales.name)}: a scale is negative or no number."
            )
        nibbles = _half_a_span_apart(pairs, _SPAN)
        missing = -magnitudes.shape[1] % (_TOGETHER // _SPAN)  # zeros fill the last block
        magnitudes = np.pad(magnitudes, ((0, 0), (0, missing)))
        nibbles = np.pad(nibbles, ((0, 0), (0, missing), (0, 0)))
        parts = magnitudes.reshape(len(rows), -1, _TOGETHER // _SPAN), nibbles.reshape(len(rows), -1, _TOGETHER // 2)
        return np.concatenate(parts, axis=-1).reshape(len(rows), -1)

    def floats(self, rows: Numbers) -> Floats:
        from gguf import GGMLQuantizationType, quants

        values = quants.dequantize(self.blocks(rows), GGMLQuantizationType.NVFP4)[:, : self.shape[1]]
        return np.asarray(values * np.float32(self.factor), np.float32)


def _half_a_span_apart(pairs: Codes, span: int) -> Codes:
    """Rows of bytes with two neighbouring values each, as rows x spans x bytes with values half a span apart."""
    values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1, span)
    return np.asarray(values[..., : span // 2] | values[..., span // 2 :] << 4, np.uint8)
