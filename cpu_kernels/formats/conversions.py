"""The packed format that each block type is computed in: its own, of all that have kernels."""

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

    convert takes uint8[rows, bytes of a row] and returns the same of the native type.
    """

    weight_format: WeightFormat
    convert: Converter


def native_form(type_name: str) -> NativeForm:
    """Return the format in which a block type (its GGUF name) is computed.

    Raises ValueError for a type that has no kernels.
    """
    if type_name not in WEIGHT_FORMATS:
        raise ValueError(f"no kernels for weights of type {type_name}")
    return NativeForm(WEIGHT_FORMATS[type_name], _unchanged)


def _unchanged(raw: Bytes) -> Bytes:
    return raw
