"""This machine's limits, measured repeatedly and with the same thread count as a model."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from cpu_kernels.cores import largest_cache
from cpu_kernels.limits import available_memory
from cpu_kernels.roofline import Probe, float_probes, int8_probes, read_probe
from cpu_kernels.threads import ThreadTeam
from models.errors import kernels_needed

# The read buffer: a multiple of the largest cache, and a minimum of bytes, so that cache hits hardly count.
_CACHES, _LEAST_BYTES = 4, 256 << 20


@dataclass(frozen=True, slots=True)
class MeasuredSpread:
    """Median, lowest and highest value of repeated measurements."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Summarize values. Raises ValueError if there are none."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("nothing was measured")
        return cls(statistics.median(ordered), ordered[0], ordered[-1])

    @property
    def deviation(self) -> float:
        """Half the range from lowest to highest, relative to the median."""
        return (self.highest - self.lowest) / 2 / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes read from memory per second; int8 and float operations per second. A multiply-add is two operations."""

    read: MeasuredSpread
    int8: MeasuredSpread
    floats: MeasuredSpread


class LimitProbes:
    """Measures the limits one sample at a time, so that samples can alternate with the measurements to compare."""

    def __init__(self, threads: int, clock: Callable[[], float]) -> None:
        self.threads = threads
        self._clock = clock
        size = min(max(_CACHES * largest_cache(), _LEAST_BYTES), available_memory() // 4)
        with kernels_needed():
            self._team = ThreadTeam(threads)
            self._probes = {
                "read": [read_probe(self._team, size)],
                "int8": int8_probes(self._team),
                "floats": float_probes(self._team),
            }
        self._samples: dict[str, list[float]] = {name: [] for name in self._probes}

    def sample(self, *names: str) -> None:
        """Take one sample of the named limits, or of all. If a limit has several probes, the fastest counts."""
        for name in names or self._probes:
            self._samples[name].append(max(self._rate(probe) for probe in self._probes[name]))

    def limits(self) -> Limits:
        """The limits from all samples. Raises ValueError if there are none."""
        return Limits(**{name: MeasuredSpread.of(samples) for name, samples in self._samples.items()})

    def forget(self) -> None:
        """Discard all samples."""
        for samples in self._samples.values():
            samples.clear()

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._team.close()

    def _rate(self, probe: Probe) -> float:
        began = self._clock()
        probe.run()
        return probe.amount / (self._clock() - began)
