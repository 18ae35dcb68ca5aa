"""Summary statistics of repeated measurements."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
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
