"""How many tokens to speculate: as many as pay, judged by what steps cost and how often guesses were right."""

from bisect import bisect_left, insort

MAX_DRAFT = 15
# A gain below this is not worth the risk that the measure is off.
LEAST_GAIN = 1.05


class StepCosts:
    """What a decoding step costs by its rows, learned from the steps' own times, for each number of rows apart.

    Costs do not grow evenly: rows are computed in tiles, and one more may cost nothing, or a tile. What was not
    measured lies on a line between its neighbours, and beyond them rows cost what PRIOR says. Old measures fade, so
    that a machine that others use too is followed, and numbers of rows that did not pay are tried again some day.
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
        """Learn from a step that only decoded. Large ones are never asked about."""
        if rows > self.LARGEST:
            return
        self._steps += 1
        weight = self._weight(rows)
        if weight > 1:
            seconds = min(seconds, 3 * self._means[rows])  # somebody else had the processor
        elif not self._weights[rows]:
            insort(self._measured, rows)
        self._means[rows] = (self._means[rows] * weight + seconds) / (weight + 1)
        self._weights[rows] = min(weight + 1, self.MOST)
        self._noted[rows] = self._steps

    def seconds(self, rows: int) -> float:
        """What a step of so many rows should take; until anything was measured, in units of a step of one."""
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


class DraftLength:
    """How long the next draft of a model should be for one request.

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

    def chance(self, at: int) -> float:
        """Estimated probability that the guess at this place of a draft is right where all before it were."""
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
            likely *= self.chance(count - 1)
            expected += likely
            gain = expected / (costs.seconds(others + 1 + count) + count * drafting_s) / plain
            if gain > best_gain:
                best, best_gain = count, gain
        if not best:
            self._rest()
        return best

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a verified draft."""
        self._right = self._right * self.FORGET + accepted
        self._wrong = self._wrong * self.FORGET + (accepted < drafted)
        if accepted == drafted:
            self._next_pause = self.FIRST_PAUSE
        elif not accepted and self.chance(0) < 0.5:
            self._rest()

    def _rest(self) -> None:
        """Pause; the guess after it counts again as one that may be right."""
        self._pause = self._next_pause
        self._next_pause = min(self._next_pause * 2, self.LONGEST_PAUSE)
        self._right, self._wrong = 1.5, 0.5


class LookupLength(DraftLength):
    """How long the next draft by prompt lookup should be for one request.

    What a lookup would have guessed is known for every token, whether it was drafted or not. So nothing need be tried,
    and the chances are those of guesses after as many right ones in a row: text that is copied goes on being copied.
    """

    # Right guesses in a row that begin a class, and what its guesses are taken to have been before any was seen.
    CLASSES = ((0, 1.0, 1.0), (1, 1.2, 0.8), (4, 1.8, 0.2), (8, 1.9, 0.1))

    def __init__(self) -> None:
        super().__init__()
        self._streak = 0
        self._seen = [[right, wrong] for _, right, wrong in self.CLASSES]

    def chance(self, at: int) -> float:
        """Estimated probability that the guess at this place of a draft is right where all before it were."""
        right, wrong = self._class(self._streak + at)
        return right / (right + wrong)

    def guessed(self, right: bool) -> None:
        """Learn from what the lookup said about a token that has come."""
        seen = self._class(self._streak)
        seen[:] = [seen[0] * self.FORGET + right, seen[1] * self.FORGET + (not right)]
        self._streak = self._streak + 1 if right else 0

    def observe(self, drafted: int, accepted: int) -> None:
        """A verified draft tells nothing that its tokens have not told."""

    def _rest(self) -> None:
        """Need no pause: looking up costs nothing."""

    def _class(self, streak: int) -> list[float]:
        return self._seen[sum(streak >= first for first, _, _ in self.CLASSES) - 1]
