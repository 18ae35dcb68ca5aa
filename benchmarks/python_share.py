"""The share of a decoding step outside of the compiled forward pass: the engine, sampling, text, events.

    python_share.py MODEL.gguf TEXT.txt [--tokens 96] [--rounds 3] [--threads N]

A step lasts from one call of the compiled program, which runs on all threads, to the next; the compiled part is the
time inside the call. The rest is Python and NumPy, including waits for the interpreter lock and for the reader.
Sampling methods alternate; medians over the rounds. Speculation is off.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engine_tools import GREEDY, serve, table, text_tokens
from cpu_kernels.threads import ThreadTeam
from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.speculation import DraftLength

LONG_STRINGS = {"type": "array", "items": {"type": "string", "minLength": 24}, "minItems": 1000}


@contextmanager
def timed_calls() -> Iterator[list[tuple[float, float]]]:
    """Record when each call of a compiled program begins and ends."""
    calls: list[tuple[float, float]] = []
    run = ThreadTeam.run

    def timed(team: ThreadTeam, program: int, step: int) -> None:
        began = time.perf_counter()
        run(team, program, step)
        calls.append((began, time.perf_counter()))

    ThreadTeam.run = timed  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        ThreadTeam.run = run  # type: ignore[method-assign]


def measure(engine: Engine, request: GenerationRequest, streams: int) -> tuple[float, float]:
    """Median milliseconds of a step of all streams, and of its part that is not compiled."""
    with timed_calls() as calls:
        running = [engine.submit(request) for _ in range(streams)]
        for stream in running:
            stream.collect()
    # The prompts' steps are over by the eighth; in the last one, some streams may have ended.
    steps = list(pairwise(calls[8:-1]))
    whole = statistics.median(following[0] - began for (began, _), following in steps)
    rest = statistics.median(following[0] - ended for (_, ended), following in steps)
    return 1e3 * whole, 1e3 * rest


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    DraftLength.choose = lambda *_: 0  # type: ignore[method-assign, assignment]
    served = serve(arguments.model, arguments.threads, max_running=8)
    prompt = text_tokens(served.tokenizer, arguments.text.read_text(encoding="utf-8"), 64, start=5000)
    strings = compile_constraint(
        ConstraintKind.JSON_SCHEMA, json.dumps(LONG_STRINGS), ConstraintVocabulary(served.tokenizer)
    )
    ways: dict[str, tuple[SamplingParams, dict[str, Any], int]] = {
        "greedy": (GREEDY, {}, 1),
        "sampled, the defaults": (SamplingParams(seed=1), {}, 1),
        "sampled, repeat penalty": (SamplingParams(seed=1, repeat_penalty=1.1), {}, 1),
        "greedy, JSON Schema": (GREEDY, {"constraint": strings}, 1),
        "greedy, 8 streams": (GREEDY, {}, 8),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for at in range(arguments.rounds + 1):
        for name, (sampling, others, streams) in ways.items():
            request = GenerationRequest(prompt, sampling, max_tokens=arguments.tokens, **others)
            figures = measure(served.engine, request, streams)
            if at:
                found[name].append(figures)
    served.engine.close()
    rows = []
    for name, rounds in found.items():
        whole, rest = (statistics.median(column) for column in zip(*rounds, strict=True))
        rows.append([name, whole, rest, f"{rest / whole:.1%}"])
    table(("a step, by how tokens are chosen", "ms", "of it not compiled, ms", "share"), rows)
    sys.stdout.write("Goal: at most 2 %.\n")


if __name__ == "__main__":
    main()
