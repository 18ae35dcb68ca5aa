"""Speculative decoding: prompt lookup, and the choice of draft lengths.

Prompt lookup needs no second model: the tokens that followed the same text before probably follow it again. The draft
length depends on step costs and on the acceptance rate.
"""

import math
from collections.abc import Sequence

from localllm.engine.step_costs import StepCosts

MAX_DRAFT = 15
# A smaller gain is not worth the risk of a wrong measurement.
LEAST_GAIN = 1.05
NGRAM = 3


class DraftLength:
    """Chooses the length of the next draft from the acceptance probabilities that `chance` estimates."""

    FORGET = 0.9

    def chance(self, at: int) -> float:
        """Estimated probability that the draft's token `at` is accepted if all before it are."""
        raise NotImplementedError

    def choose(self, limit: int, costs: StepCosts, drafting_s: float, others: int = 0) -> int:
        """Tokens to draft, 0 to `limit`: the number with the most expected tokens per second.

        drafting_s: time to draft one token. others: rows that the step has anyway.
        """
        plain = 1 / costs.seconds(others + 1)
        best, best_gain = 0, LEAST_GAIN
        expected = likely = 1.0
        most = min(limit, MAX_DRAFT)
        for count in range(1, most + 1):
            likely *= self.chance(count - 1)
            expected += likely
            if expected + likely * (most - count) <= best_gain:  # no longer draft can win, even if its rows were free
                break
            gain = expected / (costs.seconds(others + 1 + count) + count * drafting_s) / plain
            if gain > best_gain:
                best, best_gain = count, gain
        return best


class ModelDraftLength(DraftLength):
    """Chooses the length of a model's next draft, for all requests that it drafts for.

    Later tokens of a draft are accepted less often than the first, so each position has its own statistics; a position
    never reached has those of the one before it. When no draft pays, one token is tried now and then: trials take at
    most TRIALS of the time, and HOPE times as much after an accepted one. Between trials the choice is not
    reconsidered, unless the step has fewer rows or drafts may be longer. reading_s: time of a trial beside drafting, to
    read text that is new to the model.
    """

    FORGET = 0.85
    TRIALS = 0.005
    HOPE = 8
    LONGEST_PAUSE = 1024  # tokens
    _FIRST, _GUESSES = 0.75, 2.0  # the first position's initial chance; each one's initial weight

    def __init__(self) -> None:
        self._seen: list[list[float]] = []  # accepted and rejected tokens of each position reached
        self.reading_s = 0.0
        self._pause = 0
        self._paused_at = 0, 0  # the step's other rows, and the limit
        self._tries = self._hopes = False

    def chance(self, at: int) -> float:
        """Estimated probability that the draft's token `at` is accepted if all before it are."""
        if not self._seen:
            return self._FIRST
        right, wrong = self._seen[min(at, len(self._seen) - 1)]
        return right / (right + wrong)

    def token(self) -> None:
        """Record that a token was generated."""
        self._pause -= self._pause > 0

    def choose(self, limit: int, costs: StepCosts, drafting_s: float, others: int = 0) -> int:
        """Tokens to draft. If no draft pays: none during a pause, and then one."""
        if limit <= 0 or (self._pause and others >= self._paused_at[0] and limit <= self._paused_at[1]):
            return 0
        if best := super().choose(limit, costs, drafting_s, others):
            self._tries = False
            return best
        if self._pause:
            return 0
        tries, self._tries = self._tries, not self._tries
        if tries:
            return 1
        plain = costs.seconds(others + 1)
        row = max(costs.seconds(others + 2) - plain, costs.PRIOR * plain)  # with few measurements it may look free
        share = self.TRIALS * (self.HOPE if self._hopes else 1)
        steps = math.ceil((row + drafting_s + self.reading_s) / plain / share) if plain > 0 else 0
        self._pause = min(steps * (others + 1), self.LONGEST_PAUSE)
        self._paused_at = others, limit
        return 0

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a verified draft."""
        self._hopes = accepted > 0
        for at in range(min(accepted + 1, drafted)):
            right = at < accepted
            if at == len(self._seen):
                chance = self.chance(at)
                self._seen.append([self._GUESSES * chance, self._GUESSES * (1 - chance)])
            seen = self._seen[at]
            seen[:] = [seen[0] * self.FORGET + right, seen[1] * self.FORGET + (not right)]


class LookupLength(DraftLength):
    """Chooses the length of the next draft by prompt lookup.

    The lookup's guess is known for every token, whether it was drafted or not. So no trials are needed. Chances depend
    on the current streak of right guesses, because text that is being copied usually continues to be copied.
    """

    # For each class: the streak at which it starts, and initial counts of right and wrong guesses.
    CLASSES = ((0, 1.0, 1.0), (1, 1.2, 0.8), (4, 1.8, 0.2), (8, 1.9, 0.1))

    def __init__(self) -> None:
        self._streak = 0
        self._seen = [[right, wrong] for _, right, wrong in self.CLASSES]

    def chance(self, at: int) -> float:
        """Estimated probability that the draft's token `at` is accepted if all before it are."""
        right, wrong = self._class(self._streak + at)
        return right / (right + wrong)

    def guessed(self, right: bool) -> None:
        """Learn whether the lookup's guess for a generated token was right."""
        seen = self._class(self._streak)
        seen[:] = [seen[0] * self.FORGET + right, seen[1] * self.FORGET + (not right)]
        self._streak = self._streak + 1 if right else 0

    def _class(self, streak: int) -> list[float]:
        return self._seen[sum(streak >= first for first, _, _ in self.CLASSES) - 1]


