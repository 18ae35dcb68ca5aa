"""Speculative decoding: prompt lookup, and the choice of draft lengths.

Prompt lookup needs no second model: the tokens that followed the same text before probably follow it again. The draft
length depends on step costs and on the acceptance rate, and on how sure a model is of the tokens that it drafts.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from localllm.engine.step_costs import StepCosts

MAX_DRAFT = 15
NGRAM = 3

Likelihoods = tuple[float, ...]
"""For each token of a draft, how likely those before it must be. A likelihood is the product of their probabilities, as
the model that drafts estimates them."""


class Draft(NamedTuple):
    """What a draft's length depends on.

    drafting_s: time to draft one token. others: further sequences that decode in the step. reading_s: the least time to
    read before a draft. generated: tokens of the answer so far. start_s: further time that a draft takes.
    """

    costs: StepCosts
    drafting_s: float
    others: int
    reading_s: float
    generated: int
    start_s: float


class DraftLength:
    """Chooses the length of the next draft from the acceptance probabilities that `chance` estimates."""

    def chance(self, at: int) -> float:
        """Estimated probability that the draft's token `at` is accepted if all before it are."""
        raise NotImplementedError

    def choose(
        self,
        limit: int,
        costs: StepCosts,
        drafting_s: float = 0.0,
        others: int = 0,
        reading_s: float = 0.0,
        generated: int = 0,
        start_s: float = 0.0,
    ) -> int:
        """Tokens to draft, 0 to `limit`. The others are the fields of a Draft."""
        if limit <= 0:
            return 0
        draft = Draft(costs, drafting_s, others, reading_s, generated, start_s)
        return self._choose(min(limit, MAX_DRAFT), draft)

    def _choose(self, most: int, draft: Draft) -> int:
        raise NotImplementedError


