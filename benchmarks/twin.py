"""Runs the same workload on a real server and in the simulation, and shows how far they differ.

    twin.py MODEL.gguf [--concurrency 1,4] [--rate R,...] [--requests 16] [--prompt 64:128] [--answer 32:64]
        [--rounds 4] [--threads N] [--kv-mib 512] [--engine] [--json FILE]

Calibration and load alternate: before and after each load, the model's steps and the engine's overhead per step are
timed in this process, as `localllm simulate --measure` does. Then short requests to the idle server, one at a time and
four at once, show how much longer a step and a token take there than here (its event loop, its memory placement), and
how long a request takes outside of the engine (HTTP, tokenising). The mean of both calibrations is the cost model of
that load only, so that a machine that slows down slows both. Nothing is fitted to the load that is compared.

Each round's requests are simulated with the token counts that the server reported; percentiles are over all rounds.
The drift is how much longer a step of one row took after a load than before it: if it is large, the figures mean
nothing. The server does not speculate, since a model's answers repeat themselves in ways that no simulation predicts.
It gets all cores except one, which the load generator needs.

--engine compares without a server: the same requests through the engine and the model's kernels in this process, on one
thread, in processor time, which other programs hardly affect.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from benchmarks.engine_tools import table
from benchmarks.servers import localllm
from cpu_kernels.cores import usable_cores
from gguf_io import open_model
from localllm.engine.runner import Runner
from localllm.engine.speculation import DraftLength
from localllm.wings.lab.latency import Outcome, Percentiles, Summary
from localllm.wings.lab.loadtest.protocols import TimedJob
from localllm.wings.lab.loadtest.server import LoadTarget, MeasuredServer
from localllm.wings.lab.loadtest.session import LoadTest, RequestSource, TrialPlan
from localllm.wings.lab.loadtest.trial import Bounds, ClosedLoop, Load, OpenLoop
from localllm.wings.lab.simulate.costs import StepTimes, made_of
from localllm.wings.lab.simulate.fit import BorrowedRunner, measure
from localllm.wings.lab.simulate.runner import VirtualClock
from localllm.wings.lab.simulate.simulation import Setup, simulate
from localllm.wings.lab.workload.requests import Block, Lengths, RequestShape, WorkloadRequest, poisson
from localllm.wings.lab.workload.texts import words
from models.native_runner import NativeRunner

PATIENCE_S = 600.0
PROBES, PROBE_TOKENS, TOGETHER = 5, 24, 4
ALLOWED = 0.15


@dataclass(slots=True)
class Pair:
    """A load's rounds, measured and simulated."""

    real: list[Summary] = field(default_factory=list)
    simulated: list[Summary] = field(default_factory=list)
    outcomes: tuple[list[Outcome], list[Outcome]] = field(default_factory=lambda: ([], []))
    drifts: list[float] = field(default_factory=list)

    def figures(self) -> list[tuple[str, float, float]]:
        """(name, server's figure, simulation's figure); times in milliseconds."""
        found = []
        for name in ("ttft", "tpot"):
            both = [Percentiles.of(filter(None, (getattr(one, name) for one in each))) for each in self.outcomes]
            for rank in ("p50", "p95"):
                real, simulated = (1e3 * getattr(each, rank) for each in both)
                found.append((f"{name.upper()} {rank} ms", real, simulated))
        real, simulated = (
            sum(each.generated_tokens for each in sums) / sum(each.seconds for each in sums)
            for sums in (self.real, self.simulated)
        )
        return [*found, ("tok/s", real, simulated)]


def as_request(number: int, outcome: Outcome) -> WorkloadRequest:
    """The request that the server received, by its own token counts."""
    return WorkloadRequest(outcome.due, (Block(f"own {number}", outcome.prompt_tokens or 1),), outcome.tokens)


def mean_of(first: StepTimes, second: StepTimes) -> StepTimes:
    """The mean of two measurements of the same step sizes."""
    return made_of(lambda one, other: (one + other) / 2, first, second)


