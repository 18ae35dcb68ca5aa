"""Memory that vectors can be loaded from whole: aligned to 64 bytes."""

import math

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
    """An array of zeros whose first byte is aligned; pages are taken from the system when first touched."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + size].view(kind).reshape(shape)
