"""How many tokens to speculate: as many as pay, judged by what steps cost and how often guesses were right."""

MAX_DRAFT = 12
# A gain below this is not worth the risk that the measure is off.
LEAST_GAIN = 1.05


class StepCosts:
    """What a decoding step costs by its rows, learned from the steps' own times: seconds = base + rows * per_row.

    The fit forgets, so that it follows a conversation that grows and a machine that others use too. It leans towards
    PRIOR, so that a few unlucky steps do not end all speculation.
    """

    LARGEST = 32
    MEMORY = 0.98
    PRIOR = 0.1  # a row's share of a step of one, until steps have shown another
    TRUST = 3.0  # the variance in rows that counts as much as the prior

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step that only decoded. Large ones tell nothing: their rows cost otherwise."""
        if rows > self.LARGEST:
            return
        if self._weight > 2:
            seconds = min(seconds, 3 * self.seconds(rows))  # somebody else had the processor
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._weight, self._x, self._y, self._xx, self._xy = (
            old * self.MEMORY + value for old, value in zip(sums, new, strict=True)
        )

    def seconds(self, rows: int) -> float:
        """What a step of so many rows should take."""
        if not self._weight:
            return 1.0 + self.PRIOR * rows
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        covariance = self._xy / self._weight - x * y
        prior = self.PRIOR * y / (1 + self.PRIOR * (x - 1))
        slope = (covariance + self.TRUST * prior) / (variance + self.TRUST)
        slope = min(max(slope, 0.0), y / x)
        return max(y + slope * (rows - x), 1e-9)


class DraftLength:
    """How long the next draft from one source should be for one request.

    At zero, a short draft is tried again only after a pause that doubles with every failure.
    """

    FORGET = 0.9
    FIRST_PAUSE = 8
    LONGEST_PAUSE = 256

    def __init__(self) -> None:
        # As if four guesses had been made, three of them right: begin with hope.
        self._right, self._wrong = 3.0, 1.0
        self._pause = 0
        self._next_pause = self.FIRST_PAUSE

    @property
    def acceptance(self) -> float:
        """Estimated probability that the next guess is right where all before it were."""
        return self._right / (self._right + self._wrong)

    def token(self) -> None:
        """Note that a token was generated."""
        self._pause -= self._pause > 0

    def choose(self, limit: int, costs: StepCosts, drafting_s: float, others: int = 0) -> int:
        """Tokens to draft, 0 to `limit`: the number that promises most tokens a second.

        drafting_s: time that drafting one token takes. others: rows that the step has anyway.
        """
        if self._pause or limit <= 0:
            return 0
        plain = 1 / costs.seconds(others + 1)
        best, best_gain = 0, LEAST_GAIN
        expected = likely = 1.0
        for count in range(1, min(limit, MAX_DRAFT) + 1):
            likely *= self.acceptance
            expected += likely
            gain = expected / (costs.seconds(others + 1 + count) + count * drafting_s) / plain
            if gain > best_gain:
                best, best_gain = count, gain
        if not best:
            self._rest()
            return 0
        return best

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a verified draft."""
        self._right = self._right * self.FORGET + accepted
        self._wrong = self._wrong * self.FORGET + (accepted < drafted)
        if accepted == drafted:
            self._next_pause = self.FIRST_PAUSE
        elif not accepted and self.acceptance < 0.5:
            self._rest()

    def _rest(self) -> None:
        """Pause; the guess after it counts again as one that may be right."""
        self._pause = self._next_pause
        self._next_pause = min(self._next_pause * 2, self.LONGEST_PAUSE)
        self._right, self._wrong = 1.5, 0.5