class PromptLookup:
    """Finds the tokens that followed the latest earlier occurrence of the last NGRAM tokens, in prompt or output.

    While its guesses are right it stays at that occurrence: the longer the match, the better the guesses.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._after: dict[tuple[int, ...], int] = {}
        for end in range(NGRAM, len(self._tokens)):
            self._after[tuple(self._tokens[end - NGRAM : end])] = end
        self._next = self._found()

    @property
    def found(self) -> bool:
        """Whether the last tokens occur earlier in the text."""
        return self._next is not None

    def append(self, token_id: int) -> bool | None:
        """Add a token to the searched text; return whether it was the expected one, None if none was expected."""
        end, expected = len(self._tokens), self._next
        if end >= NGRAM:
            self._after[tuple(self._tokens[end - NGRAM : end])] = end
        self._tokens.append(token_id)
        right = None if expected is None else self._tokens[expected] == token_id
        self._next = expected + 1 if expected is not None and right else self._found()
        return right

    def draft(self, length: int) -> list[int]:
        """Return up to `length` guesses of the next tokens; often none."""
        return [] if self._next is None else self._tokens[self._next : self._next + length]

    def _found(self) -> int | None:
        return self._after.get(tuple(self._tokens[-NGRAM:]))


class Speculation:
    """One request's drafts: from its own text by prompt lookup, else from a model.

    drafted and accepted count tokens.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.drafted = self.accepted = 0
        self._lookup = PromptLookup(text)
        self._lookup_length = LookupLength()
        self._by_model: ModelDraftLength | None = None

    @property
    def knows_more(self) -> bool:
        """Whether `look_up` can draft."""
        return self._lookup.found

    def look_up(self, limit: int, costs: StepCosts, others: int) -> list[int]:
        """Draft up to `limit` tokens by prompt lookup. others: further rows of the step."""
        self._by_model = None
        if not self._lookup.found:
            return []
        return self._lookup.draft(self._lookup_length.choose(limit, costs, 0.0, others))

    def wanted_of_model(
        self, length: ModelDraftLength, limit: int, costs: StepCosts, token_s: float, others: int
    ) -> int:
        """How many tokens a model should draft if `look_up` gave none. token_s: its time per drafted token."""
        self._by_model = length
        return length.choose(limit, costs, token_s, others)

    def token(self, token_id: int) -> None:
        """Record a generated token."""
        expected = self._lookup.append(token_id)
        if expected is not None:
            self._lookup_length.guessed(expected)
        if self._by_model:
            self._by_model.token()

    def verified(self, drafted: int, accepted: int) -> None:
        """Record how many tokens of the latest draft were accepted."""
        if self._by_model:
            self._by_model.observe(drafted, accepted)
        self.drafted += drafted
        self.accepted += accepted

    def restart(self, text: Sequence[int]) -> None:
        """Continue with another text."""
        self._lookup = PromptLookup(text)
