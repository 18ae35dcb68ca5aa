"""Decode speed of a model that drafts for itself against the same model without its own drafts.

    self_drafts.py MODEL.gguf TEXT.txt [--acceptance 0 0.5 0.8] [--prompt 400] [--tokens 96] [--rounds 5] [--threads N]
                   [--head HEAD.gguf] [--processor-time]

MODEL has multi-token prediction layers with any weights, or HEAD is an EAGLE-3 head for it. The output is scripted, as
in benchmarks.speculation: the runner computes every row, and then the next token of the text is made the likeliest. The
layer computes every guess, and then each is replaced by the text's next token or another one, so that it is right with
the given probability if all before it are. So the costs are the model's own. On and off alternate in one run; medians.
--processor-time measures processor time, for machines that others use too; with one thread only.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path

import numpy as np

from benchmarks.engine_tools import KV_BYTES, ask, chosen_clock, medians, table, text_tokens
from benchmarks.speculation import Scripted
from gguf_io import load_tokenizer, open_model
from localllm.engine.drafter import SelfDrafter
from localllm.engine.engine import Engine
from localllm.engine.request import TokenEvent
from models.native_runner import NativeRunner


class Guessing(Scripted):
    """A scripted runner whose guesses are right with the probability `acceptance`, as the layer knows."""

    def __init__(self, runner: NativeRunner) -> None:
        super().__init__(runner)
        self.acceptance = 0.0
        self._random = np.random.default_rng(1)

    def draft(self, wanted: Sequence[tuple[int, int, Sequence[float]]]) -> list[list[tuple[int, float]]]:
        """Compute the guesses, then replace each by the script's token or a wrong one."""
        always = []
        for sequence, token, least in wanted:
            goes_on = takewhile(lambda at, least=least: self.acceptance**at >= least[at], range(len(least)))
            always.append((sequence, token, [0.0 for _ in goes_on]))
        guesses: list[list[tuple[int, float]]] = self._runner.draft(always)
        for (sequence, _, _), guess in zip(wanted, guesses, strict=True):
            first = self._runner.sequence_length(sequence) + 1
            for at in range(len(guess)):
                right = self._random.random() < self.acceptance and first + at < len(self.script)
                guess[at] = (self.script[first + at] if right else 0), self.acceptance
        return guesses


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.8])
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    clock = chosen_clock(parser, arguments)
    with open_model(arguments.model) as file, ExitStack() as stack:
        tokenizer = load_tokenizer(file)
        drafts = stack.enter_context(open_model(arguments.head)) if arguments.head else True
        opened = {
            on: NativeRunner(file, kv_bytes=KV_BYTES, threads=arguments.threads, drafts=on and drafts)
            for on in (True, False)
        }
    runner, plain = Guessing(opened[True]), Scripted(opened[False])
    engines = {
        "on": Engine(runner, tokenizer, drafter=SelfDrafter(runner, clock), clock=clock),
        "off": Engine(plain, tokenizer, clock=clock),
    }
    for engine in engines.values():
        engine.start()
    if not runner.info.can_draft:
        parser.error(f"{arguments.model} has no layers of multi-token prediction that the native engine knows")
    text = text_tokens(tokenizer, arguments.text.read_text(encoding="utf-8"), arguments.prompt + arguments.tokens)
    prompt = text[: arguments.prompt]
    runner.script = plain.script = [*text, 0]
    last: dict[str, TokenEvent] = {}

    def run(name: str) -> float:
        last[name] = event = ask(engines[name], prompt, arguments.tokens)
        return (event.counts.generated - 1) / event.timings.decode_s

    subjects: dict[str, Callable[[], float]] = {"on": lambda: run("on"), "off": lambda: run("off")}
    rows = []
    for acceptance in arguments.acceptance:
        runner.acceptance = acceptance
        figures = medians(arguments.rounds, subjects)
        on, off, counts = figures["on"], figures["off"], last["on"].counts
        rows.append([acceptance, off, on, on / off, counts.drafted, counts.accepted / max(counts.drafted, 1)])
    for engine in engines.values():
        engine.close()
    table(("right", "off tok/s", "on tok/s", "times", "drafted", "accepted"), rows)
    sys.stdout.write("Goals: never below 0.98 times; 1.6 times where 0.8 of the guesses are right.\n")


if __name__ == "__main__":
    main()
