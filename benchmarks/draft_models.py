"""Speed with a draft model against the same model without one, and against always drafting a fixed number of tokens.

    draft_models.py MODEL.gguf DRAFT.gguf [--tokens 90] [--fixed 1,2,3,4] [--temperatures 0,0.7,1] [--threads 1 2]
                    [--rounds 1] [--processor-time]

The model answers a question about code and one about a story, in its chat template, each with a new engine that has
learned nothing yet; "again" is the same engine's second answer, to a similar question. Prompt lookup is off, and so is
reuse of prefixes. Seconds of decoding, relative to the model alone: above 1 is faster. The texts must be the same.
--processor-time measures processor time, for machines that others use too; with one thread only. The defaults take
about ten minutes with 1.5 and 0.5 billion parameters and 60 ms a token.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.engine_tools import KV_BYTES, chosen_clock, table
from gguf_io import load_tokenizer, open_model
from gguf_io.chat_template import load_chat_template
from localllm.engine.drafter import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.speculation import LookupLength, ModelDraftLength
from localllm.engine.stream import Completion
from localllm.wings.lab.simulate.fit import BorrowedRunner
from models.native_runner import NativeRunner

QUESTIONS = {
    "code": (
        "Write a Python class for a priority queue with push, pop and a method that lists all items in order.",
        "Write Python functions that parse a CSV file by hand and compute each column's mean.",
    ),
    "prose": (
        "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
        "Describe a walk through an old harbour town on a foggy morning.",
    ),
}


class Fixed(ModelDraftLength):
    """Always drafts as many tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def _choose(self, most: int, *_: object) -> int:
        return min(self._count, most)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--tokens", type=int, default=90)
    parser.add_argument("--fixed", default="1,2,3,4")
    parser.add_argument("--temperatures", default="0,0.7,1")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    clock = chosen_clock(parser, arguments)
    LookupLength._choose = lambda *_: 0  # type: ignore[method-assign, assignment]
    fixed = [int(count) for count in arguments.fixed.split(",")]
    rows: list[list[object]] = []
    for threads in arguments.threads:
        rows += measured(arguments, threads, fixed, clock)
    heads = ["threads, answer", "off s", "own choice", "of the best", "drafted", "accepted"]
    table([*heads, *(f"always {count}" for count in fixed)], rows)
    sys.stdout.write("Goals: own choice never below 0.98; at least 0.95 of the best.\n")


def measured(
    arguments: argparse.Namespace, threads: int, fixed: Sequence[int], clock: Callable[[], float]
) -> list[list[object]]:
    """The table's rows for a number of threads."""
    runners = []
    for path in (arguments.model, arguments.draft):
        with open_model(path) as file:
            runners.append(NativeRunner(file, kv_bytes=KV_BYTES // 8, threads=threads))
    with open_model(arguments.model) as file:
        tokenizer, template = load_tokenizer(file), load_chat_template(file)
    rows: list[list[object]] = []
    for temperature in map(float, arguments.temperatures.split(",")):
        for kind, questions in QUESTIONS.items():
            sampling = SamplingParams(temperature=temperature, seed=1)
            texts = [
                template.render([{"role": "user", "content": one}], add_generation_prompt=True) for one in questions
            ]
            prompts = [tuple(tokenizer.encode(one, add_special=False, parse_special=True)) for one in texts]
            asked = [GenerationRequest(one, sampling, arguments.tokens, ignore_eos=True) for one in prompts]
            subjects: dict[str, Callable[[], ModelDraftLength] | None] = {"off": None, "own": ModelDraftLength}
            subjects |= {f"{count}": (lambda count=count: Fixed(count)) for count in fixed}
            found: dict[str, list[list[Completion]]] = {name: [] for name in subjects}
            for _ in range(arguments.rounds):
                for name, length in subjects.items():
                    found[name].append(answers(runners, length, asked, clock, tokenizer))
            seconds = {
                name: [statistics.median(done[at].last.timings.decode_s for done in said) for at in range(len(asked))]
                for name, said in found.items()
            }
            if any(said[0][at].token_ids != found["off"][0][at].token_ids for said in found.values() for at in (0, 1)):
                raise SystemExit("the texts differ")
            for at, when in enumerate(("new", "again")):
                off, counts = seconds["off"][at], found["own"][0][at].last.counts
                others = [off / seconds[str(count)][at] for count in fixed]
                mine = off / seconds["own"][at]
                answer = f"{threads}, {kind}, {temperature:g}, {when}"
                sys.stderr.write(f"{answer}: {off:.2f} s, own {mine:.3f}, others {others}\n")
                rows.append([answer, off, mine, mine / max(1.0, *others), counts.drafted, counts.accepted, *others])
    for runner in runners:
        runner.close()
    return rows


def answers(
    runners: Sequence[NativeRunner],
    length: Callable[[], ModelDraftLength] | None,
    asked: Sequence[GenerationRequest],
    clock: Callable[[], float],
    vocabulary: object,
) -> list[Completion]:
    """The answers of a new engine on these runners, one after the other."""
    lent = [BorrowedRunner(runner, clock) for runner in runners]
    drafter = DraftModel(lent[1], clock) if length else None  # type: ignore[arg-type]
    if drafter and length:
        drafter.length = length()
    engine = Engine(lent[0], vocabulary, drafter=drafter, clock=clock)  # type: ignore[arg-type]
    done = []
    for request in asked:
        stream = engine.submit(request)
        while engine.step():
            pass
        done.append(stream.collect())
    for runner in lent:
        runner.free_all()
    return done


if __name__ == "__main__":
    main()
