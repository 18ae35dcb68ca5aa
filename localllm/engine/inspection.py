"""A look inside the engine for people: the last steps, the requests at work, the prefix tree. Read-only."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

KEPT_STEPS = 240
KEPT_TIMELINES = 48
KEPT_SPANS = 256  # of a request
PAUSE_S = 0.25  # decoding that waits for longer, as after a preemption, is another span


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
class Span:
    """Work on a request without a pause: a chunk of its prompt, or decoding. Times are the engine's clock's."""

    decodes: bool
    began: float
    ended: float
    rows: int


@dataclass(slots=True)
class Timeline:
    """A request's phases. It came at `came`; ended is None while it is at work. spans: oldest first."""

    came: float
    spans: list[Span] = field(default_factory=list)
    cached: int = 0
    generated: int = 0
    ended: float | None = None

    def end(self, at: float, cached: int, generated: int) -> None:
        """Note the end."""
        self.ended, self.cached, self.generated = at, cached, generated

    def add(self, span: Span) -> None:
        """Note work; decoding that goes on is one span."""
        last = self.spans[-1] if self.spans else None
        if last and last.decodes and span.decodes and span.began - last.ended < PAUSE_S:
            self.spans[-1] = Span(True, last.began, span.ended, last.rows + span.rows)
            return
        self.spans.append(span)
        if len(self.spans) > KEPT_SPANS:
            del self.spans[1]  # the first one tells when the queue was left


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps. steps and timelines are oldest first; now: the clock that timelines are in.

    page_size is in tokens; page_holders are the runner's.
    """

    steps: tuple[StepRecord, ...]
    requests: tuple[RequestView, ...]
    prefixes: tuple[PrefixView, ...]
    page_size: int
    pages_total: int
    page_holders: NDArray[np.int32]
    timelines: tuple[Timeline, ...] = ()
    now: float = 0.0


class Journal:
    """Keeps the last steps and timelines, and hands out snapshots.

    asked: futures that wait for one. note, keep and answer are for the engine's thread; ask is for any.
    """

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._timelines: deque[Timeline] = deque(maxlen=KEPT_TIMELINES)
        self.asked: deque[Future[EngineSnapshot]] = deque()

    def ask(self) -> "Future[EngineSnapshot]":
        """Return a future for a snapshot after the present step. The caller wakes the engine."""
        future: Future[EngineSnapshot] = Future()
        self.asked.append(future)
        return future

    def note(self, step: StepRecord, began: float, parts: Iterable[tuple[Timeline, bool, int]]) -> None:
        """Remember a step that began then. parts: whose it was, whether it decodes, and rows."""
        self._steps.append(step)
        for timeline, decodes, rows in parts:
            timeline.add(Span(decodes, began, began + step.seconds, rows))

    def keep(self, timeline: Timeline) -> None:
        """Show the timeline of a request that comes, for as long as it is among the last."""
        self._timelines.append(timeline)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Copies of those of the last requests, oldest first."""
        return tuple(replace(each, spans=[*each.spans]) for each in self._timelines)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The last steps, oldest first."""
        return tuple(self._steps)

    def answer(self, snapshot: EngineSnapshot) -> None:
        """Set the result of every future that was asked for and is still wanted."""
        while self.asked:
            asked = self.asked.popleft()
            if asked.set_running_or_notify_cancel():
                asked.set_result(snapshot)

    def cancel(self) -> None:
        """Cancel every future that was asked for."""
        while self.asked:
            self.asked.popleft().cancel()


def depth_first(prefixes: Sequence[PrefixView]) -> Iterator[tuple[int, PrefixView]]:
    """Every node with its level, parents before children. Trees may be deeper than Python's recursion."""
    stack = [(0, prefix) for prefix in reversed(prefixes)]
    while stack:
        level, prefix = stack.pop()
        yield level, prefix
        stack += [(level + 1, child) for child in reversed(prefix.children)]
