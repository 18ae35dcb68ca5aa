"""Drafters: the scheduler's interface to them, the model that drafts for itself, and a separate draft model."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple, TypeGuard

from cpu_kernels.choices import likeliest
from localllm.engine.measured import Measured
from localllm.engine.prefix_cache import PrefixCache, common_prefix
from localllm.engine.runner import DraftsItself, Runner, reusable
from localllm.engine.sequence import KeySpace, TokenSequence
from localllm.engine.speculation import MAX_DRAFT, Likelihoods, ModelDraftLength
from localllm.engine.step_costs import StepCosts
from localllm.errors import RequestError

log = logging.getLogger(__name__)

# Prompt tokens read per call, so that a long prompt does not delay other requests' next tokens much.
CATCH_UP_ROWS = 64
# The least text before a draft, in tokens, where reading all of it may not pay.
LEAST_READ = 16
# A sequence whose drafter has read all but so many tokens needs no reading before a draft.
AT_ONCE = 2
# The most tokens of an answer, read before a draft, that tell how well the model would have drafted them.
JUDGED = 16

Guess = tuple[int, float]
"""A drafted token, and its probability as the drafter estimates it."""


class Wanted(NamedTuple):
    """A draft to make: for which sequence, when to draft each token, after at most so many seconds of reading."""

    sequence: TokenSequence
    least: Likelihoods
    reading_s: float


class Drafter(ABC):
    """Drafts the next tokens of sequences. The engine's thread is the only caller.

    costs: of the steps that check drafts. length: chooses draft lengths. token_s: time to draft one token, 0 until it
    is known. start_s: further time that a draft takes. read_s: the part of the last guess's time in which text was
    read. name: for log messages. clock: the engine's.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.costs, self.length = StepCosts(), ModelDraftLength()
        self.token_s = self.start_s = self.read_s = 0.0
        self._name, self._clock = name, clock
        self._broken = False
        self._kept: Measured | None = None

    def recall(self, kept: Measured) -> None:
        """Begin with what earlier processes learned, and keep there what this one learns."""
        self._kept = kept
        before = {name: values for name, values in kept.read().items() if _are_costs(values)}
        steps = before.get("steps", ())
        self.costs, self.length = StepCosts(steps if all(steps) else ()), ModelDraftLength(before)

    def keep(self) -> None:
        """Store what was learned for the next process."""
        if self._kept is not None and self.costs.largest:
            self._kept.write({"steps": self.costs.ratios} | self.length.learned())

    def guess(self, wanted: Sequence[Wanted]) -> list[list[Guess]]:
        """Return drafts, each for a sequence that has one pending token; some may be shorter than wanted, or empty.

        After a failure, logs one warning and never drafts again.
        """
        guesses: dict[TokenSequence, list[Guess]] = {}
        self.read_s = 0.0
        if not self._broken:
            began = self._clock()
            try:
                self._guess(wanted, guesses)
            except Exception as error:  # answers continue without drafts, whatever the failure
                self._broken = True
                log.warning("%s is no longer used: %s", self._name, error)
            drafted = self.token_s * max(map(len, guesses.values()), default=0)
            if drafted:
                self.start_s += 0.1 * (max(self._clock() - began - self.read_s - drafted, 0.0) - self.start_s)
        return [guesses.get(one.sequence, []) for one in wanted]

    @abstractmethod
    def _guess(self, wanted: Sequence[Wanted], guesses: dict[TokenSequence, list[Guess]]) -> None:
        """Put drafts into `guesses`, for the sequences that have one."""

    @abstractmethod
    def reading_s(self, sequence: TokenSequence) -> float:
        """Estimated least time to read text before it can draft for a sequence."""

    def _learn(self, seconds: float) -> None:
        """Learn from the time that drafting one token took."""
        share = 0.1 if seconds > self.token_s else 0.5  # other programs only ever add to it
        self.token_s += (seconds - self.token_s) * (share if self.token_s else 1.0)

    def forget(self, sequence: TokenSequence) -> None:  # noqa: B027 - most keep nothing of sequences
        """Stop following a sequence that has ended or waits again; its KV may be kept for the next turn."""

    def check_integrity(self) -> None:  # noqa: B027
        """Raise RuntimeError if the bookkeeping is inconsistent."""

    def close(self) -> None:  # noqa: B027
        """Free everything that the drafter owns."""


