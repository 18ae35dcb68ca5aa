"""Speculative decoding with a draft model: it guesses tokens one by one, which the large one checks in one pass."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.engine.drafter import Drafter
from localllm.engine.prefix_cache import PrefixCache, common_prefix
from localllm.engine.runner import Runner
from localllm.engine.sequence import KeySpace, TokenSequence
from localllm.errors import RequestError

# Tokens of a prompt that are read in one go, so that a long one does not delay other requests' next tokens much.
CATCH_UP_ROWS = 64


@dataclass(slots=True)
class _Followed:
    """A sequence's tokens as the draft model has them, the first `agreed` of which are those of `source`."""

    handle: int
    tokens: list[int]
    source: list[int]
    agreed: int


class DraftModel(Drafter):
    """Guesses what comes next, greedily, for sequences of another runner.

    It owns its runner, and keeps a runner's sequence for each running one, and those of past ones as long as there is
    room. Both models must have the same tokens; a runner with fewer of them (vocab_size) guesses only where none of the
    others occur. clock: the engine's.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        if not runner.info.can_truncate:
            raise RequestError("The draft model keeps a state that cannot be cut back. Choose another one.")
        super().__init__("The draft model", clock)
        self._runner = runner
        self._cache = PrefixCache(runner)
        self._followed: dict[TokenSequence, _Followed] = {}

    def _guess(self, wanted: Sequence[tuple[TokenSequence, int]], guesses: dict[TokenSequence, list[int]]) -> None:
        ready = [(sequence, count) for sequence, count in wanted if self._follow(sequence)]
        guesses |= {sequence: [] for sequence, _ in ready}
        for at in range(max((count for _, count in ready), default=0)):
            began = self._clock()
            if not self._advance([sequence for sequence, count in ready if at < count], guesses):
                return
            if at:  # the first pass also reads what was accepted
                took = self._clock() - began
                self.token_s += (took - self.token_s) * (0.1 if self.token_s else 1.0)

    def forget(self, sequence: TokenSequence) -> None:
        """Keep what is known of a sequence for the next turn; it has ended or waits again."""
        followed = self._followed.pop(sequence, None)
        if followed is None or self._broken:
            return
        self._cache.insert(_space(sequence), followed.tokens, followed.handle)
        while len(self._cache) > self._runner.info.max_sequences // 2:
            self._cache.drop_oldest()

    def check_integrity(self) -> None:
        """Raise RuntimeError where the bookkeeping is wrong."""
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
        """Read a sequence up to its last tokens; False if that takes another step, or cannot be."""
        tokens = sequence.tokens
        if len(tokens) + 1 > self._runner.info.max_context:
            return False
        followed = self._followed.get(sequence) or self._start(sequence)
        self._cut_wrong(followed, tokens)
        missing = len(tokens) - len(followed.tokens)
        if missing <= CATCH_UP_ROWS:
            return True
        self._append([(followed, tokens[len(followed.tokens) :][:CATCH_UP_ROWS])], wanted=False)
        return False

    def _start(self, sequence: TokenSequence) -> _Followed:
        space, tokens = _space(sequence), sequence.tokens
        known = self._cache.match(space, tokens[:-1])
        handle = self._cache.fork(space, tokens, known) if known else self._runner.create_sequence()
        followed = self._followed[sequence] = _Followed(handle, tokens[:known], tokens, known)
        return followed

    def _cut_wrong(self, followed: _Followed, tokens: list[int]) -> None:
        """Forget the guesses that did not come true, and the last token, whose successor is to be guessed."""
        if followed.source is not tokens:
            followed.source, followed.agreed = tokens, 0
        start = followed.agreed
        agreed = start + common_prefix(followed.tokens[start:], tokens[start:])
        agreed = min(agreed, len(tokens) - 1)
        if agreed < len(followed.tokens):
            self._runner.truncate_sequence(followed.handle, agreed)
            del followed.tokens[agreed:]
        followed.agreed = agreed

    def _advance(self, active: list[TokenSequence], guesses: dict[TokenSequence, list[int]]) -> bool:
        """Guess one more token for each; False if that cannot be."""
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
        """Compute tokens after each sequence and return the likeliest next one of each; None if there is no room."""
        runner = self._runner
        rows = [token for _, tokens in parts for token in tokens]
        if len(rows) > runner.info.max_rows or max(rows) >= runner.info.vocab_size:
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
