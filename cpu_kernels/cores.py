"""The processor's name and largest cache, and how many threads to start on it.

That is the number of cores, not hyper-threads, that this process may use, without cores that are too slow to help, and
limited by the CPU quota of its control groups.
"""

import contextlib
import math
import os
import platform
from pathlib import Path

from cpu_kernels.limits import processor_quota
from cpu_kernels.system_facts import efficiency_classes, is_arm, sysctl, sysctl_number

_CPUS = Path("/sys/devices/system/cpu")
_CPU_INFO = Path("/proc/cpuinfo")
_ATOMS = Path("/sys/devices/cpu_atom/cpus")
_USUAL_CACHE = 32 << 20
# Speed of efficient cores, where the system tells only which ones these are: Intel's per clock, and ARM's.
_ATOM, _LITTLE = 0.6, 0.35
# The least speed of cores that help, compared with the fastest. Efficient cores of phones and of Apple's processors are
# slower, those of Intel's processors are faster, except the slowest kind (Meteor Lake's LP E-cores).
_HELPS = 0.4
# The fields of /proc/cpuinfo that identify a core of 64-bit ARM, in their order.
_MIDR = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")


def usable_cores(cpus: Path = _CPUS, atoms: Path = _ATOMS) -> int:
    """Number of cores that this process may use and that help, not counting hyper-threads.

    cpus, atoms: where Linux describes the processors, and lists Intel's efficient ones.

    One thread of matrix products saturates a core; a second thread on it would only wait. Work is shared by speed, but
    every core takes part in each barrier and in the traffic to memory, which few fast cores use up.
    """
    return min(_distinct_cores(_fast_ones(_affinity(), cpus, atoms), cpus), usable_processors())


def usable_processors() -> int:
    """The most threads that can run at the same time, hyper-threads included: within the CPU quota, at least one."""
    return max(1, math.floor(min(len(_affinity()), processor_quota())))


def processor_name(cpu_info: Path = _CPU_INFO) -> str:
    """The processor's model name as the system reports it, different for different processors.

    Linux has no names for 64-bit ARM, so there it is made of the numbers of the designers and kinds of all cores.
    """
    if cpu_info.is_file():
        fields = [line.partition(":") for line in cpu_info.read_text(errors="replace").splitlines()]
        found = [(name.strip(), value.strip()) for name, _, value in fields]
        for name, value in found:
            if name == "model name":
                return value
        # Every processor's lines begin with its designer's number.
        starts = [i for i, (name, _) in enumerate(found) if name == "CPU implementer"]
        cores = {
            "/".join(value for name, value in found[start : start + len(_MIDR)] if name in _MIDR) for start in starts
        }
        if cores:
            return f"{platform.machine()} {' + '.join(sorted(cores))}"
    brand = sysctl("machdep.cpu.brand_string")
    return brand.rstrip(b"\0").decode() if brand else platform.processor() or platform.machine()


def largest_cache(folder: Path = _CPUS / "cpu0/cache") -> int:
    """Bytes of the largest cache that a core uses; 32 MiB if the system does not report it."""
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max(
        (int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if size[-1:] in "KM"), default=_USUAL_CACHE
    )


def _fast_ones(processors: set[int], cpus: Path, atoms: Path) -> set[int]:
    """Those of the processors that are not much slower than the fastest of them; all if the system does not tell."""
    if fast := sysctl_number("hw.perflevel0.logicalcpu"):  # macOS binds no process to cores
        return set(range(min(fast, len(processors))))
    speeds, efficient, classes = dict[int, float](), listed(atoms), efficiency_classes()
    fastest = max(classes.values(), default=0)
    for processor in processors:
        speeds[processor] = _speed(cpus / f"cpu{processor}")
        if processor in efficient or classes.get(processor, fastest) < fastest:
            speeds[processor] *= _LITTLE if is_arm(platform.machine()) else _ATOM
    least = _HELPS * max(speeds.values())
    return {processor for processor, speed in speeds.items() if speed >= least}


def _speed(processor: Path) -> float:
    """A processor's speed compared with the machine's others, as Linux reports it; 1 if it does not."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        with contextlib.suppress(OSError, ValueError):
            return float((processor / name).read_text())
    return 1.0


def listed(path: Path) -> set[int]:
    """The numbers in a list of ranges such as 0-7,16; none without the file."""
    try:
        ranges = path.read_text().strip()
    except OSError:
        return set()
    numbers = set[int]()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _distinct_cores(processors: set[int], cpus: Path) -> int:
    """Number of cores of these logical processors; at most the machine's cores if siblings are not reported."""
    siblings = set()
    for processor in processors:
        try:
            siblings.add((cpus / f"cpu{processor}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            import psutil

            return min(len(processors), psutil.cpu_count(logical=False) or len(processors))
    return len(siblings)
