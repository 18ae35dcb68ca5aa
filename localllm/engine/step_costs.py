"""What steps cost, learned from their times: how many rows of prompts one may have, what each decoding row adds."""

from bisect import bisect_left, insort


class ChunkSize:
    """How many rows a step may have so that it takes about TARGET_S; learned from the steps' own times.

    A prompt that is alone may take ALONE_S: only cancelling it, or a new request, waits for the step, and long steps
    read the weights less often. Neither may wait longer than a quarter of a second, unless the step can be given up for
    them: then its work is lost, so that it may take PATIENT_S.
    """

    TARGET_S = 0.15
    ALONE_S = 0.22
    PATIENT_S = 3.0
    SMALLEST = 16
    LEAST_PATIENT = 128
    WHOLE_TILES = 64  # rows whose attention llama.cpp computes together; fewer cost as much as all behind a long prefix

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._rows_per_s = 0.0

    @property
    def rows(self) -> int:
        """Rows of the next step."""
        return self._rows_in(self.TARGET_S)

    @property
    def rows_alone(self) -> int:
        """Rows of the next step where there is no other request."""
        return self._rows_in(self.ALONE_S)

    def rows_patient(self, ahead: int) -> int:
        """Rows of the next step where there is no other request and it can be given up; ahead: rows still to compute.

        They are shared out evenly: a step of the few that are left over would take as long as one of many.
        """
        most = max(self._rows_in(self.PATIENT_S) // self.WHOLE_TILES * self.WHOLE_TILES, self.LEAST_PATIENT)
        share = -(-ahead // max(-(-ahead // most), 1))
        return min(-(-share // self.WHOLE_TILES) * self.WHOLE_TILES, most)

    def _rows_in(self, seconds: float) -> int:
        return min(max(int(self._rows_per_s * seconds), self.SMALLEST), self._largest)

    def seconds(self, rows: int) -> float:
        """How long computing this many rows should take; 0 until anything was measured."""
        return rows / self._rows_per_s if self._rows_per_s else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step. Small ones tell little: their time is that of reading the weights."""
        if rows >= self.SMALLEST:
            measured = rows / max(seconds, 1e-6)
            self._rows_per_s = (self._rows_per_s + measured) / 2 if self._rows_per_s else measured


class StepCosts:
    """What a decoding step costs by its number of rows, learned from the steps' own times.

    Costs do not grow evenly: rows are computed in tiles, and one more may cost nothing, or a tile. What was not
    measured is interpolated between its neighbours, and beyond them rows cost what PRIOR says. Old measures fade, so
    that changes of the machine's load are followed, and numbers of rows that did not pay are tried again.
    """

    LARGEST = 32
    PRIOR = 0.1  # a row's share of a step of one, until steps have shown another
    TRUST = 0.5  # measures that the neighbours' line counts as much as
    MOST = 8.0  # measures that are remembered at most
    FADES = 0.99  # what a step leaves of the weight of older ones

    def __init__(self) -> None:
        self._steps = 0
        self._measured: list[int] = []  # numbers of rows, ascending
        self._means = [0.0] * (self.LARGEST + 1)
        self._weights = [0.0] * (self.LARGEST + 1)
        self._noted = [0] * (self.LARGEST + 1)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step that only decoded. Large ones are never looked up."""
        if rows > self.LARGEST:
            return
        self._steps += 1
        weight = self._weight(rows)
        if weight > 1:
            seconds = min(seconds, 3 * self._means[rows])  # another process had the processor
        elif not self._weights[rows]:
            insort(self._measured, rows)
        self._means[rows] = (self._means[rows] * weight + seconds) / (weight + 1)
        self._weights[rows] = min(weight + 1, self.MOST)
        self._noted[rows] = self._steps

    def seconds(self, rows: int) -> float:
        """What a step of this many rows should take; until anything was measured, in units of a step of one row."""
        if not self._measured:
            return self._prior(rows)
        at = bisect_left(self._measured, rows)
        own = at < len(self._measured) and self._measured[at] == rows
        below, above = self._measured[:at], self._measured[at + own :]
        weight = self._weight(rows) if own else 0.0
        if below and above:
            share = (rows - below[-1]) / (above[0] - below[-1])
            line = self._means[below[-1]] * (1 - share) + self._means[above[0]] * share
        elif below or above:
            near = below[-1] if below else above[0]
            line = self._means[near] * self._prior(rows) / self._prior(near)
        else:
            return self._means[rows]
        return (weight * self._means[rows] + self.TRUST * line) / (weight + self.TRUST) if own else line

    def _weight(self, rows: int) -> float:
        return self._weights[rows] * float(self.FADES ** (self._steps - self._noted[rows]))

    def _prior(self, rows: int) -> float:
        return 1 + self.PRIOR * (rows - 1)
