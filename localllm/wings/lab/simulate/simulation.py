"""Runs requests through the real engine in virtual time."""

import zlib
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

import numpy as np

from localllm.engine.drafter import DraftModel
from localllm.engine.engine import Engine, EngineStats
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.runner import Runner
from localllm.engine.step_costs import ChunkSize
from localllm.engine.stream import GenerationStream
from localllm.errors import LocalLLMError
from localllm.wings.lab.latency import Outcome
from localllm.wings.lab.loadtest.trial import ClosedLoop, Load, Trial
from localllm.wings.lab.simulate.costs import StepTimes
from localllm.wings.lab.simulate.runner import VOCABULARY, RunnerUse, SimulatedRunner, SimulatedVocabulary, VirtualClock
from localllm.wings.lab.workload.requests import WorkloadRequest

_GREEDY = SamplingParams(temperature=0)
_BLOCKS_KEPT = 256
_CHUNK_ROWS = 512


class Batching(StrEnum):
    """CONTINUOUS: the engine's own. STATIC: a new batch starts when the last one has ended. NONE: one at a time."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SimulatedDraft:
    """A draft model. acceptance: the probability that a drafted token is accepted if all before it are."""

    times: StepTimes
    acceptance: float


@dataclass(frozen=True, slots=True)
class Setup:
    """A server. pages: KV pages of 16 tokens. slots: requests that run at once. queue: the most that wait.

    Without chunked_prefill a whole prompt is one step. travel: seconds that a request spends outside of the engine
    before its first token, on HTTP and tokenising.
    """

    times: StepTimes
    pages: int
    context: int
    slots: int = 8
    queue: int = 64
    batching: Batching = Batching.CONTINUOUS
    chunked_prefill: bool = True
    prefix_cache: bool = True
    draft: SimulatedDraft | None = None
    travel: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated trial. outcomes: in order of completion. queue: (seconds, waiting requests) after each step."""

    load: Load
    outcomes: tuple[Outcome, ...]
    seconds: float
    use: RunnerUse
    stats: EngineStats
    queue: tuple[tuple[float, int], ...]

    @property
    def trial(self) -> Trial:
        """The same as a load test's trial."""
        return Trial(self.load, len(self.outcomes), list(self.outcomes), complete=True)

    @property
    def busy(self) -> float:
        """The share of time in which steps ran."""
        return self.use.seconds / self.seconds if self.seconds else 0.0

    @property
    def kv_mean(self) -> float:
        """The share of pages that running requests held, averaged over the busy time."""
        return self.use.kv_seconds / self.use.seconds if self.use.seconds else 0.0

    @property
    def rows_per_step(self) -> float:
        """Rows per step on average."""
        return self.use.rows / self.use.steps if self.use.steps else 0.0

    @property
    def queue_peak(self) -> int:
        """The most requests that waited at once."""
        return max((waiting for _, waiting in self.queue), default=0)

    @property
    def queue_mean(self) -> float:
        """Waiting requests, averaged over time."""
        total, before, waiting = 0.0, 0.0, 0
        for at, now in self.queue:
            total += waiting * (at - before)
            before, waiting = at, now
        return total / before if before else 0.0


@dataclass(slots=True)
class _Visit:
    """A request in progress."""

    due: float
    sent: float
    stream: GenerationStream
    pieces: list[float] = field(default_factory=list)


class _WholePrompts(ChunkSize):
    """The chunk size without chunked prefill: whole prompts."""

    def _rows_in(self, seconds: float) -> int:
        return self._largest


def simulate(
    setup: Setup,
    requests: Sequence[WorkloadRequest],
    load: Load,
    seed: str,
    clock: VirtualClock | None = None,
    runner: Runner | None = None,
) -> Simulated:
    """Serve the requests under the load. Raises RequestError for prompts that cannot be served.

    In an open loop each request arrives at its `at`; in a closed one, when a client has received its previous answer.
    seed: blocks with the same identity have the same tokens under the same seed. runner: a real one for comparison,
    whose steps take their real time on the clock; idle time is skipped, and `use` stays empty.
    """
    return _Simulation(setup, requests, load, seed, clock or VirtualClock(), runner).run()


