"""Drafters: the scheduler's interface to them, the model that drafts for itself, and a separate draft model."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.engine.prefix_cache import PrefixCache, common_prefix
from localllm.engine.runner import DraftsItself, Runner, reusable
from localllm.engine.sequence import KeySpace, TokenSequence
from localllm.engine.speculation import ModelDraftLength
from localllm.errors import RequestError

log = logging.getLogger(__name__)

# Prompt tokens read per call, so that a long prompt does not delay other requests' next tokens much.
CATCH_UP_ROWS = 64


class Drafter(ABC):
    """Drafts the next tokens of sequences. The engine's thread is the only caller.

    length: chooses draft lengths. token_s: time to draft one token, 0 until it is known. name: for log messages. clock:
    the engine's.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.length = ModelDraftLength()
        self.token_s = 0.0
        self._name, self._clock = name, clock
        self._broken = False

    def guess(self, wanted: Sequence[tuple[TokenSequence, int]]) -> list[list[int]]:
        """Return up to the given number of draft tokens for each sequence, which must have one pending token.

        After a failure, logs one warning and never drafts again.
        """
        guesses: dict[TokenSequence, list[int]] = {}
        if not self._broken:
            try:
                self._guess([(sequence, count) for sequence, count in wanted if count > 0], guesses)
            except Exception as error:  # answers continue without drafts, whatever the failure
                self._broken = True
                log.warning("%s is no longer used: %s", self._name, error)
        return [guesses.get(sequence, []) for sequence, _ in wanted]

    @abstractmethod
    def _guess(self, wanted: Sequence[tuple[TokenSequence, int]], guesses: dict[TokenSequence, list[int]]) -> None:
        """Put drafts into `guesses`, for the sequences that have one."""

    def _learn(self, seconds: float) -> None:
        """Learn from the time that drafting one token took."""
        self.token_s += (seconds - self.token_s) * (0.1 if self.token_s else 1.0)

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

    def _guess(self, wanted: Sequence[tuple[TokenSequence, int]], guesses: dict[TokenSequence, list[int]]) -> None:
        asked = [
            (sequence.handle, sequence.tokens[-1], count) for sequence, count in wanted if sequence.handle is not None
        ]
        if not asked:
            return
        began = self._clock()
        self._runner.follow(asked)  # slow for new text, so not part of token_s
        read = self._clock() - began
        self.length.reading_s = max(read, 0.9 * self.length.reading_s)
        began += read
        found = self._runner.draft(asked)
        self._learn((self._clock() - began) / max(count for _, _, count in asked))
        guesses |= zip((sequence for sequence, _ in wanted if sequence.handle is not None), found, strict=True)


@dataclass(slots=True)
class _Followed:
    """A sequence's tokens in the draft model. The first `agreed` equal those of `source`."""

    handle: int
    tokens: list[int]
    source: list[int]
    agreed: int


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

    def _guess(self, wanted: Sequence[tuple[TokenSequence, int]], guesses: dict[TokenSequence, list[int]]) -> None:
        # The last drafted token takes no position.
        most = self._runner.info.max_context + 1
        ready = [(each, min(count, most - len(each.tokens))) for each, count in wanted if self._follow(each)]
        guesses |= {sequence: [] for sequence, _ in ready}
        for at in range(max((count for _, count in ready), default=0)):
            began = self._clock()
            if not self._advance([sequence for sequence, count in ready if at < count], guesses):
                return
            if at:  # the first pass also reads accepted tokens
                self._learn(self._clock() - began)

    def forget(self, sequence: TokenSequence) -> None:
        """Stop following a sequence that has ended or waits again; cache its KV for the next turn."""
        followed = self._followed.pop(sequence, None)
        if followed is None or self._broken:
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

    def _follow(self, sequence: TokenSequence) -> bool:
        """Read a sequence up to its last tokens; False if that takes another step, or is impossible."""
        tokens = sequence.tokens
        if len(tokens) + 1 > self._runner.info.max_context:
            return False
        followed = self._followed.get(sequence) or self._start(sequence)
        self._cut_wrong(followed, tokens)
        missing = tokens[len(followed.tokens) :]
        ahead = missing[:CATCH_UP_ROWS]
        if max(ahead) >= self._runner.info.vocab_size:  # an image, or a token that only the large model has
            return False
        if len(missing) > len(ahead):
            self._append([(followed, ahead)], wanted=False)
        return len(missing) == len(ahead)

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
        start = followed.agreed
        agreed = start + common_prefix(followed.tokens[start:], tokens[start:])
        agreed = min(agreed, len(tokens) - 1)
        agreed = reusable(self._runner, followed.handle, agreed)
        if agreed < len(followed.tokens):
            self._runner.truncate_sequence(followed.handle, agreed)
            del followed.tokens[agreed:]
        followed.agreed = agreed

    def _advance(self, active: list[TokenSequence], guesses: dict[TokenSequence, list[int]]) -> bool:
        """Draft one more token for each; False if there is no room."""
        parts = []
        for sequence in active:
            followed = self._followed[sequence]
            parts.append((followed, [*sequence.tokens, *guesses[sequence]][len(followed.tokens) :]))
        chosen = self._append(parts, wanted=True)
        if chosen is None:
            return False
        for sequence, token in zip(active, chosen, strict=True):
            guesses[sequence].append(token)
        return True

    def _append(self, parts: list[tuple[_Followed, list[int]]], wanted: bool) -> list[int] | None:
        """Append tokens to each sequence and return the most likely next one of each; None if there is no room."""
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
        lasts = [row for row in range(len(rows)) if row + 1 == len(rows) or sequences[row + 1] != sequences[row]]
        logits = runner.run(rows, positions, sequences, lasts if wanted else [])
        return [int(token) for token in logits.argmax(axis=1)]


def _space(sequence: TokenSequence) -> KeySpace:
    """The draft model has no adapters."""
    return KeySpace(namespace=sequence.space.namespace)
