"""The choice of thread count: affinity, hyper-threads and control groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_kernels import cores
from cpu_kernels.cores import usable_cores, usable_processors


def topology(folder: Path, siblings: list[str]) -> Path:
    """A fake sysfs folder that says which processors share a core, one entry per processor."""
    for processor, together in enumerate(siblings):
        place = folder / f"cpu{processor}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(together + "\n")
    return folder


def test_this_machine() -> None:
    assert 1 <= usable_cores() <= usable_processors() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_affinity_bounds_the_threads() -> None:
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from cpu_kernels.cores import usable_cores, usable_processors; print(usable_cores(), usable_processors())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_hyper_threads_share_a_core(tmp_path: Path) -> None:
    cpus = topology(tmp_path, ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"])
    assert cores._distinct_cores(set(range(8)), cpus) == 4
    assert cores._distinct_cores({0, 4}, cpus) == 1
    assert cores._distinct_cores({0, 5, 6}, cpus) == 3


def test_without_topology_no_more_than_the_machines_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8 if logical else 4)
    assert cores._distinct_cores(set(range(8)), tmp_path) == 4
    assert cores._distinct_cores({1, 2}, tmp_path) == 2
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None)
    assert cores._distinct_cores({1, 2}, tmp_path) == 2


@pytest.mark.parametrize(("quota", "allowed"), [(0.1, 1), (1.5, 1), (3.0, 3)])
def test_control_groups_bound_the_threads(quota: float, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "processor_quota", lambda: quota)
    assert cores._allowed() == allowed
