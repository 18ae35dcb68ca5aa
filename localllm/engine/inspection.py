"""A look inside the engine for people: the last steps, the requests at work, the prefix tree. Read-only."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the last two import, in the end, the prefix cache, which is viewed here
    import numpy as np
    from numpy.typing import NDArray

    from localllm.engine.generation import Generation
    from localllm.engine.plan import Plan

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
    """A node of the prefix tree: its edge holds tokens start..stop-1; sharers is how many kept prefixes use them."""

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
    page_holders: "NDArray[np.int32]"


class Journal:
    """Notes steps and answers those who ask for a look. note and answer are for the engine's thread; ask for any."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._asked: deque[Future[EngineSnapshot]] = deque()

    def ask(self) -> "Future[EngineSnapshot]":
        """Return what will hold a snapshot after the present step. The caller wakes the engine."""
        future: Future[EngineSnapshot] = Future()
        self._asked.append(future)
        return future

    def note(self, plan: "Plan", seconds: float) -> None:
        """Remember a step."""
        prefill = len(plan) - plan.decoded - plan.drafted
        self._steps.append(StepRecord(prefill, plan.decoded, plan.drafted, seconds))

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The last steps, oldest first."""
        return tuple(self._steps)

    def answer(self, look: Callable[[], EngineSnapshot]) -> None:
        """Give everybody who asked, and still waits, a snapshot."""
        while self._asked:
            asked = self._asked.popleft()
            if asked.set_running_or_notify_cancel():
                asked.set_result(look())

    def cancel(self) -> None:
        """Tell everybody who asked that there will be none."""
        while self._asked:
            self._asked.popleft().cancel()


def view_request(generation: "Generation", waiting: bool) -> RequestView:
    """A request as people see it."""
    return RequestView(
        tokens=len(generation.tokens),
        computed=generation.computed,
        cached=generation.counts.cached,
        generated=generation.counts.generated,
        waiting=waiting,
        background=generation.request.background,
    )


def depth_first(prefixes: Sequence[PrefixView], level: int = 0) -> Iterable[tuple[int, PrefixView]]:
    """Every node with its level, parents before children."""
    for prefix in prefixes:
        yield level, prefix
        yield from depth_first(prefix.children, level + 1)
