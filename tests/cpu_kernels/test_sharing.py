"""Dynamic sharing of items among threads: each item is computed once per step, whichever thread is slow."""

import numpy as np
import pytest

from cpu_kernels.kernel import kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Op, argument
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.threads import pause
from cpu_kernels.simd.vectors import get_i64, put_i64
from cpu_kernels.threads import ThreadTeam


@kernel()
def count_items(op: int, step: int, thread: int, threads: int) -> None:
    """Add one to each item's counter; thread 0 is much slower. Arguments: 0 counters, 1 items, 2 items by thread."""
    count = argument(op, 1)
    first, last = first_share(count, thread, threads)
    while first >= 0:
        for item in range(first, last):
            at = argument(op, 0) + 8 * item
            put_i64(at, get_i64(at) + 1)
            if thread == 0:
                for _ in range(20_000):
                    pause()
        mine = argument(op, 2) + 64 * thread
        put_i64(mine, get_i64(mine) + last - first)
        first, last = next_share(op, count, threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 100])
def test_every_item_is_computed_once_in_every_step(threads: int, count: int) -> None:
    counters, by_thread = aligned_zeros((count + 1,), np.int64), aligned_zeros((threads, 8), np.int64)
    op = aligned_zeros((int(Op.SIZE),), np.int64)
    op[Op.ARGUMENTS : Op.ARGUMENTS + 3] = (counters.ctypes.data, count, by_thread.ctypes.data)
    head = op.copy()
    head[Op.KERNELS] = count_items.address
    program, step = np.array([1, head.ctypes.data], np.int64), aligned_zeros((32,), np.int64)
    team = ThreadTeam(threads)
    try:
        for done in range(1, 4):
            team.run(program.ctypes.data, step.ctypes.data)
            assert counters.tolist() == [done] * count + [0]
            assert head[Op.TAKEN] == 0
    finally:
        team.close()
    assert by_thread[:, 0].sum() == 3 * count
