"""Aligned memory: zero, writable, disjoint, and allocated by the system only when touched."""

import numpy as np
import psutil
import pytest

from cpu_kernels.memory import ALIGNMENT, Arena, aligned_zeros, zeros_from_the_front


@pytest.mark.parametrize("size", [0, 1, 63, 1000, 1 << 20, (3 << 20) + 5])
def test_arrays_are_aligned_zero_and_writable(size: int) -> None:
    array = aligned_zeros((size,), np.uint8)
    assert array.shape == (size,)
    assert array.ctypes.data % ALIGNMENT == 0
    assert not array.any()
    array[:] = 7
    assert (array == 7).all()


def test_shapes_and_types() -> None:
    array = aligned_zeros((3, 5, 7), np.float32)
    assert (array.shape, array.dtype) == ((3, 5, 7), np.dtype(np.float32))


def test_what_the_system_does_not_have_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="1,152,921,504,606,846,976 bytes"):
        aligned_zeros((1 << 60,), np.uint8)


def test_an_arena_hands_out_memory_once() -> None:
    arena = Arena()
    sizes = [1, 64, 100, 1 << 20, 65 << 20, 40 << 20, 30 << 20, 3]
    pieces = [arena.zeros(size) for size in sizes]
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True), start=1):
        assert len(piece) == size
        assert piece.ctypes.data % ALIGNMENT == 0
        assert not piece[:: 1 << 16].any()
        piece[:: 1 << 16] = piece[-1] = number
    for number, piece in enumerate(pieces, start=1):
        assert (piece[:: 1 << 16] == number).all()
        assert piece[-1] == number


def resident() -> int:
    """This process's current resident bytes; the peak would include earlier tests."""
    return int(psutil.Process().memory_info().rss)


def test_a_large_array_costs_what_is_touched() -> None:
    """Touch one byte in each 2 MiB of 200 MiB: 100 pages of 4 KiB, not all of it."""
    before = resident()
    array = aligned_zeros((200 << 20,), np.uint8)
    array[:: 2 << 20] = 1
    assert resident() - before < 20 << 20
    array[: 60 << 20] = 1
    assert resident() - before > 50 << 20  # the measured value does grow


def test_a_pool_costs_what_is_used_at_its_front() -> None:
    """Touch ten MiB at the front of 200 MiB, whatever the page size."""
    before = resident()
    pool = zeros_from_the_front((20, 10, 1 << 20))
    assert pool.shape == (20, 10, 1 << 20)
    assert pool.ctypes.data % ALIGNMENT == 0
    assert not pool[0].any()
    pool[0] = 1
    assert 5 << 20 < resident() - before < 30 << 20
