"""One trial: a number of requests sent under a load, until they are answered or time is up."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from localllm.slo import Slo
from localllm.text import counted
from localllm.wings.lab.latency import Outcome, Summary
from localllm.wings.lab.loadtest.protocols import TimedJob


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests arrive whether or not earlier ones are answered. rate: requests a second; None: at a trace's times."""

    rate: float | None

    def __str__(self) -> str:
        return "as traced" if self.rate is None else f"{self.rate:.3g}/s"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of clients, each sending its next request when the last one is answered."""

    clients: int

    def __str__(self) -> str:
        return counted(self.clients, "client")


Load = OpenLoop | ClosedLoop


@dataclass(frozen=True, slots=True)
class Bounds:
    """What ends a trial: the number of requests, the seconds in which they are sent, and the seconds one may take.

    A trial takes at most duration_s + patience_s.
    """

    requests: int
    duration_s: float
    patience_s: float


@dataclass(slots=True)
class Trial:
    """A trial and its outcomes so far. running: requests that are due and not answered."""

    load: Load
    planned: int
    outcomes: list[Outcome] = field(default_factory=list)
    running: int = 0
    complete: bool = False

    def summary(self, slo: Slo | None) -> Summary:
        """Statistics of the outcomes so far."""
        return Summary.of(self.outcomes, slo)

    @property
    def note(self) -> str:
        """Says what is missing from the trial; empty if nothing is."""
        left = self.planned - len(self.outcomes)
        if self.complete:
            return f"{counted(left, 'request')} not sent in time" if left else ""
        return f"stopped; {counted(self.running, 'request')} without a complete answer" if self.running else "stopped"


Ask = Callable[[TimedJob, float, float | None, float], Awaitable[Outcome]]
"""Sends a request; see Server.ask."""


async def play(
    trial: Trial,
    jobs: Iterable[TimedJob],
    bounds: Bounds,
    ask: Ask,
    clock: Callable[[], float],
    progress: Callable[[], None],
) -> None:
    """Send the jobs under the trial's load and fill in its outcomes; progress is called after each.

    Cancelling ends all requests at once; the outcomes so far are kept.
    """
    began = clock()

    async def one(job: TimedJob, due: float | None) -> None:
        trial.running += 1
        outcome = await ask(job, began, due, bounds.patience_s)
        trial.running -= 1  # not if cancelled, so that the number of unanswered requests stays known
        trial.outcomes.append(outcome)
        progress()

    async def client(shared: Iterator[TimedJob]) -> None:
        for job in shared:
            if clock() - began >= bounds.duration_s:
                return
            await one(job, None)

    async with asyncio.TaskGroup() as group:
        if isinstance(trial.load, ClosedLoop):
            shared = iter(jobs)
            for _ in range(trial.load.clients):
                group.create_task(client(shared))
        else:
            for job in jobs:
                if job.at >= bounds.duration_s:
                    break
                await asyncio.sleep(max(0.0, job.at - (clock() - began)))
                group.create_task(one(job, job.at))
    trial.complete = True
