"""Memory aligned to 64 bytes for whole-vector loads. The system provides pages when they are first touched.

Pages are small (4 KiB) or huge (2 MiB). Huge pages cause fewer faults and TLB misses if all of an array is used; small
pages take less memory if little of it is used, or scattered parts.
"""

import contextlib
import ctypes
import math
import mmap
import sys

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_BLOCK = 64 << 20
_LARGE = 1 << 20


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
    """An array of zeros whose first byte is aligned. Untouched pages of a large array take no memory.

    Raises MemoryError.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if sys.platform == "linux" and size >= _LARGE:
        # In fresh small pages: the C library might reuse freed memory, and would have to zero it.
        raw = _mapped(size, mmap.MADV_NOHUGEPAGE)
    else:
        raw = _aligned(np.zeros(size + ALIGNMENT, np.uint8), ALIGNMENT)
    return raw[:size].view(kind).reshape(shape)


def zeros_from_the_front(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An aligned array of zero bytes that is filled from the front. Large ones use huge pages, taken when touched.

    Raises MemoryError.
    """
    size = math.prod(shape)
    if sys.platform == "linux" and size >= _LARGE:
        raw = _aligned(_mapped(size + _HUGE_PAGE, mmap.MADV_HUGEPAGE), _HUGE_PAGE)
        return raw[:size].reshape(shape)
    return np.asarray(aligned_zeros(shape, np.uint8), np.uint8)


if sys.platform == "linux":

    def _mapped(size: int, advice: int) -> NDArray[np.uint8]:
        """Map fresh zero pages, with an madvise value. Raises MemoryError."""
        try:
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system gave no {size:,} bytes") from error
        # A system without huge pages rejects the advice, which is only a hint.
        with contextlib.suppress(OSError):
            pages.madvise(advice)
        return np.frombuffer(pages, np.uint8)


def give_back(array: NDArray[np.generic]) -> None:
    """Return a contiguous array's memory to the system, as far as whole pages go; the array then has zeros there.

    Only for arrays from this module. Does nothing, and leaves the values, where the system is not Linux.
    """
    if sys.platform != "linux":
        return
    start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


class Arena:
    """Memory for arrays with a common lifetime, allocated contiguously in blocks of huge pages."""

    def __init__(self) -> None:
        self._rest: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def zeros(self, size: int) -> NDArray[np.uint8]:
        """`size` zero bytes, aligned. The array keeps its block alive."""
        room = -(-size // ALIGNMENT) * ALIGNMENT
        if room > len(self._rest):
            # NumPy requests huge pages for arrays of this size.
            block = _aligned(np.zeros(max(room, _BLOCK) + _HUGE_PAGE, np.uint8), _HUGE_PAGE)
            if len(block) - room < len(self._rest):
                return block[:size]
            self._rest = block
        taken, self._rest = self._rest[:size], self._rest[room:]
        return taken


def _aligned(raw: NDArray[np.uint8], alignment: int) -> NDArray[np.uint8]:
    return raw[-raw.ctypes.data % alignment :]
