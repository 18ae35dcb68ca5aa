"""Memory of weights is touched first by the threads that read it, on machines with several memory nodes."""

from pathlib import Path

import numpy as np
import pytest

from cpu_kernels import first_touch
from cpu_kernels.first_touch import memory_nodes, touch, touch_groups
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Op, Step
from cpu_kernels.threads import ThreadTeam


@pytest.mark.parametrize(("told", "nodes"), [("0", 1), ("0-1", 2), ("0,2-4", 4), (None, 1)])
def test_memory_nodes(told: str | None, nodes: int, tmp_path: Path) -> None:
    online = tmp_path / "online"
    if told is not None:
        online.write_text(f"{told}\n")
    assert memory_nodes(online) == nodes


@pytest.mark.parametrize("threads", [2, 3])
def test_each_thread_touches_a_separate_run_of_groups(threads: int) -> None:
    memory = np.full(7 * 5000, 9, np.uint8)
    op, step = aligned_zeros((int(Op.SIZE),), np.int64), aligned_zeros((int(Step.SIZE),), np.int64)
    op[Op.ARGUMENTS : Op.ARGUMENTS + 3] = (memory.ctypes.data, 7, 5000)
    for thread in range(threads):
        memory[:] = 9
        touch_groups(op.ctypes.data, step.ctypes.data, thread, threads)
        begin, end = 7 * thread // threads * 5000, 7 * (thread + 1) // threads * 5000
        assert np.flatnonzero(memory != 9).tolist() == list(range(begin, end, 4096))


def test_a_matrix_is_touched_only_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, team = np.full(4 * 5000, 9, np.uint8), ThreadTeam(2)
    try:
        monkeypatch.setattr(first_touch, "memory_nodes", lambda: 1)
        touch(team, memory, 5000)
        assert memory.all()
        monkeypatch.setattr(first_touch, "memory_nodes", lambda: 2)
        touch(team, memory, 5000)
        assert (memory[[0, 4096, 8192, 10_000, 14_096, 18_192]] == 0).all() and (memory == 0).sum() == 6
    finally:
        team.close()
