"""Learns from step times how many prompt rows a step may have, and the cost of a decoding step by its rows."""

from bisect import bisect_left, insort
from collections.abc import Sequence


class ChunkSize:
    """How many rows a step may have so that it takes about TARGET_S; learned from step times.

    A prompt that runs alone may take ALONE_S per step, because long steps read the weights less often, and only a
    cancellation or a new request waits for the step. Neither may wait longer than a quarter of a second. A step that
    they can interrupt may take PATIENT_S, not longer, because interrupting it loses its work.
    """

    TARGET_S = 0.15
    ALONE_S = 0.22
    PATIENT_S = 3.0
    SMALLEST = 16
    LEAST_PATIENT = 128
    WHOLE_TILES = 64  # rows whose attention llama.cpp computes together; after a long prefix, fewer cost as much as all

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._rows_per_s = 0.0

    @property
    def rows(self) -> int:
        """Rows of the next step."""
        return self._rows_in(self.TARGET_S)

    @property
    def rows_alone(self) -> int:
        """Rows of the next step if there is no other request."""
        return self._rows_in(self.ALONE_S)

    def rows_patient(self, ahead: int) -> int:
        """Rows of the next step if there is no other request and it can be interrupted. ahead: rows still to compute.

        Steps share the rows evenly, because a last step of few rows would take as long as one of many.
        """
        most = max(self._rows_in(self.PATIENT_S) // self.WHOLE_TILES * self.WHOLE_TILES, self.LEAST_PATIENT)
        share = -(-ahead // max(-(-ahead // most), 1))
        return min(-(-share // self.WHOLE_TILES) * self.WHOLE_TILES, most)

    def _rows_in(self, seconds: float) -> int:
        return min(max(int(self._rows_per_s * seconds), self.SMALLEST), self._largest)

    def seconds(self, rows: int) -> float:
        """Estimated time to compute `rows` rows; 0 before the first measurement."""
        return rows / self._rows_per_s if self._rows_per_s else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step. Ignores small ones, whose time is that of reading the weights."""
        if rows >= self.SMALLEST:
            measured = rows / max(seconds, 1e-6)
            self._rows_per_s = (self._rows_per_s + measured) / 2 if self._rows_per_s else measured


class StepCosts:
    """The cost of a decoding step by its number of rows, learned from step times.

    Costs do not grow evenly: rows are computed in tiles, so one more may cost nothing, or a tile. Unmeasured row counts
    are interpolated between their neighbours; beyond the measured range, PRIOR applies. Old measurements fade, so
    estimates follow the machine's load, and row counts that did not pay are tried again.

    ratios: what steps of 1, 2, ... rows cost in steps of one row, as measured before; they replace PRIOR.
    """

    LARGEST = 32
    PRIOR = 0.1  # cost of a further row relative to a step of one row, until measured
    TRUST = 0.5  # weight of the interpolation, in measurements
    MOST = 8.0  # maximum weight of past measurements
    # Maximum weight of past measurements beside one that took less time: cold caches and other programs only add to it.
    LOWER = 0.25
    OLD = 8  # steps for each past measurement, after which there should be another
    FADES = 0.99  # factor by which each step reduces the weight of older ones
    FORGETS, DOUBT = 0.999, 0.05  # FADES and TRUST of `remembered`
    KEPT_TRUST = 2.0  # the least weight of the interpolation with kept ratios

    def __init__(self, ratios: Sequence[float] = ()) -> None:
        self._ratios = ratios
        self._steps = 0
        self._measured: list[int] = []  # numbers of rows, ascending
        self._means = [0.0] * (self.LARGEST + 1)
        self._weights = [0.0] * (self.LARGEST + 1)
        self._noted = [0] * (self.LARGEST + 1)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step that only decoded. Ignores large ones, which are never looked up."""
        if rows > self.LARGEST:
            return
        self._steps += 1
        weight = self._weight(rows, self.FADES)
        if weight > 1:
            seconds = min(seconds, 3 * self._means[rows])  # another process may have had the processor
        elif not self._weights[rows]:
            insort(self._measured, rows)
        before = min(weight, self.LOWER) if seconds < self._means[rows] else weight
        self._means[rows] = (self._means[rows] * before + seconds) / (before + 1)
        self._weights[rows] = min(weight + 1, self.MOST)
        self._noted[rows] = self._steps

    @property
    def largest(self) -> int:
        """The most rows that were measured, now or before; 0 before the first measurement of this process."""
        return max(self._measured[-1], len(self._ratios)) if self._measured else 0

    @property
    def ratios(self) -> list[float]:
        """What steps of 1, 2, ... rows cost in steps of one row, for the next process."""
        if not self._measured:
            return [*self._ratios]
        return [self.remembered(rows) / self.remembered(1) for rows in range(1, self.largest + 1)]

    def is_known(self, rows: int) -> bool:
        """Whether some number of rows was measured twice that is at least as large, or measured before."""
        return rows <= len(self._ratios) or max(self._weights[min(rows, self.LARGEST) :]) > 1

    def remembered(self, rows: int) -> float:
        """Like `seconds`, but as last measured, for those who measure again on purpose what did not pay."""
        return self._estimate(rows, self.FORGETS, self.DOUBT)

    def is_old(self, rows: int) -> bool:
        """Whether a number of rows should be measured again: soon at first, later after OLD times MOST steps."""
        rows = min(rows, self.LARGEST)
        return self._steps - self._noted[rows] > self.OLD * self._weights[rows]

    def seconds(self, rows: int) -> float:
        """Estimated time of a step of `rows` rows; before the first measurement, in units of a step of one row."""
        return self._estimate(rows, self.FADES, self.TRUST)

    def _estimate(self, rows: int, fades: float, trust: float) -> float:
        if not self._measured:
            return self._prior(rows)
        at = bisect_left(self._measured, rows)
        own = at < len(self._measured) and self._measured[at] == rows
        trust = max(trust, self.KEPT_TRUST) if rows <= len(self._ratios) else trust
        below, above = self._measured[:at], self._measured[at + own :]
        weight = self._weight(rows, fades) if own else 0.0
        if below and above:
            share = (rows - below[-1]) / (above[0] - below[-1])
            line = self._means[below[-1]] * (1 - share) + self._means[above[0]] * share
        elif below:
            near = below[-1]
            line = self._means[near] * self._prior(rows) / self._prior(near)
            if len(below) > 1 and rows > len(self._ratios):
                slope = (self._means[near] - self._means[below[-2]]) / (near - below[-2])
                line = max(line, self._means[near] + slope * (rows - near))
        elif above:
            line = self._means[above[0]] * self._prior(rows) / self._prior(above[0])
        else:
            return self._means[rows]
        return (weight * self._means[rows] + trust * line) / (weight + trust) if own else line

    def _weight(self, rows: int, fades: float) -> float:
        return self._weights[rows] * float(fades ** (self._steps - self._noted[rows]))

    def _prior(self, rows: int) -> float:
        known = min(rows, len(self._ratios))
        return (self._ratios[known - 1] if known else 1 - self.PRIOR) + self.PRIOR * (rows - known)
