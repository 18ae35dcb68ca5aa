"""Profiles where the time of a decoded token goes, in a real engine that serves one request."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from cpu_kernels.recorded_step import OperationKind
from localllm.engine.engine import Engine
from localllm.engine.generation import Vocabulary
from localllm.engine.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from models.native_runner import NativeRunner

PYTHON = "Python"


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Median times in seconds. parts: by kind of operation, and PYTHON for the time outside compiled operations."""

    depth: int
    seconds: float
    parts: dict[str, float]

    def share(self, part: str) -> float:
        """A part's share of the step's time, 0 to 1."""
        return self.parts[part] / self.seconds


def measure_steps(
    runner: "NativeRunner",
    vocabulary: Vocabulary,
    depths: Sequence[tuple[int, Sequence[int]]],
    steps: int,
) -> list[DecodeStep]:
    """Time an engine's steps at each depth. Closes the runner. depths: (depth, prompt) pairs.

    After each step, its compiled part runs twice more: as a whole, and in pieces by kind. The PYTHON part is the step's
    time minus that of the whole. Skips steps that verify draft tokens.
    """
    engine = Engine(runner, vocabulary)
    try:
        return [_measure(engine, runner, depth, prompt, steps) for depth, prompt in depths]
    finally:
        engine.close()


def _measure(engine: Engine, runner: "NativeRunner", depth: int, prompt: Sequence[int], steps: int) -> DecodeStep:
    request = GenerationRequest(
        tuple(prompt), SamplingParams(temperature=0), max_tokens=steps + 1, ignore_eos=True, persist=False
    )
    stream = engine.submit(request)
    python: list[float] = []
    kinds: dict[OperationKind, list[float]] = {kind: [] for kind in OperationKind}
    finished = False
    while not finished:
        took = _seconds_of(engine.step)
        events = stream.poll()
        finished = any(event.finish_reason is not None for event in events)
        step = runner.last_step()
        if step.rows == 1 and any(event.token_ids for event in events):
            python.append(took - _seconds_of(step.run))
            for kind, seconds in step.profile(perf_counter).items():
                kinds[kind].append(seconds)
    parts = {str(kind): statistics.median(seconds) for kind, seconds in kinds.items()}
    parts[PYTHON] = max(0.0, statistics.median(python))
    return DecodeStep(depth, sum(parts.values()), parts)


def _seconds_of(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began