@dataclass(frozen=True, slots=True)
class Calibration:
    """travel: seconds of a request outside of the engine."""

    times: StepTimes
    travel: float

    def mean(self, other: "Calibration") -> "Calibration":
        """The mean of two calibrations."""
        return Calibration(mean_of(self.times, other.times), (self.travel + other.travel) / 2)


def anchored(target: LoadTarget, times: StepTimes) -> Calibration:
    """Step times of this process plus the server's overhead, measured by short requests to the idle server: medians.

    Requests one at a time show its overhead per step, several at once its overhead per token of a step.
    """

    async def probe(server: MeasuredServer, number: int) -> Outcome:
        job = TimedJob(0.0, words(4, f"probe {number}"), PROBE_TOKENS)
        return await server.ask(job, time.perf_counter(), None, PATIENCE_S)

    async def probes() -> tuple[list[Outcome], list[Outcome]]:
        several: list[Outcome] = []
        async with MeasuredServer(target, TOGETHER, time.perf_counter) as server:
            await server.look_up()
            alone = [await probe(server, number) for number in range(PROBES)]
            for first in range(PROBES, PROBES + TOGETHER * PROBES, TOGETHER):
                several += await asyncio.gather(*(probe(server, first + at) for at in range(TOGETHER)))
        return alone, several

    alone, several = asyncio.run(probes())

    def added(outcomes: Sequence[Outcome], together: int) -> float:
        step = times.seconds(((1, PROBE_TOKENS),) * together, together)
        return max(statistics.median([each.tpot - step for each in outcomes if each.tpot is not None] or [0.0]), 0.0)

    one = added(alone, 1)
    token = max(added(several, TOGETHER) - one, 0.0) / (TOGETHER - 1)
    times = replace(times, fixed=times.fixed + max(one - token, 0.0), token=times.token + token)
    rows = [max(outcome.prompt_tokens or 1, 1) for outcome in alone]
    outside = [outcome.ttft - times.seconds(((count, count),), 1) for outcome, count in zip(alone, rows, strict=True)]
    return Calibration(times, max(statistics.median(outside), 0.0))


def note(text: str) -> None:
    """Report progress."""
    sys.stderr.write(f"{text}\n")


def loads(concurrency: str, rates: str) -> list[Load]:
    """The loads of the command line."""
    closed: list[Load] = [ClosedLoop(int(text)) for text in concurrency.split(",") if text]
    return closed + [OpenLoop(float(text)) for text in rates.split(",") if text]


def rows(pairs: dict[str, Pair]) -> list[list[object]]:
    """The rows of the table."""
    found: list[list[object]] = []
    for load, pair in pairs.items():
        drift = max(map(abs, pair.drifts))
        for name, real, simulated in pair.figures():
            error = simulated / real - 1
            within = "yes" if abs(error) <= ALLOWED else "no"
            found.append([load, name, real, simulated, f"{error:+.1%}", within, f"{drift:.0%}"])
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--rate", default="")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", default="64:128")
    parser.add_argument("--answer", default="32:64")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=max(usable_cores() - 1, 1))
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def play(given: argparse.Namespace, shape: RequestShape, runner: NativeRunner, target: LoadTarget) -> dict[str, Pair]:
    """Alternate calibration and load for all rounds."""
    wanted = loads(given.concurrency, given.rate)
    pairs = {str(load): Pair() for load in wanted}
    bounds = Bounds(given.requests, PATIENCE_S, PATIENCE_S)

    def calibrate() -> Calibration:
        return anchored(target, measure(runner, time.perf_counter, 2, 0.0, lambda _: None, shape.prompt.most))

    before = calibrate()
    for number in range(given.rounds):
        for load in wanted:
            note(f"round {number + 1} of {given.rounds}, {load}")
            source = RequestSource(shape.requests, given.seed + 100 * number + wanted.index(load))
            session = LoadTest(TrialPlan(target, (load,), bounds, 64, None), source, lambda _: None)
            asyncio.run(session.run())
            after = calibrate()
            both = before.mean(after)
            setup = Setup(both.times, runner.info.pages_total, runner.info.max_context, travel=both.travel)
            (trial,) = session.trials
            answered = sorted((one for one in trial.outcomes if one.error is None), key=lambda one: one.due)
            requests = [as_request(at, outcome) for at, outcome in enumerate(answered)]
            played = simulate(setup, requests, load, str(number))
            pair = pairs[str(load)]
            pair.outcomes[0].extend(answered)
            pair.outcomes[1].extend(played.outcomes)
            pair.real.append(Summary.of(answered))
            pair.simulated.append(Summary.of(played.outcomes))
            pair.drifts.append(after.times.seconds(((1, 1),), 1) / before.times.seconds(((1, 1),), 1) - 1)
            one, four = (1e3 * both.times.seconds(((1, 100),) * count, count) for count in (1, 4))
            note(
                f"  step of 1 row {one:.1f} ms, of 4 {four:.1f} ms; engine and server {1e3 * both.times.fixed:.2f} ms "
                f"a step, {1e3 * both.times.token:.2f} ms a token; outside {1e3 * both.travel:.1f} ms; "
                f"server {pair.real[-1].token_rate:.1f} tok/s, simulated {pair.simulated[-1].token_rate:.1f}"
            )
            before = after
    return pairs