class SelfDrafter(Drafter):
    """Drafts with the runner that computes the answers, by a multi-token prediction layer or a head."""

    def __init__(self, runner: DraftsItself, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("The layer that drafts", clock)
        self._runner = runner

        self._read_to: dict[TokenSequence, int] = {}  # how many tokens a sequence had when it was last drafted for
        self._slowest_s = 0.0  # of late, to read text

    def reading_s(self, sequence: TokenSequence) -> float:
        """Nothing for a sequence that was drafted for just now, else what reading took of late."""
        return self._slowest_s if self._is_new(sequence) else 0.0

    def _is_new(self, sequence: TokenSequence) -> bool:
        return len(sequence.tokens) > self._read_to.get(sequence, 0) + MAX_DRAFT + 1

    def _guess(self, wanted: Sequence[Wanted], guesses: dict[TokenSequence, list[Guess]]) -> None:
        asked, owners = [], []
        for sequence, least, _ in wanted:
            if sequence.handle is not None:
                asked.append((sequence.handle, sequence.tokens[-1], least))
                owners.append(sequence)
        if not asked:
            return
        began = self._clock()
        self._runner.follow(asked)  # slow for new text, so not part of token_s
        read = self._clock() - began
        if any(map(self._is_new, owners)):
            self.read_s = read
            self._slowest_s = max(read, 0.9 * self._slowest_s)
        began += read
        found = self._runner.draft(asked)
        self._learn((self._clock() - began) / max(1, *map(len, found)))
        self._read_to |= {sequence: len(sequence.tokens) for sequence in owners}
        guesses |= zip(owners, found, strict=True)

    def forget(self, sequence: TokenSequence) -> None:
        """Stop following a sequence."""
        self._read_to.pop(sequence, None)


@dataclass(slots=True)
class _Followed:
    """A sequence's tokens in the draft model: those of `source` from `start` on, of which the first `agreed` are right.

    start is above 0 where reading all of the text was not expected to pay.
    """

    handle: int
    tokens: list[int]
    source: list[int]
    agreed: int
    start: int = 0

    @property
    def unread(self) -> int:
        """Tokens of the source to read, if those that were drafted are wrong."""
        return len(self.source) - self.start - self.agreed


class DraftModel(Drafter):
    """Drafts greedily, with a model of its own, for sequences of another runner.

    It owns its runner. It keeps one of the runner's sequences for each running request, and those of past ones while
    there is room. Both models must have the same tokens. A runner with a smaller vocab_size drafts only for texts
    without the missing tokens. clock: the engine's.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        if not runner.info.can_truncate:
            raise RequestError("The draft model keeps a state that cannot be cut back. Choose another one.")
        super().__init__("The draft model", clock)
        self._runner = runner
        self._cache = PrefixCache(runner)
        self._followed: dict[TokenSequence, _Followed] = {}
        self._row_s = 0.0  # to read one of many tokens
        self._measure()

    def _measure(self) -> None:
        """Learn what reading and drafting take, once the weights are in memory."""
        for _ in range(2):
            self._row_s = self.token_s = 0.0
            followed = _Followed(self._runner.create_sequence(), [], [], 0)
            self._append([(followed, [0] * LEAST_READ)], [0])
            for _ in range(2):
                self._append([(followed, [0])], [1])
            self._runner.free_sequence(followed.handle)

    def reading_s(self, sequence: TokenSequence) -> float:
        """The time to read the text that is new to the model, or the end of it."""
        followed = self._followed.get(sequence)
        unread = followed.unread if followed and followed.source is sequence.tokens else len(sequence.tokens)
        return min(unread, LEAST_READ) * self._row_s if unread > MAX_DRAFT + AT_ONCE else 0.0

    def _guess(self, wanted: Sequence[Wanted], guesses: dict[TokenSequence, list[Guess]]) -> None:
        # The last drafted token takes no position.
        most = self._runner.info.max_context + 1
        active = {
            each: least[: most - len(each.tokens)] for each, least, seconds in wanted if self._follow(each, seconds)
        }
        ready = len(active)
        likely = dict.fromkeys(active, 1.0)
        guesses |= {sequence: [] for sequence in active}
        for at in range(MAX_DRAFT):
            share = len(active) / max(ready, 1)
            active = {
                sequence: least
                for sequence, least in active.items()
                if at < len(least) and likely[sequence] * share >= least[at]
            }
            if not active or not self._advance([*active], guesses):
                return
            for sequence in active:
                likely[sequence] *= guesses[sequence][-1][1]

    def forget(self, sequence: TokenSequence) -> None:
        """Stop following a sequence that has ended or waits again; cache its KV for the next turn."""
        followed = self._followed.pop(sequence, None)
        if followed is None or self._broken:
            return
        if followed.start:
            self._runner.free_sequence(followed.handle)
            return
        self._cache.insert(_space(sequence), followed.tokens, followed.handle)
        while len(self._cache) > self._runner.info.max_sequences // 2:
            self._cache.drop_oldest()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the bookkeeping is inconsistent."""
        if self._broken:
            return
        owned = self._cache.check_integrity()
        for followed in self._followed.values():
            if self._runner.sequence_length(followed.handle) != len(followed.tokens):
                raise RuntimeError("the draft model's sequence does not hold what is noted")
            owned.add(followed.handle)
        self._runner.check_integrity(owned)

    def close(self) -> None:
        """Free everything."""
        self._runner.close()

    def _follow(self, sequence: TokenSequence, seconds: float) -> bool:
        """Read a sequence up to its last tokens; False if that takes another step, or is impossible.

        seconds: what reading may take. If all that is missing takes longer, only the end of the text is read.
        """
        tokens = sequence.tokens
        if len(tokens) + 1 > self._runner.info.max_context:
            return False
        followed = self._followed.get(sequence) or self._start(sequence)
        self._cut_wrong(followed, tokens)
        self._skip(followed, seconds)
        missing = tokens[followed.start + len(followed.tokens) :]
        ahead = missing[: min(CATCH_UP_ROWS, self._runner.info.max_rows)]
        if max(ahead) >= self._runner.info.vocab_size:  # an image, or a token that only the large model has
            return False
        if len(missing) > len(ahead):
            self._append([(followed, ahead)], [0])
            followed.agreed = len(followed.tokens)
        return len(missing) == len(ahead)

    def _skip(self, followed: _Followed, seconds: float) -> None:
        """Begin again nearer to the text's end if reading all takes too long, or farther from it if time allows."""
        room = len(followed.source)
        if seconds < math.inf:
            room = max(int(min(seconds / self._row_s, room)), LEAST_READ) if self._row_s else LEAST_READ
        known = len(followed.source) - followed.start
        if (room < followed.unread and followed.unread > MAX_DRAFT + AT_ONCE) or (followed.start and room >= 2 * known):
            self._runner.truncate_sequence(followed.handle, 0)
            followed.tokens, followed.agreed = [], 0
            followed.start = max(len(followed.source) - room, 0)

    def _start(self, sequence: TokenSequence) -> _Followed:
        space, tokens = _space(sequence), sequence.tokens
        known = self._cache.usable(space, tokens[:-1])
        handle = self._cache.fork(space, tokens, known) if known else self._runner.create_sequence()
        followed = self._followed[sequence] = _Followed(handle, tokens[:known], tokens, known)
        return followed

    def _cut_wrong(self, followed: _Followed, tokens: list[int]) -> None:
        """Truncate rejected drafts, and the last token, which is computed again to draft its successor."""
        if followed.source is not tokens:
            followed.source, followed.agreed = tokens, 0
            followed.start = min(followed.start, len(tokens) - 1)
        first = followed.start
        agreed = followed.agreed
        agreed += common_prefix(followed.tokens[agreed:], tokens[first + agreed :])
        agreed = min(agreed, len(tokens) - first - 1)
        agreed = reusable(self._runner, followed.handle, agreed)
        if agreed < len(followed.tokens):
            self._runner.truncate_sequence(followed.handle, agreed)
            del followed.tokens[agreed:]
        followed.agreed = agreed

    def _advance(self, active: list[TokenSequence], guesses: dict[TokenSequence, list[Guess]]) -> bool:
        """Draft one more token for each; False if there is no room."""
        parts, wanted = [], []
        for sequence in active:
            followed = self._followed[sequence]
            text = [*sequence.tokens, *(token for token, _ in guesses[sequence])]
            missing = text[followed.start + len(followed.tokens) :]
            parts.append((followed, missing))
            wanted.append(1 + min(sequence.generated, len(missing) - 1, JUDGED if len(missing) > AT_ONCE else 0))
        chosen = self._append(parts, wanted)
        if chosen is None:
            return False
        for sequence, (_, text), found in zip(active, parts, chosen, strict=True):
            if not guesses[sequence]:
                self._followed[sequence].agreed = len(self._followed[sequence].tokens)
            *before, guess = found
            for (token, probability), came in zip(before, text[len(text) - len(before) :], strict=True):
                self.length.observe([probability], token == came)
            guesses[sequence].append(guess)
        return True

    def _append(self, parts: list[tuple[_Followed, list[int]]], wanted: list[int]) -> list[list[Guess]] | None:
        """Append tokens to each sequence; return the likeliest ones after the last `wanted` tokens of each.

        Returns None if there is no room.
        """
        runner = self._runner
        rows = [token for _, tokens in parts for token in tokens]
        if len(rows) > runner.info.max_rows:
            return None
        needed = sum(runner.pages_needed(followed.handle, len(tokens)) for followed, tokens in parts)
        while (free := runner.pages_free()) < needed:
            if not self._cache.evict(needed - free):
                return None
        positions: list[int] = []
        sequences: list[int] = []
        for followed, tokens in parts:
            positions += range(len(followed.tokens), len(followed.tokens) + len(tokens))
            sequences += [followed.handle] * len(tokens)
            followed.tokens += tokens
        ends = [*accumulate(len(tokens) for _, tokens in parts)]
        lasts = [row for end, count in zip(ends, wanted, strict=True) for row in range(end - count, end)]
        began = self._clock()
        chosen = iter(likeliest(runner.run(rows, positions, sequences, lasts)))
        took = self._clock() - began
        if len(rows) == len(parts):
            self._learn(took)
        elif len(rows) > AT_ONCE * len(parts):
            self.read_s += took
        if len(rows) >= LEAST_READ * len(parts):
            self._row_s += (took / len(rows) - self._row_s) * (0.3 if self._row_s else 1.0)
        return [[*islice(chosen, count)] for count in wanted]


def _space(sequence: TokenSequence) -> KeySpace:
    """The draft model has no adapters."""
    return KeySpace(namespace=sequence.space.namespace)


def _are_costs(values: object) -> TypeGuard[list[float]]:
    """Whether they are what `keep` stored: numbers, none of them negative or infinite."""
    return isinstance(values, list) and all(isinstance(each, float) and 0 <= each < math.inf for each in values)
