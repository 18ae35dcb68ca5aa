"""Memory that vectors can be loaded from whole, aligned to 64 bytes. Pages come from the system when first touched.

The system's pages are small (4 KiB) or huge (2 MiB): huge ones cost fewer faults and less translation where all of an
array is used, small ones take no more than what is used where that is little or scattered.
"""

import contextlib
import math
import mmap

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_BLOCK = 64 << 20
_LARGE = 1 << 20


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
    """An array of zeros whose first byte is aligned. Of a large one, what is never touched takes no memory.

    Raises MemoryError.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    return _zeros(size)[:size].view(kind).reshape(shape)


def zeros_from_the_front(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Zero bytes, aligned, of which what is used lies at the front: of large ones huge pages, as they are touched."""
    size = math.prod(shape)
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.asarray(aligned_zeros(shape, np.uint8), np.uint8)
    raw = _aligned(_mapped(size + _HUGE_PAGE, mmap.MADV_HUGEPAGE), _HUGE_PAGE)
    return raw[:size].reshape(shape)


def _mapped(size: int, advice: int) -> NDArray[np.uint8]:
    """Bytes fresh from the system, with advice on its pages. Raises MemoryError."""
    try:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system gave no {size:,} bytes") from error
    # A system that knows no huge pages refuses what is but advice.
    with contextlib.suppress(OSError):
        pages.madvise(advice)
    return np.frombuffer(pages, np.uint8)


def _zeros(size: int) -> NDArray[np.uint8]:
    """At least so many bytes; large ones in small pages, fresh from the system where it can be asked for such.

    The C library would take them from memory that was freed before, and have to fill it with zeros.
    """
    if size < _LARGE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return _aligned(np.zeros(size + ALIGNMENT, np.uint8), ALIGNMENT)
    return _mapped(size, mmap.MADV_NOHUGEPAGE)


class Arena:
    """Memory for arrays that live and die together: side by side in blocks of huge pages."""

    def __init__(self) -> None:
        self._rest: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def zeros(self, size: int) -> NDArray[np.uint8]:
        """`size` zero bytes, aligned. They keep their block alive."""
        room = -(-size // ALIGNMENT) * ALIGNMENT
        if room > len(self._rest):
            # NumPy asks the system for huge pages for arrays of this size.
            block = _aligned(np.zeros(max(room, _BLOCK) + _HUGE_PAGE, np.uint8), _HUGE_PAGE)
            if len(block) - room < len(self._rest):
                return block[:size]
            self._rest = block
        taken, self._rest = self._rest[:size], self._rest[room:]
        return taken


def _aligned(raw: NDArray[np.uint8], alignment: int) -> NDArray[np.uint8]:
    return raw[-raw.ctypes.data % alignment :]