class ModelDraftLength(DraftLength):
    """Chooses the length of a model's next draft, for all requests that it drafts for."""

    # The probability that a model gives to a token that it drafts tells best whether it is accepted: one with 0.99
    # nearly always is. So a token after the first is drafted only where those before it are likely enough for it to
    # pay. The statistics are means of these probabilities, by position, since later tokens are accepted less often; a
    # position never reached has that of the one before it. They vary less than what is accepted, so few are enough.
    # How far they can be trusted is one number: accepted tokens for each that was promised. Tokens of the answer that
    # the model reads before it drafts count, too.
    # What drafts may lose is limited by two balances in plain steps, which grow a little in each step and change by
    # what drafts gained or lost against plain steps. A draft may lose a part of the first should all of it be rejected:
    # that holds what the answer gained, so bad luck ends drafts only where they had gained little. A draft that is not
    # expected to pay is a trial, and the second balance must cover its expected loss: trials that nearly pay go on
    # until the statistics are good, and hopeless ones cost almost nothing.
    # Text that is new to the model must be read before it can draft. That may take what the draft leaves of its balance
    # or, where drafts are known to pay, a part of the gain that is expected of the rest of the answer.

    FORGET = 0.97
    PAYS = 1.05  # the least gain: speed with drafts over speed without
    SURE = 16.0  # observations of the first position after which a gain is known; an earlier process's weigh no more
    TRIALS, RECOVERS = 0.005, 0.015  # what balances grow by in each step; the second where the gain is known
    FIRST, MOST = 2.2, 8.0  # the balance when an answer begins, and at most
    RISKED = 0.6  # part of the balance that one draft may lose
    FIRST_TRIALS, MOST_TRIALS = 0.5, 1.0  # the same of trials
    KNOWN_PART = 1 / 3  # of the expected gain, for reading
    AHEAD = 64  # an answer is expected to have so many further tokens, or as many as it has
    _FIRST_CHANCE, _GUESSES = 0.75, 2.0  # of the first position; each one's initial weight
    _PROMISED = 4.0  # initial weight of the trust that probabilities are right
    _COST = 0.3  # of drafting a token, in plain steps, until it is known

    def __init__(self, learned: Mapping[str, Sequence[float]] = MappingProxyType({})) -> None:
        """learned: by an earlier process, see `learned`."""
        self._seen = [  # of each position reached: judged tokens, and the sum of their probabilities
            [weight, weight * min(mean, 1.0)]
            for mean, judged in zip(learned.get("means", ()), learned.get("weights", ()), strict=False)
            if (weight := min(judged, self.SURE)) > 0
        ]
        self._promised = self._PROMISED  # the sum of all judged tokens' probabilities
        self._right = self._PROMISED * min(next(iter(learned.get("trust", ())), 1.0), 2.0)  # how many were accepted
        self._cost = next(iter(learned.get("token", ())), self._COST)
        self._trials = next(iter(learned.get("trials", ())), self.FIRST_TRIALS)
        self._balance = self.FIRST
        self.affordable_s = math.inf
        self._pays = False  # by the latest estimate
        self.least: Likelihoods = (0.0,) * MAX_DRAFT

    def learned(self) -> dict[str, list[float]]:
        """What the next process begins with. In plain steps: the time to draft a token, and what trials may lose."""
        return {
            "means": [total / weight for weight, total in self._seen],
            "weights": [weight for weight, _ in self._seen],
            "trust": [self._trust],
            "token": [self._cost],
            "trials": [self._trials],
        }

    def chance(self, at: int) -> float:
        """Estimated probability that the draft's token `at` is accepted if all before it are."""
        if not self._seen:
            return self._FIRST_CHANCE
        weight, total = self._seen[min(at, len(self._seen) - 1)]
        return min(self._trust * total / weight, 1.0)

    def _choose(self, most: int, draft: Draft) -> int:
        """The most tokens that may be drafted, 0 for none. Sets affordable_s and least.

        The other sequences are expected to draft as many, with drafting_s for all.
        """
        costs, drafting_s, others, reading_s, generated, start_s = draft
        sequences = others + 1
        if not costs.largest or costs.is_old(sequences):
            return 0
        ahead = max(self.AHEAD, generated) if most == MAX_DRAFT else most
        plain = costs.remembered(sequences)
        if drafting_s:
            self._cost = drafting_s / plain
        # Costs far beyond the measured ones are guesses.
        most = min(most, max(2 * costs.largest // sequences - 1, 1))
        best, best_gain, best_spent, best_expected = 0, 0.0, 1.0, 1.0
        expected = likely = step = 1.0
        least: list[float] = []
        for count in range(1, most + 1):
            before, step = step, (costs.remembered(sequences * (1 + count)) + start_s) / plain
            spent = step + count * self._cost
            if spent - 1 > self._balance * self.RISKED:
                break
            chance = self.chance(count - 1)
            # A further token pays if it is expected to save more than it takes.
            pays = (max(step - before, 0.0) + self._cost) / max(chance * self._trust ** len(least), 1e-9)
            least.append(pays if least else 0.0)
            likely *= chance
            expected += likely
            if expected > best_gain * spent:
                best, best_gain, best_spent, best_expected = count, expected / spent, spent, expected
        self._pays = best_gain >= self.PAYS
        if not self._pays:
            del least[best:]
            affordable = self._trials - max(best_spent - best_expected, 0.0)
        elif self._is_sure:
            affordable = max(self._trials, (1 - 1 / best_gain) * ahead * self.KNOWN_PART)
        else:
            affordable = self._balance - (best_spent - 1)
        worth = (1 + max(best_gain, 1.0)) / 2  # of the time: half of the gain, which sure tokens make look larger
        self.affordable_s, self.least = affordable * plain, tuple(worth * each for each in least)
        return len(least) if reading_s <= self.affordable_s else 0

    def observe(self, probabilities: Sequence[float], accepted: int) -> None:
        """Learn from a verified draft. probabilities: of its tokens, as the model that drafted estimated them."""
        for at, probability in enumerate(probabilities[: accepted + 1]):
            if at == len(self._seen):
                before = self._seen[-1] if self._seen else (1.0, self._FIRST_CHANCE)
                self._seen.append([self._GUESSES, self._GUESSES * before[1] / before[0]])
            weight, total = self._seen[at]
            self._seen[at][:] = weight * self.FORGET + 1, total * self.FORGET + probability
            self._promised = self._promised * self.FORGET + probability
            self._right = self._right * self.FORGET + (at < accepted)

    def stepped(self, plain: float, lost_s: float = 0.0, read_s: float = 0.0) -> None:
        """Record a decoding step.

        plain: seconds of one without drafts. lost_s: time that drafts lost, or gained. read_s: time that reading for
        them took, which is no loss where drafts are known to pay.
        """
        gained = -(lost_s + (0.0 if self._is_sure and self._pays else read_s)) / plain
        recovers = self.RECOVERS if self._is_sure else self.TRIALS
        self._balance = min(max(self._balance + gained, 0.0) + recovers, self.MOST)
        self._trials = min(max(self._trials + gained, 0.0) + self.TRIALS, self.MOST_TRIALS)

    def ended(self) -> None:
        """Record the end of an answer. What it gained or lost is not the next one's."""
        self._balance = self.FIRST

    @property
    def _trust(self) -> float:
        return self._right / self._promised

    @property
    def _is_sure(self) -> bool:
        return bool(self._seen) and self._seen[0][0] >= self.SURE - 1e-6


class LookupLength(DraftLength):
    """Chooses the length of the next draft by prompt lookup.

    The lookup's guess is known for every token, whether it was drafted or not. So no trials are needed. Chances depend
    on the current streak of right guesses, because text that is being copied usually continues to be copied.
    """

    FORGET = 0.9
    # A smaller gain is not worth the risk of a wrong measurement.
    LEAST_GAIN = 1.05
    # For each class: the streak at which it starts, and initial counts of right and wrong guesses.
    CLASSES = ((0, 1.0, 1.0), (1, 1.2, 0.8), (4, 1.8, 0.2), (8, 1.9, 0.1))

    def __init__(self) -> None:
        self._streak = 0
        self._seen = [[right, wrong] for _, right, wrong in self.CLASSES]

    def chance(self, at: int) -> float:
        """Estimated probability that the draft's token `at` is accepted if all before it are."""
        right, wrong = self._class(self._streak + at)
        return right / (right + wrong)

    def _choose(self, most: int, draft: Draft) -> int:
        """The number with the most expected tokens per second. The other sequences are expected to draft nothing."""
        costs, rows = draft.costs, draft.others + 1
        plain = 1 / costs.seconds(rows)
        best, best_gain = 0, self.LEAST_GAIN
        expected = likely = 1.0
        for count in range(1, most + 1):
            likely *= self.chance(count - 1)
            expected += likely
            if expected + likely * (most - count) <= best_gain:  # no longer draft can win, even if its rows were free
                break
            gain = expected / costs.seconds(rows + count) / plain
            if gain > best_gain:
                best, best_gain = count, gain
        return best

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
        self._by_model: tuple[ModelDraftLength, Sequence[float]] | None = None

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

    def by_model(self, length: ModelDraftLength, probabilities: Sequence[float]) -> None:
        """The next draft is a model's, whose lengths `length` chooses. probabilities: of its tokens."""
        self._by_model = length, probabilities

    def token(self, token_id: int) -> None:
        """Record a generated token."""
        expected = self._lookup.append(token_id)
        if expected is not None:
            self._lookup_length.guessed(expected)

    def verified(self, drafted: int, accepted: int) -> None:
        """Record how many tokens of the latest draft were accepted."""
        if self._by_model:
            length, probabilities = self._by_model
            length.observe(probabilities[:drafted], accepted)
        self.drafted += drafted
        self.accepted += accepted

    def restart(self, text: Sequence[int]) -> None:
        """Continue with another text."""
        self._lookup = PromptLookup(text)
