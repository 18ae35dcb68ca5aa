"""Energy from the processor's own counters: RAPL, as exposed by Linux.

https://docs.kernel.org/power/powercap/powercap.html. It counts processors and memory, on some machines ("psys") the
whole platform, but not GPUs or power supply losses. On most systems only root can read it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import LocalLLMError, reason
from localllm.files import listed

POWERCAP = Path("/sys/class/powercap")


class EnergyUnknownError(LocalLLMError):
    """No energy counter can be read; the message says why, without a full stop."""


@dataclass(slots=True)
class _Counter:
    """A counter in microjoules that wraps to 0 at `span`."""

    path: Path
    span: int
    last: int = 0

    def added(self) -> int:
        """Microjoules added since the last call."""
        now = _number(self.path)
        added = (now - self.last) % self.span
        self.last = now
        return added


class EnergyMeter:
    """Joules used by this machine since the meter was created. Counters can wrap within an hour: read more often."""

    def __init__(self, root: Path = POWERCAP) -> None:
        """Raises EnergyUnknownError."""
        # Zones of the processors, without intel-rapl-mmio, which counts the same energy again.
        found = (path for path in listed(root) if path.name.startswith("intel-rapl:"))
        folders = (path for path in found if os.path.isfile(path / "name"))
        zones = {path: (path / "name").read_text(encoding="ascii").strip() for path in folders}
        chosen = [path for path, name in zones.items() if name == "psys"] or [
            path for path, name in zones.items() if name.startswith("package") or name == "dram"
        ]
        if not chosen:
            raise EnergyUnknownError(f"there are no RAPL counters in {root}")
        # max_energy_range_uj is a counter's largest value; the next one is 0.
        self._counters = [
            _Counter(path / "energy_uj", _number(path / "max_energy_range_uj") + 1) for path in sorted(chosen)
        ]
        for counter in self._counters:
            counter.added()
        self._joules = 0.0

    def joules(self) -> float:
        """Joules so far. Raises EnergyUnknownError if a counter is no longer readable."""
        self._joules += sum(counter.added() for counter in self._counters) / 1e6
        return self._joules


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise EnergyUnknownError(f"{path} cannot be read: {reason(error)}") from error
