"""Models that draft: what the scheduler asks of one, and the model that drafts for itself."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from localllm.engine.runner import DraftsItself
from localllm.engine.sequence import TokenSequence
from localllm.engine.speculation import ModelDraftLength

log = logging.getLogger(__name__)


class Drafter(ABC):
    """Guesses what comes next in sequences. The engine's thread is the only caller.

    length: how long its next drafts should be. token_s: time that guessing one token takes, 0 until it is known. name:
    for people. clock: the engine's.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.length = ModelDraftLength()
        self.token_s = 0.0
        self._name, self._clock = name, clock
        self._broken = False

    def guess(self, wanted: Sequence[tuple[TokenSequence, int]]) -> list[list[int]]:
        """Return up to the given number of tokens for each sequence, which wants one token only.

        After a failure nothing is guessed any more, with one warning.
        """
        guesses: dict[TokenSequence, list[int]] = {}
        if not self._broken:
            try:
                self._guess([(sequence, count) for sequence, count in wanted if count > 0], guesses)
            except Exception as error:  # answers go on without drafts, whatever is wrong with these
                self._broken = True
                log.warning("%s is no longer used: %s", self._name, error)
        return [guesses.get(sequence, []) for sequence, _ in wanted]

    @abstractmethod
    def _guess(self, wanted: Sequence[tuple[TokenSequence, int]], guesses: dict[TokenSequence, list[int]]) -> None:
        """Put guesses into `guesses`, as far as there are any."""

    def forget(self, sequence: TokenSequence) -> None:  # noqa: B027 - most keep nothing of sequences
        """Keep what is known of a sequence for the next turn; it has ended or waits again."""

    def check_integrity(self) -> None:  # noqa: B027
        """Raise RuntimeError where the bookkeeping is wrong."""

    def close(self) -> None:  # noqa: B027
        """Free everything that is its own."""


class SelfDrafter(Drafter):
    """Has the runner guess that also computes the answers, with a layer of multi-token prediction or a head."""

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
        self._runner.follow(asked)  # of a text that is new, much: no measure of what later drafts cost
        read = self._clock() - began
        self.length.reading_s = max(read, 0.9 * self.length.reading_s)
        began += read
        found = self._runner.draft(asked)
        took = (self._clock() - began) / max(count for _, _, count in asked)
        self.token_s += (took - self.token_s) * (0.1 if self.token_s else 1.0)
        guesses |= zip((sequence for sequence, _ in wanted if sequence.handle is not None), found, strict=True)