class _Simulation:
    def __init__(
        self,
        setup: Setup,
        requests: Sequence[WorkloadRequest],
        load: Load,
        seed: str,
        clock: VirtualClock,
        runner: Runner | None,
    ) -> None:
        self._setup, self._requests, self._load, self._seed = setup, requests, load, seed
        self._clients = load.clients if isinstance(load, ClosedLoop) else None
        self._clock = clock
        self._runner: Runner = runner or self._runner_of(setup.times, 1.0)
        draft = setup.draft
        guesser = DraftModel(self._runner_of(draft.times, draft.acceptance), self._clock) if draft else None
        self._engine = Engine(
            self._runner,
            SimulatedVocabulary(),
            max_running=1 if setup.batching is Batching.NONE else setup.slots,
            max_waiting=setup.queue,
            background_tokens=0,
            drafter=guesser,
            clock=self._clock,
            chunk=self._chunk(),
        )
        self._due: list[tuple[float, int]] = []  # (when the engine receives it, index of the request)
        self._visits: list[_Visit] = []
        self._held: list[tuple[float, int]] = []  # due, but waiting for the static batch to end
        self._outcomes: list[Outcome] = []
        self._queue: list[tuple[float, int]] = []
        self._left = len(requests)

    def run(self) -> Simulated:
        """Run all requests until the last has ended."""
        for number, request in enumerate(self._requests[: self._clients]):
            insort(self._due, ((0.0 if self._clients else request.at) + self._setup.travel, number))
        self._left -= len(self._due)
        while self._due or self._held or self._visits:
            self._send()
            worked = self._engine.step()
            self._collect()
            self._queue.append((self._clock(), self._engine.stats().waiting + len(self._held)))
            if worked:
                continue
            if self._visits:
                raise RuntimeError("the simulated engine has requests and does nothing")
            if self._due and not self._held:
                self._clock.advance(max(self._due[0][0] - self._clock(), 0.0))
        stats = self._engine.stats()
        self._engine.check_integrity()
        use = self._runner.use if isinstance(self._runner, SimulatedRunner) else RunnerUse()
        return Simulated(self._load, tuple(self._outcomes), self._clock(), use, stats, tuple(self._queue))

    def _runner_of(self, times: StepTimes, accuracy: float) -> SimulatedRunner:
        setup = self._setup
        rows = _CHUNK_ROWS if setup.chunked_prefill else setup.context * setup.slots
        return SimulatedRunner(
            times, self._clock, pages=setup.pages, context=setup.context, max_rows=rows, accuracy=accuracy
        )

    def _send(self) -> None:
        """Submit the requests that are due; with static batches, only when the last batch has ended."""
        while self._due and self._due[0][0] <= self._clock():
            self._held.append(self._due.pop(0))
        if self._setup.batching is not Batching.STATIC:
            batch, self._held = self._held, []
        elif not self._visits:
            batch, self._held = self._held[: self._setup.slots], self._held[self._setup.slots :]
        else:
            batch = []
        for came, number in batch:
            request, due = self._requests[number], came - self._setup.travel
            try:
                stream = self._engine.submit(self._asked(request, number))
            except LocalLLMError as error:
                self._end(Outcome(due, self._clock(), (), self._clock(), error=str(error)))
            else:
                self._visits.append(_Visit(due, self._clock(), stream))

    def _asked(self, request: WorkloadRequest, number: int) -> GenerationRequest:
        prompt: list[int] = []
        for block in request.blocks:
            prompt += _tokens(f"{self._seed} {block.identity}", block.tokens)
        return GenerationRequest(
            tuple(prompt),
            _GREEDY,
            max_tokens=request.answer_tokens,
            namespace="" if self._setup.prefix_cache else f"request {number}",
        )

    def _collect(self) -> None:
        now = self._clock()
        going = []
        for visit in self._visits:
            last = None
            for event in visit.stream.poll():
                if event.token_ids:
                    visit.pieces.append(now)
                last = event
            if last is None or last.finish_reason is None:
                going.append(visit)
                continue
            counts = last.counts
            self._end(
                Outcome(
                    visit.due,
                    visit.sent,
                    tuple(visit.pieces),
                    now,
                    counts.prompt,
                    counts.cached,
                    counts.generated,
                    last.error,
                )
            )
        self._visits = going

    def _end(self, outcome: Outcome) -> None:
        """Record an outcome. In a closed loop, its client sends the next request."""
        self._outcomes.append(outcome)
        if self._clients is not None and self._left:
            self._due.append((self._clock() + self._setup.travel, len(self._requests) - self._left))
            self._left -= 1

    def _chunk(self) -> ChunkSize:
        """The chunk size of a warm server, which has learned how long steps take before the first prompt."""
        rows = self._runner.info.max_rows
        if not self._setup.chunked_prefill:
            return _WholePrompts(rows)
        chunk = ChunkSize(rows)
        learned = min(max(request.prompt_tokens for request in self._requests), rows) if self._requests else rows
        chunk.observe(learned, self._setup.times.seconds(((learned, learned),), 1))
        return chunk


@lru_cache(_BLOCKS_KEPT)
def _tokens(identity: str, count: int) -> list[int]:
    """The tokens of a block."""
    tokens: list[int] = np.random.default_rng(zlib.crc32(identity.encode())).integers(1, VOCABULARY, count).tolist()
    return tokens
