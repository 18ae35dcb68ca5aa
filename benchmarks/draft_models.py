"""Speed with a draft model against the same model without one, and against always drafting a fixed number of tokens.

    draft_models.py MODEL.gguf DRAFT.gguf [--tokens 90] [--fixed 1,2,3,4,5,6] [--temperatures 0,0.7] [--threads 1 2]
                    [--kinds code,prose] [--rounds 1] [--processor-time] [--store FILE [--limit SECONDS]]

The model answers questions about code and stories, two of each kind, in its chat template: "first" with a new engine
that has learned nothing yet, "later" with one that begins with what the first one kept. Prompt lookup is off, and so is
reuse of prefixes. Seconds of decoding, relative to the model alone: above 1 is faster. The texts must be the same.
--processor-time measures processor time, for machines that others use too; with one thread only. --store keeps each
round in a file, so that a call with the same options goes on where the last one ended, and --limit ends it after so
many seconds, once a round is complete.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.engine_tools import KV_BYTES, chosen_clock, table
from gguf_io import load_tokenizer, open_model
from gguf_io.chat_template import load_chat_template
from localllm.engine.drafter import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.measured import Measured
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
OFF, FIRST, LATER = "off", "first", "later"


class Fixed(ModelDraftLength):
    """Always drafts as many tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def _choose(self, most: int, *_: object) -> int:
        return min(self._count, most)


class Kept(Measured):
    """What one engine leaves to the next."""

    def __init__(self) -> None:
        super().__init__("draft_costs", "benchmark")
        self._kept: dict[str, object] = {}

    def read(self) -> dict[str, object]:
        """What was written."""
        return self._kept

    def write(self, measured: Mapping[str, object]) -> None:
        """Keep it."""
        self._kept = dict(measured)


class Pair:
    """A model and the one that drafts for it, and questions for them."""

    def __init__(self, arguments: argparse.Namespace, threads: int, clock: Callable[[], float]) -> None:
        self._clock, self._tokens = clock, arguments.tokens
        self._runners = []
        for path in (arguments.model, arguments.draft):
            with open_model(path) as file:
                self._runners.append(NativeRunner(file, kv_bytes=KV_BYTES // 8, threads=threads))
        with open_model(arguments.model) as file:
            self._tokenizer, self._template = load_tokenizer(file), load_chat_template(file)

    def close(self) -> None:
        """Free both."""
        for runner in self._runners:
            runner.close()

    def round(self, kind: str, temperature: float, seed: int, fixed: Sequence[int]) -> dict[str, list[list[float]]]:
        """By subject, for each answer: seconds of decoding, and tokens drafted and accepted."""
        kept = Kept()
        subjects: dict[str, Callable[[DraftModel], None] | None] = {
            OFF: None,
            FIRST: lambda drafter: drafter.recall(kept),
            LATER: lambda drafter: drafter.recall(kept),
        }
        subjects |= {f"{count}": (lambda drafter, count=count: _fix(drafter, count)) for count in fixed}
        said = {name: self._answers(kind, temperature, seed, prepare) for name, prepare in subjects.items()}
        texts = {name: [one.token_ids for one in answers] for name, answers in said.items()}
        if any(text != texts[OFF] for text in texts.values()):
            raise SystemExit("the texts differ")
        return {
            name: [[one.last.timings.decode_s, one.last.counts.drafted, one.last.counts.accepted] for one in answers]
            for name, answers in said.items()
        }

    def _answers(
        self, kind: str, temperature: float, seed: int, prepare: Callable[[DraftModel], None] | None
    ) -> list[Completion]:
        """The answers of a new engine, one after the other. prepare: the drafter; None for none."""
        lent = [BorrowedRunner(runner, self._clock) for runner in self._runners]
        drafter = None
        if prepare is not None:
            drafter = DraftModel(lent[1], self._clock)  # type: ignore[arg-type]
            prepare(drafter)
        engine = Engine(lent[0], self._tokenizer, drafter=drafter, clock=self._clock)  # type: ignore[arg-type]
        done = []
        for question in QUESTIONS[kind]:
            text = self._template.render([{"role": "user", "content": question}], add_generation_prompt=True)
            prompt = tuple(self._tokenizer.encode(text, add_special=False, parse_special=True))
            sampling = SamplingParams(temperature=temperature, seed=seed)
            stream = engine.submit(GenerationRequest(prompt, sampling, self._tokens, ignore_eos=True))
            while engine.step():
                pass
            done.append(stream.collect())
        if drafter is not None:
            drafter.keep()
        for runner in lent:
            runner.free_all()
        return done


def _fix(drafter: DraftModel, count: int) -> None:
    drafter.length = Fixed(count)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--tokens", type=int, default=90)
    parser.add_argument("--fixed", default="1,2,3,4,5,6")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", default="code,prose")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--limit", type=float, default=float("inf"))
    arguments = parser.parse_args()
    clock = chosen_clock(parser, arguments)
    LookupLength._choose = lambda *_: 0  # type: ignore[method-assign, assignment]
    fixed = [int(count) for count in arguments.fixed.split(",")]
    lines = arguments.store.read_text(encoding="utf-8") if arguments.store and arguments.store.exists() else ""
    done = {tuple(case): found for case, found in map(json.loads, lines.splitlines())}
    began = time.monotonic()
    for threads in arguments.threads:
        wanted = [
            (threads, kind, temperature, number)
            for number in range(arguments.rounds)
            for temperature in map(float, arguments.temperatures.split(","))
            for kind in arguments.kinds.split(",")
        ]
        wanted = [case for case in wanted if case not in done]
        pair = Pair(arguments, threads, clock) if wanted else None
        for case in wanted:
            assert pair is not None
            done[case] = pair.round(case[1], case[2], case[3] + 1, fixed)
            if arguments.store:
                with arguments.store.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([case, done[case]]) + "\n")
            if time.monotonic() - began > arguments.limit:
                break
        if pair is not None:
            pair.close()
    show(done, fixed)


def show(done: Mapping[tuple[int, str, float, int], Mapping[str, Sequence[Sequence[float]]]], fixed: list[int]) -> None:
    """Print a table of the medians of all rounds."""
    rounds: dict[tuple[int, str, float], list[Mapping[str, Sequence[Sequence[float]]]]] = defaultdict(list)
    for (threads, kind, temperature, _), found in done.items():
        rounds[threads, kind, temperature].append(found)
    rows: list[list[object]] = []
    for (threads, kind, temperature), several in sorted(rounds.items()):
        for at in range(len(QUESTIONS[kind])):
            times = {
                name: statistics.median(found[OFF][at][0] / found[name][at][0] for found in several)
                for name in (FIRST, LATER, *map(str, fixed))
            }
            best = max(1.0, *(times[str(count)] for count in fixed))
            row = [f"{threads}, {kind}, {temperature:g}", len(several), several[0][OFF][at][0]]
            for name in (FIRST, LATER):
                drafted, accepted = (sum(found[name][at][which] for found in several) for which in (1, 2))
                row += [times[name], times[name] / best, f"{accepted} of {drafted}"]
            rows.append([*row, *(times[str(count)] for count in fixed)])
    own = [head for name in (FIRST, LATER) for head in (name, "of the best", "accepted")]
    table(["threads, answer", "rounds", "off s", *own, *(f"always {count}" for count in fixed)], rows)
    sys.stdout.write("Goals: first and later never below 0.98; at least 0.95 of the best.\n")


if __name__ == "__main__":
    main()
