"""How many rows of prompts a step computes, learned from its time."""


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
