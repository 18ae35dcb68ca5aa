"""Speculation with a second, small model: it guesses tokens one by one, which the large one checks in one pass."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.engine.adapters import marked
from localllm.engine.generation import Generation
from localllm.engine.prefix_cache import PrefixCache, common_prefix
from localllm.engine.runner import Runner
from localllm.errors import LocalLLMError, RequestError

log = logging.getLogger(__name__)

# Tokens of a prompt that are read in one go, so that a long one delays nobody's next token much.
CATCH_UP_ROWS = 64


@dataclass(slots=True)
class _Followed:
    """A generation's tokens as the draft model has them, the first `agreed` of which are those of `source`."""

    sequence: int
    tokens: list[int]
    source: list[int]
    agreed: int


class DraftModel:
    """Guesses what comes next, greedily, for generations of another runner. The engine's thread is the only caller.

    It keeps the sequences of its own runner, which it owns: one a running generation, and those of past ones for as
    long as there is room. Both models must have the same tokens; a runner with fewer of them (vocab_size) guesses only
    where none of the others occur.
    """

    def __init__(self, runner: Runner) -> None:
        if not runner.can_truncate:
            raise RequestError("The draft model keeps a state that cannot be cut back. Choose another one.")
        self._runner = runner
        self._cache = PrefixCache(runner)
        self._followed: dict[Generation, _Followed] = {}
        self._broken = False
        self.token_s = 0.0  # time that guessing one token takes

    def guess(self, wanted: Sequence[tuple[Generation, int]]) -> list[list[int]]:
        """Return up to so many tokens for each generation; none while its prompt is still being read, or unfit.

        A runner that fails is used no more, with one warning.
        """
        guesses: dict[Generation, list[int]] = {}
        if not self._broken:
            try:
                self._guess(wanted, guesses)
            except LocalLLMError as error:
                self._broken = True
                log.warning("The draft model is no longer used: %s", error)
        return [guesses.get(generation, []) for generation, _ in wanted]

    def _guess(self, wanted: Sequence[tuple[Generation, int]], guesses: dict[Generation, list[int]]) -> None:
        ready = [(generation, count) for generation, count in wanted if count > 0 and self._follow(generation)]
        guesses |= {generation: [] for generation, _ in ready}
        for at in range(max((count for _, count in ready), default=0)):
            began = time.monotonic()
            if not self._advance([generation for generation, count in ready if at < count], guesses):
                return
            if at:  # the first pass also reads what was accepted
                took = time.monotonic() - began
                self.token_s += (took - self.token_s) * (0.1 if self.token_s else 1.0)

    def forget(self, generation: Generation) -> None:
        """Keep a generation's sequence for the next turn; it has ended or waits again."""
        followed = self._followed.pop(generation, None)
        if followed is None or self._broken:
            return
        self._cache.insert(_key(followed.tokens, generation), followed.sequence)
        while len(self._cache) > self._runner.max_sequences // 2:
            self._cache.drop_oldest()

    def check_integrity(self) -> None:
        """Raise RuntimeError where bookkeeping is wrong."""
        if self._broken:
            return
        self._cache.check_integrity()
        for followed in self._followed.values():
            if self._runner.sequence_length(followed.sequence) != len(followed.tokens):
                raise RuntimeError("the draft model's sequence does not hold what is noted")

    def close(self) -> None:
        """Free everything."""
        self._runner.close()

    def _follow(self, generation: Generation) -> bool:
        """Bring the sequence of a generation up to its last tokens; False if that takes another step, or cannot be."""
        tokens = generation.tokens
        if len(tokens) + 1 > self._runner.max_context:
            return False
        followed = self._followed.get(generation) or self._start(generation)
        self._cut_wrong(followed, tokens)
        missing = len(tokens) - len(followed.tokens)
        if missing <= CATCH_UP_ROWS:
            return True
        self._append([(followed, tokens[len(followed.tokens) :][:CATCH_UP_ROWS])], wanted=False)
        return False

    def _start(self, generation: Generation) -> _Followed:
        key = _key(generation.tokens, generation)
        known = self._cache.match(key[:-1])
        sequence = self._cache.fork(key[:known], known)
        followed = _Followed(sequence, generation.tokens[:known], generation.tokens, known)
        self._followed[generation] = followed
        return followed

    def _cut_wrong(self, followed: _Followed, tokens: list[int]) -> None:
        """Forget the guesses that did not come true, and the last token, whose successor is to be guessed."""
        if followed.source is not tokens:
            followed.source, followed.agreed = tokens, 0
        start = followed.agreed
        agreed = start + common_prefix(followed.tokens[start:], tokens[start:])
        agreed = min(agreed, len(tokens) - 1)
        if agreed < len(followed.tokens):
            self._runner.truncate_sequence(followed.sequence, agreed)
            del followed.tokens[agreed:]
        followed.agreed = agreed

    def _advance(self, active: list[Generation], guesses: dict[Generation, list[int]]) -> bool:
        """Guess one more token for each; False if that cannot be."""
        parts = []
        for generation in active:
            followed = self._followed[generation]
            parts.append((followed, [*generation.tokens, *guesses[generation]][len(followed.tokens) :]))
        chosen = self._append(parts, wanted=True)
        if chosen is None:
            return False
        for generation, token in zip(active, chosen, strict=True):
            guesses[generation].append(token)
        return True

    def _append(self, parts: list[tuple[_Followed, list[int]]], wanted: bool) -> list[int] | None:
        """Compute tokens after each sequence and return the likeliest next one of each; None if there is no room."""
        runner = self._runner
        rows = [token for _, tokens in parts for token in tokens]
        if len(rows) > runner.max_rows or max(rows) >= runner.vocab_size:
            return None
        needed = sum(runner.pages_needed(followed.sequence, len(tokens)) for followed, tokens in parts)
        while (free := runner.pages_free()) < needed:
            if not self._cache.evict(needed - free):
                return None
        positions: list[int] = []
        sequences: list[int] = []
        for followed, tokens in parts:
            positions += range(len(followed.tokens), len(followed.tokens) + len(tokens))
            sequences += [followed.sequence] * len(tokens)
            followed.tokens += tokens
        lasts = [row for row in range(len(rows)) if row + 1 == len(rows) or sequences[row + 1] != sequences[row]]
        logits = runner.run(rows, positions, sequences, lasts if wanted else [])
        return [int(token) for token in logits.argmax(axis=1)]


def _key(tokens: list[int], generation: Generation) -> list[int]:
    """What the prefix cache knows a generation's tokens by; the draft model has no adapters."""
    namespace = generation.request.namespace
    return marked(tokens, (), namespace) if namespace else tokens
