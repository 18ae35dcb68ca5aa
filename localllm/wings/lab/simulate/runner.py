"""A Runner that computes nothing: real page accounting, made-up tokens, and time on a virtual clock."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from gguf_io.runner_info import AdapterSet, RunnerInfo
from localllm.wings.lab.simulate.costs import StepTimes

VOCABULARY = 16_384
PAGE = 16
_SEQUENCES = 1024
_MIX = 2654435761  # Knuth's multiplicative hash
_EXACT = 1 << 16
_PRIME, _ROOT = 16_381, 5005  # a prime and one of its primitive roots: texts repeat after _PRIME - 1 tokens


class VirtualClock:
    """A clock that moves only by `advance`, and along with another clock if one is given."""

    def __init__(self, other: Callable[[], float] | None = None) -> None:
        self._other = other or (lambda: 0.0)
        self._added = -self._other()

    def __call__(self) -> float:
        """Seconds since the beginning."""
        return self._other() + self._added

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._added += seconds


class SimulatedVocabulary:
    """Every token is a character, and none ends an answer."""

    eog_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        """The same byte for all tokens."""
        return b"x"


def next_token(token: int) -> int:
    """The token that follows a token, wherever it is: a draft model may have read the end of a text only."""
    return (token * _ROOT) % _PRIME or 1


@dataclass(slots=True)
class RunnerUse:
    """A runner's work so far. Seconds are virtual.

    kv_seconds: integral over time of the share of pages that a step's sequences hold. kv_peak: the highest share.
    """

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    kv_seconds: float = 0.0
    kv_peak: float = 0.0


class SimulatedRunner:
    """Implements localllm.engine.runner.Runner; `run` advances the clock by the step's time.

    accuracy: the probability that the likeliest token is the one that a runner with accuracy 1 would choose. A less
    accurate runner that drafts for it has this acceptance rate, and is as sure of each token.
    """

    def __init__(
        self,
        times: StepTimes,
        clock: VirtualClock,
        *,
        pages: int,
        context: int,
        max_rows: int = 512,
        accuracy: float = 1.0,
    ) -> None:
        self.info = RunnerInfo("simulated", VOCABULARY, context, max_rows, _SEQUENCES, PAGE, pages, 1, "simulated")
        self._times, self._clock = times, clock
        self._accuracy = accuracy
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._next = 0
        self.use = RunnerUse()

    def pages_free(self) -> int:
        return len(self._free)

    def page_holders(self) -> NDArray[np.int32]:
        return np.array(self._references, np.int32)

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """New pages for these tokens, including the copy of a shared last page."""
        if not tokens:
            return 0
        length, table = self._lengths[sequence], self._tables[sequence]
        return -(-(length + tokens) // PAGE) - len(table) + self._last_is_shared(sequence)

    def create_sequence(self, adapters: AdapterSet = ()) -> int:
        self._next += 1
        self._tables[self._next], self._lengths[self._next] = [], 0
        return self._next

    def fork_sequence(self, source: int, length: int) -> int:
        fork = self.create_sequence()
        self._tables[fork] = self._tables[source][: -(-length // PAGE)]
        self._lengths[fork] = length
        for page in self._tables[fork]:
            self._references[page] += 1
        return fork

    def truncate_sequence(self, sequence: int, length: int) -> None:
        table, keep = self._tables[sequence], -(-length // PAGE)
        self._drop(table[keep:])
        del table[keep:]
        self._lengths[sequence] = length

    def free_sequence(self, sequence: int) -> None:
        self._drop(self._tables.pop(sequence))
        del self._lengths[sequence]

    def sequence_length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        """Store the rows, advance the clock, and return logits with one likeliest token for each wanted row."""
        parts = []
        for sequence, rows in groupby(sequences):
            count = sum(1 for _ in rows)
            self._append(sequence, count)
            parts.append((count, self._lengths[sequence]))
        seconds = self._times.seconds(parts, len(wanted))
        self._clock.advance(seconds)
        self._note(len(tokens), set(sequences), seconds)
        logits = np.zeros((len(wanted), VOCABULARY), np.float32)
        for at, row in enumerate(wanted):
            chance = min(max(self._chance(tokens[row]), 2 / VOCABULARY), 1 - 1e-6)
            logits[at, self._guess(tokens[row])] = math.log((VOCABULARY - 1) * chance / (1 - chance))
        return logits

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        """Not implemented: simulations have no disk tier."""
        raise NotImplementedError("a simulated runner stores no keys and values")

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        """Not implemented: simulations have no disk tier."""
        raise NotImplementedError("a simulated runner stores no keys and values")

    def check_integrity(self, sequences: set[int]) -> None:
        """Raise RuntimeError unless exactly these sequences exist and hold exactly the pages in use."""
        counted = [0] * self.info.pages_total
        for table in self._tables.values():
            for page in table:
                counted[page] += 1
        if set(self._tables) != sequences or counted != self._references or counted.count(0) != len(self._free):
            raise RuntimeError("simulated pages do not add up")

    def close(self) -> None:
        """Nothing is held."""

    def _chance(self, token: int) -> float:
        """The probability of the likeliest token after a token."""
        return self._accuracy

    def _guess(self, token: int) -> int:
        right = next_token(token)
        luck = (token * _MIX >> 8) % _EXACT / _EXACT
        return right if luck < self._accuracy else right % (VOCABULARY - 1) + 1

    def _note(self, rows: int, active: set[int], seconds: float) -> None:
        held = len(set().union(*(self._tables[sequence] for sequence in active))) / self.info.pages_total
        use = self.use
        use.steps += 1
        use.rows += rows
        use.seconds += seconds
        use.kv_seconds += held * seconds
        use.kv_peak = max(use.kv_peak, held)

    def _append(self, sequence: int, tokens: int) -> None:
        if self.pages_needed(sequence, tokens) > len(self._free):
            raise RuntimeError("pages ran out: the caller did not ask pages_needed")
        table = self._tables[sequence]
        if self._last_is_shared(sequence):
            self._drop([table.pop()])
            table.append(self._take())
        self._lengths[sequence] += tokens
        while len(table) * PAGE < self._lengths[sequence]:
            table.append(self._take())

    def _last_is_shared(self, sequence: int) -> bool:
        return self._lengths[sequence] % PAGE != 0 and self._references[self._tables[sequence][-1]] > 1

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
