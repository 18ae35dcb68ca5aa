"""Read-only snapshots of the engine for users: recent steps, current requests, the prefix tree."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

KEPT_STEPS = 240
KEPT_TIMELINES = 48
KEPT_SPANS = 256  # per request
PAUSE_S = 0.25  # decoding that pauses longer, such as for a preemption, starts a new span

Found = TypeVar("Found")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: rows of prompts, rows of decoding sequences, drafted rows, and the runner's time in seconds."""

    prefill: int
    decode: int
    drafted: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefixView:
    """A node of a prefix tree: its edge holds tokens start..stop-1. sharers: how many cached prefixes use them."""

    start: int
    stop: int
    sharers: int
    last_used: int
    children: tuple["PrefixView", ...] = ()


@dataclass(frozen=True, slots=True)
class RequestView:
    """A running or waiting request. computed: tokens with stored KV. cached: those whose KV came from a cache."""

    tokens: int
    computed: int
    cached: int
    generated: int
    waiting: bool
    background: bool


@dataclass(frozen=True, slots=True)
class Span:
    """Uninterrupted work on a request: a chunk of its prompt, or decoding. Times are by the engine's clock."""

    decodes: bool
    began: float
    ended: float
    rows: int


@dataclass(slots=True)
class Timeline:
    """A request's phases. came: its arrival. ended: None until it has ended. spans: oldest first."""

    came: float
    spans: list[Span] = field(default_factory=list)
    cached: int = 0
    generated: int = 0
    ended: float | None = None

    def end(self, at: float, cached: int, generated: int) -> None:
        """Record the end."""
        self.ended, self.cached, self.generated = at, cached, generated

    def add(self, span: Span) -> None:
        """Record work; continued decoding extends the last span."""
        last = self.spans[-1] if self.spans else None
        if last and last.decodes and span.decodes and span.began - last.ended < PAUSE_S:
            self.spans[-1] = Span(True, last.began, span.ended, last.rows + span.rows)
            return
        self.spans.append(span)
        if len(self.spans) > KEPT_SPANS:
            del self.spans[1]  # keeps the first one, which shows when the request left the queue


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps. steps and timelines are oldest first. now: by the clock of the timelines.

    page_size is in tokens. page_holders: see Runner.page_holders. window_pages, kept_window_pages: what window layers
    take of pages_total besides, for sequences and for kept windows.
    """

    steps: tuple[StepRecord, ...]
    requests: tuple[RequestView, ...]
    prefixes: tuple[PrefixView, ...]
    page_size: int
    pages_total: int
    page_holders: NDArray[np.int32]
    timelines: tuple[Timeline, ...] = ()
    now: float = 0.0
    window_pages: int = 0
    kept_window_pages: int = 0


class StepJournal:
    """Keeps recent steps and timelines, and answers questions about the engine between two steps.

    steps, timelines: of the latest steps and requests, oldest first; the engine appends a request's timeline when it
    arrives. asked: questions that wait. Any thread may call ask, only the engine's the other methods.
    """

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self.timelines: deque[Timeline] = deque(maxlen=KEPT_TIMELINES)
        self.asked: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def ask(self, look: Callable[[], Found]) -> "Future[Found]":
        """Return a future for what `look` finds after the current step. The caller must wake the engine."""
        future: Future[Found] = Future()
        self.asked.append((future, look))
        return future

    def note(self, step: StepRecord, began: float, parts: Iterable[tuple[Timeline, bool, int]]) -> None:
        """Record a step that started at `began`. parts: for each request its timeline, whether it decodes, its rows."""
        self.steps.append(step)
        for timeline, decodes, rows in parts:
            timeline.add(Span(decodes, began, began + step.seconds, rows))

    def answer(self) -> None:
        """Answer every question whose future was not cancelled; one that fails is logged, and its future cancelled."""
        while self.asked:
            future, look = self.asked.popleft()
            if future.cancelled():
                continue
            try:
                found = look()
            except Exception:
                log.exception("The engine's state could not be shown")
                future.cancel()
            else:
                if future.set_running_or_notify_cancel():
                    future.set_result(found)

    def cancel(self) -> None:
        """Cancel every waiting question."""
        while self.asked:
            self.asked.popleft()[0].cancel()


def depth_first(prefixes: Sequence[PrefixView]) -> Iterator[tuple[int, PrefixView]]:
    """Every node with its level, parents before children. Not recursive: trees may exceed the recursion limit."""
    stack = [(0, prefix) for prefix in reversed(prefixes)]
    while stack:
        level, prefix = stack.pop()
        yield level, prefix
        stack += [(level + 1, child) for child in reversed(prefix.children)]
