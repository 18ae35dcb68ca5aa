"""Block types without kernels of their own: which native format holds their values exactly, and how they get there.

NVFP4 becomes F32: exact, but far larger than the file.
"""

from collections.abc import Callable
from typing import NamedTuple

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


_DECODABLE = frozenset({"NVFP4"})
