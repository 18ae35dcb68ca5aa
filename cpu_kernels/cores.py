"""How many threads are worth starting: cores of this process, not hyper-threads, less what its control groups allow."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that this process may use, each counted once however many hyper-threads it has.

    Matrix products keep a core's units busy alone; a second thread on it would only wait for them.
    """
    return min(_distinct_cores(_affinity()), _allowed())


def usable_processors() -> int:
    """Threads that can run at the same time at all: hyper-threads count. More would wait for each other's turn."""
    return min(len(_affinity()), _allowed())


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _distinct_cores(processors: set[int], cpus: Path = _CPUS) -> int:
    """Cores behind some processors; where the system does not tell which share one, at most those of the machine."""
    siblings = set()
    for processor in processors:
        try:
            siblings.add((cpus / f"cpu{processor}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            import psutil

            return min(len(processors), psutil.cpu_count(logical=False) or len(processors))
    return len(siblings)


def _allowed(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Whole cores' worth of time that the control groups of this process allow, at least one."""
    smallest = min(_quotas(groups, membership), default=math.inf)
    return len(_affinity()) if smallest == math.inf else max(1, math.floor(smallest))


def _quotas(groups: Path, membership: Path) -> Iterator[float]:
    """Quotas of the process's group and of those around it, in cores; version 2 of control groups and version 1.

    Inside a container the group's path may be one of the host, which is not there: then its root is the group.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = membership.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        inner = root / path.strip("/")
        for folder in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):
                yield _quota(folder, version_2=not controllers)
            if folder == root:
                break


def _quota(folder: Path, version_2: bool) -> float:
    """A group's quota in cores, infinite where it has none. Raises OSError where the group does not say."""
    if version_2:
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)