def play_engine(given: argparse.Namespace, shape: RequestShape, runner: NativeRunner) -> dict[str, Pair]:
    """The same with the engine alone, in processor time."""
    DraftLength.choose = lambda *_: 0  # type: ignore[method-assign]
    wanted = loads(given.concurrency, given.rate)
    pairs = {str(load): Pair() for load in wanted}

    def calibrate() -> StepTimes:
        return measure(runner, time.thread_time, 2, 0.0, lambda _: None, shape.prompt.most)

    before = calibrate()
    for number in range(given.rounds):
        for load in wanted:
            note(f"round {number + 1} of {given.rounds}, {load}")
            seed = f"{given.seed} {number} {load}"
            requests: Sequence[WorkloadRequest] = shape.requests(given.requests, seed)
            if isinstance(load, OpenLoop) and load.rate is not None:
                requests = poisson(requests, load.rate, seed)
            setup = Setup(before, runner.info.pages_total, runner.info.max_context)
            lent = BorrowedRunner(runner, time.thread_time)
            real = simulate(setup, requests, load, seed, VirtualClock(time.thread_time), cast("Runner", lent))
            lent.free_all()
            after = calibrate()
            played = simulate(replace(setup, times=mean_of(before, after)), requests, load, seed)
            pair = pairs[str(load)]
            pair.outcomes[0].extend(real.outcomes)
            pair.outcomes[1].extend(played.outcomes)
            pair.real.append(Summary.of(real.outcomes))
            pair.simulated.append(Summary.of(played.outcomes))
            pair.drifts.append(after.seconds(((1, 1),), 1) / before.seconds(((1, 1),), 1) - 1)
            before = after
    return pairs


def main() -> None:
    """Parse the command line, measure, simulate, print; the exit code is 1 if a figure is off by more than 15 %."""
    given = arguments()
    shape = RequestShape(Lengths.parse(given.prompt, "--prompt"), Lengths.parse(given.answer, "--answer"))
    with open_model(given.model) as file:
        runner = NativeRunner(file, kv_bytes=given.kv_mib << 20, threads=1 if given.engine else given.threads)
    if given.engine:
        pairs = play_engine(given, shape, runner)
    else:
        with localllm(given.model, given.threads, given.kv_mib, speculates=False) as server:
            pairs = play(given, shape, runner, LoadTarget(server.url, "openai", server.model, True, {}))
    runner.close()
    found = rows(pairs)
    heads = ("load", "figure", "server", "simulated", "error", "within 15 %", "drift")
    table(heads, found)
    if given.json is not None:
        given.json.write_text(json.dumps([dict(zip(heads, row, strict=True)) for row in found], indent=1))
    sys.exit(any(row[5] == "no" for row in found))


if __name__ == "__main__":
    main()
