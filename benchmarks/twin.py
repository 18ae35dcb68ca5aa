"""The same workload on a real server and in the simulation: how far the simulation is from what happens.

    twin.py MODEL.gguf [--concurrency 1,4] [--rate R,...] [--requests 24] [--prompt 64:128] [--answer 16:48]
        [--threads N] [--rounds 2] [--overhead MS] [--kv-mib 512]

Before and after each load the model's steps are timed in this process, as `localllm simulate --measure` does; the means
of both are the cost model, so that what else the machine does then counts for both. The drift column tells how much
longer a step of one row took after the load than before it: where that is large, the figures say nothing. The server
does not speculate, since a model's answers repeat themselves in ways that no simulation knows. Each request is
simulated with the numbers of tokens that the server counted. --overhead: ms of a step outside of the kernels.
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
from localllm.measure.simulate.simulation import Setup, simulate
from localllm.measure.workload.requests import Block, Lengths, Request, Shape
from models.native_runner import NativeRunner

PATIENCE_S = 600.0


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


def compare(load: Load, real: Summary, simulated: Summary, drift: float) -> list[list[object]]:
    """Rows of figures: real, simulated, and the difference."""
    figures = []
    for name in ("ttft", "tpot"):
        for rank in ("p50", "p95"):
            pair = (getattr(getattr(each, name), rank) * 1e3 for each in (real, simulated))
            figures.append((f"{name.upper()} {rank} ms", *pair))
    figures.append(("tok/s", real.token_rate, simulated.token_rate))
    return [[str(load), name, one, other, f"{other / one - 1:+.0%}", f"{drift:+.0%}"] for name, one, other in figures]


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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--overhead", type=float, default=0.0)
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    loads: list[Load] = [ClosedLoop(int(text)) for text in arguments.concurrency.split(",") if text]
    loads += [OpenLoop(float(text)) for text in arguments.rate.split(",") if text]
    shape = Shape(Lengths.parse(arguments.prompt, "--prompt"), Lengths.parse(arguments.answer, "--answer"))
    rows: list[list[object]] = []
    with open_model(arguments.model) as file:
        runner = NativeRunner(file, kv_bytes=arguments.kv_mib << 20, threads=arguments.threads)

    def times() -> StepTimes:
        return measure(
            runner, time.perf_counter, arguments.rounds, arguments.overhead / 1e3, note, shape.prompt.most * 2
        )

    with localllm(arguments.model, arguments.threads, arguments.kv_mib, speculates=False) as server:
        target = Target(server.url, "openai", server.model, True, {})
        bounds = Bounds(arguments.requests, PATIENCE_S, PATIENCE_S)
        for number, load in enumerate(loads, arguments.seed):
            session = Session(Plan(target, (load,), bounds, 64, None), Source(shape.requests, number), note)
            before = times()
            asyncio.run(session.run())
            after = times()
            setup = Setup(between(before, after), runner.info.pages_total, runner.info.max_context)
            (trial,) = session.trials
            answered = sorted((one for one in trial.outcomes if one.error is None), key=lambda one: one.due)
            requests = [as_request(at, outcome) for at, outcome in enumerate(answered)]
            played = simulate(setup, requests, load, str(number))
            drift = after.products(1) / before.products(1) - 1
            rows += compare(load, trial.summary(None), Summary.of(played.outcomes), drift)
    runner.close()
    table(("load", "figure", "server", "simulated", "difference", "drift"), rows)


if __name__ == "__main__":
    main()
