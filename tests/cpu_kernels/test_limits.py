"""Processors and memory left by control groups and process limits."""

import math
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cpu_kernels.limits import available_memory, processor_quota

MIB = 2**20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


VERSION_2 = "0::/user/job\n"
VERSION_1 = "9:name=systemd:/\n4:cpu,cpuacct:/user/job\n3:cpuset:/\n0::/\n"


@pytest.mark.parametrize(
    ("files", "membership", "allowed"),
    [
        ({"user/job/cpu.max": "150000 100000"}, VERSION_2, 1.5),
        ({"user/job/cpu.max": "max 100000", "user/cpu.max": "300000 100000"}, VERSION_2, 3),
        ({"user/job/cpu.max": "400000 100000", "user/cpu.max": "200000 100000"}, VERSION_2, 2),
        ({"user/job/cpu.max": "10000 100000"}, VERSION_2, 0.1),
        # Inside a container: the path is the host's, the root is the group.
        ({"cpu.max": "200000 100000"}, VERSION_2, 2),
        (
            {"cpu,cpuacct/user/job/cpu.cfs_quota_us": "250000", "cpu,cpuacct/user/job/cpu.cfs_period_us": "100000"},
            VERSION_1,
            2.5,
        ),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, VERSION_1, 1),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, VERSION_1, math.inf),
        ({"user/job/cpu.max": "max 100000"}, VERSION_2, math.inf),
        ({"user/job/cpu.max": "nonsense"}, VERSION_2, math.inf),
        ({}, "", math.inf),
    ],
)
def test_quotas(files: dict[str, str], membership: str, allowed: float, tmp_path: Path) -> None:
    write(tmp_path / "membership", membership)
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert processor_quota(tmp_path / "groups", tmp_path / "membership") == allowed


def test_the_smallest_quota_counts_not_the_first(tmp_path: Path) -> None:
    write(tmp_path / "membership", VERSION_2)
    write(tmp_path / "groups/user/job/cpu.max", "max 100000")
    write(tmp_path / "groups/cpu.max", "50000 100000")
    assert processor_quota(tmp_path / "groups", tmp_path / "membership") == 0.5


def memory_files(folder: str, limit: int | str, used: int, cache: int = 0) -> dict[str, str]:
    """A group's files in version 2."""
    stat = f"anon {used - cache}\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}\n"
    return {f"{folder}memory.max": f"{limit}\n", f"{folder}memory.current": f"{used}\n", f"{folder}memory.stat": stat}


MEMORY_1 = "memory/docker/1"


@pytest.mark.parametrize(
    ("files", "membership", "left"),
    [
        (memory_files("user/job/", 64 * MIB, 24 * MIB), VERSION_2, 40),
        (memory_files("user/job/", 64 * MIB, 24 * MIB, cache=10 * MIB), VERSION_2, 50),
        (memory_files("user/job/", "max", MIB) | memory_files("user/", 32 * MIB, 30 * MIB), VERSION_2, 2),
        (memory_files("", 16 * MIB, 4 * MIB), VERSION_2, 12),  # inside a container
        (memory_files("user/job/", 8 * MIB, 9 * MIB), VERSION_2, 0),
        (
            {
                f"{MEMORY_1}/memory.limit_in_bytes": str(64 * MIB),
                f"{MEMORY_1}/memory.usage_in_bytes": str(32 * MIB),
                f"{MEMORY_1}/memory.stat": f"cache 5\ntotal_inactive_file {8 * MIB}\ntotal_active_file 0\n",
            },
            "4:memory:/docker/1\n0::/\n",
            40,
        ),
    ],
)
def test_memory_follows_control_groups(files: dict[str, str], membership: str, left: int, tmp_path: Path) -> None:
    write(tmp_path / "membership", membership)
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert available_memory(tmp_path / "groups", tmp_path / "membership") == left * MIB


def test_without_limits_it_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    write(tmp_path / "groups/memory.max", "nonsense")
    assert available_memory(tmp_path / "groups", tmp_path / "absent") == free.available


@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit of address space")
def test_a_limit_of_address_space_counts() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from cpu_kernels.limits import available_memory; print(available_memory())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 1 << 30
