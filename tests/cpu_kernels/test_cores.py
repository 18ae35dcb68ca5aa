"""How many threads are chosen: affinity, hyper-threads and control groups."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_kernels import cores
from cpu_kernels.cores import usable_cores, usable_processors


def topology(folder: Path, siblings: list[str]) -> Path:
    """A folder that says which processors share a core, one entry a processor."""
    for processor, together in enumerate(siblings):
        place = folder / f"cpu{processor}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(together + "\n")
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


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


VERSION_2 = "0::/user/job\n"
VERSION_1 = "9:name=systemd:/\n4:cpu,cpuacct:/user/job\n3:cpuset:/\n0::/\n"


@pytest.mark.parametrize(
    ("files", "membership", "allowed"),
    [
        ({"user/job/cpu.max": "150000 100000"}, VERSION_2, 1),
        ({"user/job/cpu.max": "max 100000", "user/cpu.max": "300000 100000"}, VERSION_2, 3),
        ({"user/job/cpu.max": "400000 100000", "user/cpu.max": "200000 100000"}, VERSION_2, 2),
        ({"user/job/cpu.max": "10000 100000"}, VERSION_2, 1),
        # Inside a container: the path is the host's, the root is the group.
        ({"cpu.max": "200000 100000"}, VERSION_2, 2),
        (
            {"cpu,cpuacct/user/job/cpu.cfs_quota_us": "250000", "cpu,cpuacct/user/job/cpu.cfs_period_us": "100000"},
            VERSION_1,
            2,
        ),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, VERSION_1, 1),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, VERSION_1, None),
        ({"user/job/cpu.max": "max 100000"}, VERSION_2, None),
        ({"user/job/cpu.max": "nonsense"}, VERSION_2, None),
        ({}, "", None),
    ],
)
def test_quotas(files: dict[str, str], membership: str, allowed: int | None, tmp_path: Path) -> None:
    """None: no quota, so all that the affinity gives."""
    write(tmp_path / "membership", membership)
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    found = cores._allowed(tmp_path / "groups", tmp_path / "membership")
    assert found == (len(cores._affinity()) if allowed is None else allowed)


def test_the_smallest_quota_counts_not_the_first(tmp_path: Path) -> None:
    write(tmp_path / "membership", VERSION_2)
    write(tmp_path / "groups/user/job/cpu.max", "max 100000")
    write(tmp_path / "groups/cpu.max", "50000 100000")
    assert sorted(cores._quotas(tmp_path / "groups", tmp_path / "membership")) == [0.5, math.inf]
