"""A whole load test: looking up the server, one trial for each load, and the search for the knee."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx2

from localllm.errors import RequestError
from localllm.slo import Slo
from localllm.wings.lab.latency import Outcome
from localllm.wings.lab.loadtest.protocols import TimedJob
from localllm.wings.lab.loadtest.server import LoadTarget, MeasuredServer
from localllm.wings.lab.loadtest.trial import Bounds, Load, OpenLoop, Trial, play
from localllm.wings.lab.workload.requests import WorkloadRequest, poisson
from localllm.wings.lab.workload.texts import Prompt, TokenRatio, text_of, words

ATTAINED = 0.9
"""The share of requests that must meet the SLO up to the knee."""
PRECISION = 0.1
"""The search ends when the lowest rate that fails is at most this share above the highest that does not."""
MOST_TRIALS = 14
LOAD_S = 600.0  # a server may load the model first
_COUNTED_WORDS = (24, 96)


@dataclass(slots=True)
class RequestSource:
    """Makes the requests of a round. Made-up text differs from round to round, so that no prefix is cached yet.

    draw: makes a number of requests from a seed. prompts: texts to send in order instead of made-up ones; they repeat
    if there are fewer than requests. ratio: the server's tokens per word, needed for made-up text. sent: prompts used
    so far.
    """

    draw: Callable[[int, str], Sequence[WorkloadRequest]]
    seed: int
    prompts: Sequence[Prompt] = ()
    ratio: TokenRatio | None = None
    sent: int = 0

    def requests(self, count: int, round_number: int, load: Load) -> Sequence[WorkloadRequest]:
        """At most `count` requests, at times that fit the load."""
        seed = self._seed(round_number)
        requests = self.draw(count, seed)
        if isinstance(load, OpenLoop) and load.rate is not None:
            requests = poisson(requests, load.rate, seed)
        return requests

    def job(self, request: WorkloadRequest, round_number: int) -> TimedJob:
        """The request with its text. Call it when sending: the texts of all requests may not fit in memory."""
        return TimedJob(request.at, self._prompt(request, self._seed(round_number)), request.answer_tokens)

    def _prompt(self, request: WorkloadRequest, seed: str) -> Prompt:
        if self.prompts:
            self.sent += 1
            return self.prompts[(self.sent - 1) % len(self.prompts)]
        assert self.ratio is not None
        return text_of(request, self.ratio, seed)

    def _seed(self, round_number: int) -> str:
        return f"{self.seed} {round_number}"


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """loads: one trial each; empty to search for the knee, which needs an SLO. connections: the most at once."""

    target: LoadTarget
    loads: tuple[Load, ...]
    bounds: Bounds
    connections: int
    slo: Slo | None


@dataclass(frozen=True, slots=True)
class Knee:
    """Requests a second. met: the highest rate that met the SLO; missed: the lowest that did not; None: no such."""

    met: float | None
    missed: float | None


@dataclass(slots=True)
class LoadTest:
    """A load test and its results so far, which are kept if it is cancelled.

    alone: one request on the idle server, after one that warms it up. clock and transport: for tests.
    """

    plan: TrialPlan
    source: RequestSource
    tell: Callable[[str], None]
    clock: Callable[[], float] = time.perf_counter
    transport: httpx2.AsyncBaseTransport | None = None
    api: str = ""
    model: str = ""
    alone: Outcome | None = None
    knee: Knee | None = None
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Measure. Raises RequestError if the server cannot be measured at all."""
        self.tell("looking up the model")
        async with MeasuredServer(self.plan.target, self.plan.connections, self.clock, self.transport) as server:
            await server.look_up()
            self.api, self.model = server.protocol.name, server.protocol.model
            if not self.source.prompts:
                self.source.ratio = await self._ratio(server)
            await self._measure_alone(server)
            for load in self.plan.loads:
                await self._trial(server, load)
            if not self.plan.loads:
                await self._search(server)

    async def _ratio(self, server: MeasuredServer) -> TokenRatio:
        """Find the tokens per word from the server's counts for two prompts."""
        counts = []
        for number in _COUNTED_WORDS:
            self.tell("counting tokens; the server may have to load the model first")
            job = TimedJob(0.0, words(number, f"{self.source.seed} counted"), 1)
            counts.append((number, await server.count_prompt(job, LOAD_S)))
        (short, tokens), (long, more) = counts
        if tokens is None or more is None:
            self.notes.append("The server does not count prompt tokens: a word was taken for one token.")
            return TokenRatio(1.0, 0.0)
        try:
            return TokenRatio.between((short, tokens), (long, more))
        except ValueError as error:
            raise RequestError(f"{self.plan.target.url} does not count whole prompts: {error}.") from error

    async def _measure_alone(self, server: MeasuredServer) -> None:
        """Warm up the server, then send one request to the idle server. Raises RequestError if either fails."""
        for number, request in enumerate(self.source.requests(2, 0, OpenLoop(None))):
            self.tell("one request alone" if number else "warming up")
            outcome = await server.ask(self.source.job(request, 0), self.clock(), None, LOAD_S)
            if outcome.error is not None:
                raise RequestError(f"{self.plan.target.url} cannot be measured: {outcome.error}.")
            self.alone = outcome

    async def _trial(self, server: MeasuredServer, load: Load) -> Trial:
        bounds = self.plan.bounds
        number = len(self.trials) + 1
        requests = self.source.requests(bounds.requests, number, load)
        trial = Trial(load, len(requests))
        self.trials.append(trial)

        def progress() -> None:
            failed = sum(outcome.error is not None for outcome in trial.outcomes)
            self.tell(
                f"{load}: {len(trial.outcomes)} of {trial.planned} answered, {trial.running} running"
                + (f", {failed} failed" if failed else "")
            )

        progress()
        jobs = (self.source.job(request, number) for request in requests)
        await play(trial, jobs, bounds, server.ask, self.clock, progress)
        return trial

    async def _search(self, server: MeasuredServer) -> None:
        """Find the highest rate at which enough requests meet the SLO.

        Starts with the rate of serving one request at a time, doubles or halves it until one rate meets the SLO and one
        does not, then bisects.
        """
        assert self.alone is not None and self.plan.slo is not None
        met = missed = None
        rate = 1 / max(self.alone.e2e, 1e-3)
        for _ in range(MOST_TRIALS):
            trial = await self._trial(server, OpenLoop(rate))
            if (trial.summary(self.plan.slo).attained or 0.0) >= ATTAINED:
                met = rate
            else:
                missed = rate
            self.knee = Knee(met, missed)
            if missed is None:
                rate *= 2
            elif met is None:
                rate /= 2
            elif missed <= met * (1 + PRECISION):
                break
            else:
                rate = (met + missed) / 2
