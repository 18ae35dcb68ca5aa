"""Processor time and memory that control groups and process limits leave to this process."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from gguf_io.system import address_space_limit

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def processor_quota(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float:
    """The control groups' CPU quota in cores, infinite if they set none."""
    return min(_answers(_quota, "cpu", groups, membership), default=math.inf)


def available_memory(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes of main memory that this process can still take without swapping.

    The minimum of the machine's available memory, what is left below the limits of the process's control groups, and
    half of the address space left (ulimit -v), since stacks and heaps reserve addresses that they never use. Page cache
    that the system can drop counts as available.
    """
    import psutil

    bounds = [psutil.virtual_memory().available, *_answers(_memory_left, "memory", groups, membership)]
    if (limit := address_space_limit()) is not None:
        bounds.append((limit - psutil.Process().memory_info().vms) // 2)
    return max(0, int(min(bounds)))


def _answers(ask: Callable[[Path, bool], float], controller: str, groups: Path, membership: Path) -> Iterator[float]:
    """Results of `ask` for the process's control group and its parents, of one controller; cgroup versions 1 and 2.

    Inside a container the group's path may be a path of the host that does not exist here; then the root is the group.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = membership.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        inner = root / path.strip("/")
        for folder in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):
                yield ask(folder, not controllers)
            if folder == root:
                break


def _quota(folder: Path, version_2: bool) -> float:
    """A group's quota in cores, infinite if it has none. Raises OSError if the group lacks the file."""
    if version_2:
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
    return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)


def _memory_left(folder: Path, version_2: bool) -> float:
    """A group's memory limit minus its usage without page cache, in bytes. Raises OSError if it lacks the files."""
    most, current, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    if version_2:
        most, current, prefix = "memory.max", "memory.current", ""
    limit, used = (folder / most).read_text().strip(), (folder / current).read_text()
    if limit == "max":
        return math.inf
    words = (folder / "memory.stat").read_text().split()
    fields = dict(zip(words[::2], words[1::2], strict=True))
    cache = int(fields.get(f"{prefix}active_file", 0)) + int(fields.get(f"{prefix}inactive_file", 0))
    return int(limit) - int(used) + cache
