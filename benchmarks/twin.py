"""The same workload on a real server and in the simulation: how far the simulation is from what happens.

    twin.py MODEL.gguf [--concurrency 1,4] [--rate R,...] [--requests 24] [--prompt 64:128] [--answer 16:48]
        [--threads N] [--rounds 3] [--overhead MS] [--kv-mib 512]

The model's steps are timed first, as `localllm simulate --measure` does, then once more after the load, and the medians
of both are taken for the cost model: what else the machine does then counts the same for both. The server does not
speculate, since made-up text of a model repeats itself in ways that no simulation knows. Each request is simulated with
the numbers of tokens that the server counted. --overhead: what a step takes outside of the kernels, in milliseconds.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from benchmarks.engine_tools import table
from benchmarks.servers import localllm
from cpu_kernels.cores import usable_cores
from gguf_io import open_model
from localllm.measure.latency import Outcome, Summary
from localllm.measure.loadtest.server import Target
from localllm.measure.loadtest.session import Plan, Session, Source
from localllm.measure.loadtest.trial import Bounds, ClosedLoop, Load, OpenLoop
from localllm.measure.simulate.costs import Curve, StepTimes
from localllm.measure.simulate.fit import measure
from localllm.measure.simulate.runner import PAGE
from localllm.measure.simulate.simulation import Setup, simulate
from localllm.measure.workload.requests import Block, Lengths, Request, Shape
from models.native_runner import NativeRunner

PATIENCE_S = 600.0


def step_times(model: Path, arguments: argparse.Namespace) -> tuple[StepTimes, int, int]:
    """The model's step times, and how many tokens its pages and its context hold."""
    with open_model(model) as file:
        runner = NativeRunner(file, kv_bytes=arguments.kv_mib << 20, threads=arguments.threads)
    try:
        times = measure(runner, time.perf_counter, arguments.rounds, arguments.overhead / 1e3, note)
    finally:
        runner.close()
    return times, runner.info.pages_total * runner.info.page_size, runner.info.max_context


def between(first: StepTimes, second: StepTimes) -> StepTimes:
    """The mean of two measurements."""

    def mean(one: Curve, other: Curve) -> Curve:
        pairs = zip(one.points, other.points, strict=True)
        return Curve(tuple((rows, (before + after) / 2) for (rows, before), (_, after) in pairs))

    return StepTimes(
        mean(first.products, second.products),
        mean(first.logits, second.logits),
        (first.kv_token + second.kv_token) / 2,
        (first.lookup + second.lookup) / 2,
        first.fixed,
    )


def as_request(number: int, outcome: Outcome) -> Request:
    """What the server was asked, by its own counts."""
    return Request(outcome.due, (Block(f"own {number}", outcome.prompt_tokens or 1),), outcome.tokens)


def compare(load: Load, real: Summary, simulated: Summary) -> list[list[object]]:
    """Rows of figures: real, simulated, and the difference."""
    figures = []
    for name in ("ttft", "tpot"):
        for rank in ("p50", "p95"):
            pair = (getattr(getattr(each, name), rank) * 1e3 for each in (real, simulated))
            figures.append((f"{name.upper()} {rank} ms", *pair))
    figures.append(("tok/s", real.token_rate, simulated.token_rate))
    return [[str(load), name, one, other, f"{other / one - 1:+.0%}"] for name, one, other in figures]


def note(text: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{text}\n")


def main() -> None:
    """Parse the command line, measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--rate", default="")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", default="64:128")
    parser.add_argument("--answer", default="16:48")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overhead", type=float, default=0.0)
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    loads: list[Load] = [ClosedLoop(int(text)) for text in arguments.concurrency.split(",") if text]
    loads += [OpenLoop(float(text)) for text in arguments.rate.split(",") if text]
    shape = Shape(Lengths.parse(arguments.prompt, "--prompt"), Lengths.parse(arguments.answer, "--answer"))
    before, tokens, context = step_times(arguments.model, arguments)
    with localllm(arguments.model, arguments.threads, arguments.kv_mib, speculates=False) as server:
        plan = Plan(
            Target(server.url, "openai", server.model, True, {}),
            tuple(loads),
            Bounds(arguments.requests, PATIENCE_S, PATIENCE_S),
            64,
            None,
        )
        session = Session(plan, Source(shape.requests, arguments.seed), note)
        asyncio.run(session.run())
    after, _, _ = step_times(arguments.model, arguments)
    setup = Setup(between(before, after), tokens // PAGE, context)
    rows: list[list[object]] = []
    for trial in session.trials:
        answered = sorted((one for one in trial.outcomes if one.error is None), key=lambda one: one.due)
        requests = [as_request(number, outcome) for number, outcome in enumerate(answered)]
        played = simulate(setup, requests, trial.load, str(arguments.seed))
        rows += compare(trial.load, trial.summary(None), Summary.of(played.outcomes))
    table(("load", "figure", "server", "simulated", "difference"), rows)
    drift = after.products(1) / before.products(1) - 1
    sys.stdout.write(f"A step of one row took {drift:+.0%} after the load against before it.\n")


if __name__ == "__main__":
    main()
