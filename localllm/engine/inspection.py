"""A look inside the engine for people: the last steps, the requests at work, the prefix tree. Read-only."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEPT_STEPS = 240


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: rows of prompts, rows of decoding sequences, drafted rows, and seconds that the runner took."""

    prefill: int
    decode: int
    drafted: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefixView:
    """A node of a prefix tree: its edge holds tokens start..stop-1; sharers is how many kept prefixes use them."""

    start: int
    stop: int
    sharers: int
    last_used: int
    children: tuple["PrefixView", ...] = ()


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request at work or waiting. computed of tokens have their KV stored; cached of them came from a cache."""

    tokens: int
    computed: int
    cached: int
    generated: int
    waiting: bool
    background: bool


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps. steps are oldest first; page_size is in tokens; page_holders are the runner's."""

    steps: tuple[StepRecord, ...]
    requests: tuple[RequestView, ...]
    prefixes: tuple[PrefixView, ...]
    page_size: int
    pages_total: int
    page_holders: NDArray[np.int32]


class Journal:
    """Keeps the last steps, and hands out snapshots. note and answer are for the engine's thread; ask is for any."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._asked: deque[Future[EngineSnapshot]] = deque()

    def ask(self) -> "Future[EngineSnapshot]":
        """Return a future for a snapshot after the present step. The caller wakes the engine."""
        future: Future[EngineSnapshot] = Future()
        self._asked.append(future)
        return future

    def note(self, step: StepRecord) -> None:
        """Remember a step."""
        self._steps.append(step)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The last steps, oldest first."""
        return tuple(self._steps)

    def answer(self, look: Callable[[], EngineSnapshot]) -> None:
        """Set the result of every future that was asked for and is still wanted."""
        while self._asked:
            asked = self._asked.popleft()
            if asked.set_running_or_notify_cancel():
                asked.set_result(look())

    def cancel(self) -> None:
        """Cancel every future that was asked for."""
        while self._asked:
            self._asked.popleft().cancel()


def depth_first(prefixes: Sequence[PrefixView]) -> Iterator[tuple[int, PrefixView]]:
    """Every node with its level, parents before children. Trees may be deeper than Python's recursion."""
    stack = [(0, prefix) for prefix in reversed(prefixes)]
    while stack:
        level, prefix = stack.pop()
        yield level, prefix
        stack += [(level + 1, child) for child in reversed(prefix.children)]
