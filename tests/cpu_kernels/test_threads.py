"""Teams of threads: all take part in every step, parked or not, and nobody asks for more cores than there are."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from cpu_kernels.kernel import kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Op, argument
from cpu_kernels.simd.vectors import get_i64, put_i64
from cpu_kernels.threads import ThreadTeam, usable_cores

STEPS = 30


@kernel
def count_step(op: int, step: int, thread: int, threads: int) -> None:
    """Add one to the thread's own counter."""
    mine = argument(op, 0) + 64 * thread
    put_i64(mine, get_i64(mine) + 1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pause", [0.0, 0.03])
def test_every_thread_takes_part_in_every_step(threads: int, pause: float) -> None:
    """With the pause workers have parked before the next step and must be woken."""
    counters = aligned_zeros((threads, 8), np.int64)
    op = aligned_zeros((int(Op.SIZE),), np.int64)
    op[Op.ARGUMENTS] = counters.ctypes.data
    team = ThreadTeam(threads)
    try:
        for done in range(1, STEPS + 1):
            team.run_kernel(count_step, op)
            assert counters[:, 0].tolist() == [done] * threads
            time.sleep(pause)
    finally:
        team.close()
        team.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_affinity_bounds_the_threads() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from cpu_kernels.threads import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
