"""The choice of thread count: affinity, hyper-threads and control groups."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from cpu_kernels import cores
from cpu_kernels.cores import processor_name, usable_cores, usable_processors

NOWHERE = Path("/nowhere")
Counted = Callable[..., int]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts the cores of a process that may use some processors, without a quota."""
    monkeypatch.setattr(cores, "processor_quota", lambda: math.inf)

    def count(processors: Iterable[int], cpus: Path = NOWHERE, atoms: Path = NOWHERE) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(processors), raising=False)
        return usable_cores(cpus, atoms)

    return count


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


def test_hyper_threads_share_a_core(tmp_path: Path, counted: Counted) -> None:
    cpus = topology(tmp_path, ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"])
    assert counted(range(8), cpus) == 4
    assert counted({0, 4}, cpus) == 1
    assert counted({0, 5, 6}, cpus) == 3


def test_without_topology_no_more_than_the_machines_cores(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8 if logical else 4)
    assert counted(range(8)) == 4
    assert counted({1, 2}) == 2
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None)
    assert counted({1, 2}) == 2


@pytest.mark.parametrize(("quota", "allowed"), [(0.1, 1), (1.5, 1), (3.0, 3)])
def test_control_groups_bound_the_threads(
    quota: float, allowed: int, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = topology(tmp_path, [str(processor) for processor in range(8)])
    assert counted(range(8), cpus) == 8
    monkeypatch.setattr(cores, "processor_quota", lambda: quota)
    assert (counted(range(8), cpus), usable_processors()) == (allowed, allowed)


def test_a_processor_has_the_systems_name(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor : 0\nmodel name\t: A: Processor 9\n")
    assert processor_name(told) == "A: Processor 9"
    assert processor_name(tmp_path / "nowhere")


def arm_cpuinfo(path: Path, *cores: tuple[str, str, str]) -> Path:
    """What Linux reports for cores of 64-bit ARM, given their implementer, part and revision."""
    path.write_text(
        "".join(
            f"processor\t: {i}\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd\nCPU implementer\t: {implementer}\n"
            f"CPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: {part}\nCPU revision\t: {revision}\n\n"
            for i, (implementer, part, revision) in enumerate(cores)
        )
        + "Serial\t: 00000000\n"
    )
    return path


def test_arm_processors_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux has no names for them, so measurements of one would be taken for another's."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    big, little = ("0x41", "0xd0b", "1"), ("0x41", "0xd05", "0")
    names = [
        processor_name(arm_cpuinfo(tmp_path / "cpuinfo", *found))
        for found in ([big], [big, big], [big, little], [little], [("0x61", "0xd0b", "1")], [("0x41", "0xd0b", "2")])
    ]
    assert names[0] == names[1] == "aarch64 0x41/8/0x4/0xd0b/1"
    assert names[2] == "aarch64 0x41/8/0x4/0xd05/0 + 0x41/8/0x4/0xd0b/1"
    assert len(set(names)) == 5


def test_macos_names_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "sysctl", {"machdep.cpu.brand_string": b"Apple M9 Pro\0"}.get)
    assert processor_name(tmp_path / "nowhere") == "Apple M9 Pro"


def speeds(folder: Path, name: str, values: list[int]) -> Path:
    """A fake sysfs folder with a number for each processor."""
    for processor, value in enumerate(values):
        path = folder / f"cpu{processor}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return folder


@pytest.mark.parametrize(
    ("name", "values", "atoms", "fast"),
    [
        ("cpu_capacity", [381, 381, 381, 381, 1024, 1024, 1024, 1024], "", {4, 5, 6, 7}),
        ("cpu_capacity", [250, 250, 250, 250, 760, 760, 760, 1024], "", {4, 5, 6, 7}),
        ("cpu_capacity", [1024] * 4, "", {0, 1, 2, 3}),
        # Meteor Lake: six fast cores, eight efficient ones and two of the slowest kind.
        ("cpufreq/cpuinfo_max_freq", [4_800_000] * 6 + [3_800_000] * 8 + [2_500_000] * 2, "6-15", set(range(14))),
        ("cpufreq/cpuinfo_max_freq", [5_000_000, 4_900_000], "", {0, 1}),
        ("something_else", [1, 100], "", {0, 1}),
    ],
    ids=["4 + 4", "1 + 3 + 4", "equal", "three kinds", "nearly equal", "not reported"],
)
def test_slow_cores_get_no_thread(
    name: str,
    values: list[int],
    atoms: str,
    fast: set[int],
    tmp_path: Path,
    counted: Counted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slow processors are hyper-threads of one core here, so the count tells which ones were taken."""
    if atoms:  # Intel's
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "atoms").write_text(f"{atoms}\n")
    everything = set(range(len(values)))
    cpus = topology(speeds(tmp_path, name, values), [str(one) if one in fast else "slow" for one in sorted(everything)])
    assert counted(everything, cpus, tmp_path / "atoms") == len(fast)
    if slow := everything - fast:  # a process that is bound to them uses them
        assert counted(slow, cpus, tmp_path / "atoms") == 1


@pytest.mark.parametrize(("machine", "fast"), [("AMD64", 4), ("ARM64", 2)])
def test_windows_tells_which_cores_are_efficient(
    machine: str, fast: int, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(cores, "efficiency_classes", lambda: {0: 1, 1: 1, 2: 0, 3: 0})
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 4)
    assert counted(range(4)) == fast


def test_macos_counts_its_performance_cores(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 10)
    monkeypatch.setattr(cores, "sysctl_number", {"hw.perflevel0.logicalcpu": 8}.get)
    assert counted(range(10)) == 8
    monkeypatch.setattr(cores, "sysctl_number", lambda _name: 0)
    assert counted(range(10)) == 10
