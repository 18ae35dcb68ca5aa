"""Block types without kernels of their own: which native format holds their values exactly, and how they get there.

NVFP4 becomes BF16: exact, but 3.6 times as large as in the file.
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

    Raises ValueError for a type that is neither native nor known here.
    """
    if type_name in WEIGHT_FORMATS:
        return NativeForm(WEIGHT_FORMATS[type_name], _unchanged)
    if type_name == "NVFP4":
        return NativeForm(WEIGHT_FORMATS["BF16"], _nvfp4_to_bf16)
    raise ValueError(f"no kernels for weights of type {type_name}, and no way to convert them")


def _unchanged(raw: Bytes) -> Bytes:
    return raw


def _nvfp4_to_bf16(raw: Bytes) -> Bytes:
    """A scale has four significant bits and a value two: their product fits into the upper half of single precision."""
    import gguf  # takes long, and few files need it

    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.NVFP4)
    single = np.ascontiguousarray(values, dtype="<f4").view("<u2").reshape(len(raw), -1)
    return np.ascontiguousarray(single[:, 1::2]).view(np.uint8)
