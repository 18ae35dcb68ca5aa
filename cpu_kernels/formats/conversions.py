"""Block types without kernels of their own: which native format holds their values exactly, and how they get there.

The ternary TQ1_0 and TQ2_0 become Q4_0, and every other type that gguf.quants can decode becomes F32: exact, but far larger than the file (IQ2_XXS 15 times).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.formats.weight_format import WeightFormat

Bytes = NDArray[np.uint8]
Converter = Callable[[Bytes], Bytes]


class NativeForm(NamedTuple):
    """The packed format for a block type, and the conversion of its raw rows to what that format packs.

    convert takes uint8[rows, bytes of a row] and returns the same of the native type: the input itself where it is
    that type, else a new array. It needs several times the result's memory for a moment, so give it a few rows a time.
    """

    weight_format: WeightFormat
    convert: Converter


def native_form(type_name: str) -> NativeForm:
    """Return the format in which a block type (its GGUF name) is computed.

    Raises ValueError for a type that is neither native nor known to gguf.quants.
    """
    if type_name in WEIGHT_FORMATS:
        return NativeForm(WEIGHT_FORMATS[type_name], _unchanged)
    if type_name in _CONVERSIONS:
        target, convert = _CONVERSIONS[type_name]
        return NativeForm(WEIGHT_FORMATS[target], convert)
    to_f32 = _to_f32(type_name) if type_name in _DECODABLE else None
    if to_f32 is None:
        raise ValueError(f"no kernels for weights of type {type_name}, and no way to convert them")
    return NativeForm(WEIGHT_FORMATS["F32"], to_f32)


def _unchanged(raw: Bytes) -> Bytes:
    return raw


def _to_f32(type_name: str) -> Converter | None:
    import gguf  # takes long, and few files need it

    block_type = gguf.GGMLQuantizationType.__members__.get(type_name)
    if block_type is None:
        return None

    def convert(raw: Bytes) -> Bytes:
        values: NDArray[np.float32] = gguf.quants.dequantize(raw, block_type)
        return np.ascontiguousarray(values, dtype=np.float32).view(np.uint8)

    return convert


def _ternary_to_q4_0(values: NDArray[Any], d: Bytes, rows: int) -> Bytes:
    """values: integers[blocks, 256], 0, 1, 2 for -1, 0, 1; d: the blocks' f16 scale. Eight blocks of Q4_0 for each."""
    nibbles = (values.astype(np.uint8) + np.uint8(7)).reshape(-1, 8, 2, 16)
    packed = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    scales = np.broadcast_to(d[:, None, :], (len(d), 8, 2))
    return np.concatenate([scales, packed], axis=2).reshape(rows, -1)


def _tq2_0_to_q4_0(raw: Bytes) -> Bytes:
    blocks = raw.reshape(-1, 66)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    values = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts) & 3
    return _ternary_to_q4_0(values.reshape(-1, 256), blocks[:, 64:], len(raw))


def _tq1_0_to_q4_0(raw: Bytes) -> Bytes:
    """Five (or, in the last four bytes, four) base-3 digits a byte, most significant first, as a fraction of 256."""
    blocks = raw.reshape(-1, 54)
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8).reshape(1, 5, 1)
    pieces = [
        (piece[:, None, :] * powers[:, :digits]).reshape(len(blocks), -1)
        for piece, digits in ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    ]
    digits = np.concatenate(pieces, axis=1).astype(np.uint16) * 3 >> 8
    return _ternary_to_q4_0(digits, blocks[:, 52:], len(raw))


_CONVERSIONS: dict[str, tuple[str, Converter]] = {
    "TQ1_0": ("Q4_0", _tq1_0_to_q4_0),
    "TQ2_0": ("Q4_0", _tq2_0_to_q4_0),
}
_DECODABLE = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4"})
