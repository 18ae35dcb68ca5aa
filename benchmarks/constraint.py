"""Decode speed with a constraint against without, one request at a time and several at once.

    constraint.py MODEL.gguf TEXT.txt [--tokens 64] [--rounds 5] [--threads N]

The constraints are JSON that cannot end within --tokens tokens: any object, and a schema of many strings and numbers.
Speculation is off on both sides. The variants alternate; medians.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.engine_tools import medians, serve, table, text_tokens
from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.speculation import DraftLength

RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 24}, "year": {"type": "integer", "minimum": 1000}},
        "required": ["name", "year"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
SCHEMAS = {"JSON object": {"type": "object", "minProperties": 99}, "JSON Schema": RECORDS}
GREEDY = SamplingParams(temperature=0)


def speed(engine: Engine, prompt: Sequence[int], tokens: int, streams: int, constraint: Constraint | None) -> float:
    """Tokens per second of one stream, from its first token on, with `streams` running at once."""
    request = GenerationRequest(tuple(prompt), GREEDY, max_tokens=tokens, ignore_eos=True, constraint=constraint)
    running = [engine.submit(request) for _ in range(streams)]
    lasts = [stream.collect().last for stream in running]
    return sum((last.counts.generated - 1) / last.timings.decode_s for last in lasts) / streams


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    DraftLength.choose = lambda *_: 0  # type: ignore[method-assign, assignment]
    served = serve(arguments.model, arguments.threads, max_running=8)
    prompt = text_tokens(served.tokenizer, arguments.text.read_text(encoding="utf-8"), 64, start=5000)
    vocabulary = ConstraintVocabulary(served.tokenizer)
    constraints = {
        name: compile_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), vocabulary)
        for name, schema in SCHEMAS.items()
    }
    rows = []
    for streams in (1, 8):
        ways: dict[str, Callable[[], float]] = {
            name: lambda one=one, streams=streams: speed(served.engine, prompt, arguments.tokens, streams, one)
            for name, one in (("free", None), *constraints.items())
        }
        figures = medians(arguments.rounds, ways)
        free = figures.pop("free")
        rows += [[streams, name, free, figure, free / figure] for name, figure in figures.items()]
    served.engine.close()
    table(("streams", "constraint", "free tok/s", "constrained tok/s", "time, times"), rows)
    sys.stdout.write("Goal: at most 1.05 times.\n")


if __name__ == "__main__":
    main()
