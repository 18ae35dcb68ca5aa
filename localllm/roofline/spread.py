"""What several measurements of the same thing say."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of some measurements."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Raises ValueError where there are none."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("nothing was measured")
        return cls(statistics.median(ordered), ordered[0], ordered[-1])

    @property
    def deviation(self) -> float:
        """Half of the way from the lowest to the highest, as a share of the median."""
        return (self.highest - self.lowest) / 2 / self.median if self.median else 0.0
