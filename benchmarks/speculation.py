"""Decode speed with prompt lookup against without speculation, on text that is copied and on text that is not.

    speculation.py MODEL.gguf TEXT.txt [--prompt 400] [--tokens 96] [--rounds 3] [--threads N]

The output is scripted: the runner computes every row, and then the next token of real text is made the likeliest. So
the texts are those of a model that copies its prompt with occasional edits, or writes something else, and the costs are
the model's own. On and off alternate; medians, and the acceptance rate.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.engine_tools import KV_BYTES, ask, medians, table, text_tokens
from gguf_io import load_tokenizer, open_model
from localllm.engine.engine import Engine
from localllm.engine.speculation import DraftLength
from models.native_runner import NativeRunner

EDIT_EVERY = 30


class Scripted:
    """A runner whose logits make the next token of a script the likeliest, whatever it computed."""

    def __init__(self, runner: NativeRunner) -> None:
        self._runner = runner
        self.script: Sequence[int] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        """Compute, then make the script's tokens the likeliest."""
        logits = self._runner.run(tokens, positions, sequences, wanted)
        for row, index in enumerate(wanted):
            logits[row, self.script[positions[index] + 1]] = 1e4
        return logits


def speed(
    engine: Engine, runner: Scripted, prompt: Sequence[int], text: Sequence[int], on: bool
) -> tuple[float, float]:
    """Decoded tokens per second, and the acceptance rate."""
    choose = DraftLength.choose
    if not on:
        DraftLength.choose = lambda *_: 0  # type: ignore[method-assign]
    try:
        runner.script = [*prompt, *text, 0]
        last = ask(engine, prompt, len(text))
    finally:
        DraftLength.choose = choose  # type: ignore[method-assign]
    counts = last.counts
    return (counts.generated - 1) / last.timings.decode_s, counts.accepted / max(counts.drafted, 1)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    with open_model(arguments.model) as file:
        tokenizer = load_tokenizer(file)
        runner = Scripted(NativeRunner(file, kv_bytes=KV_BYTES, threads=arguments.threads))
    engine = Engine(runner, tokenizer)
    engine.start()
    prompt = text_tokens(tokenizer, text, arguments.prompt, start=5000)
    copied = list(prompt[50 : 50 + arguments.tokens])
    copied[EDIT_EVERY::EDIT_EVERY] = text_tokens(tokenizer, text, len(copied[EDIT_EVERY::EDIT_EVERY]), start=90_000)
    told = list(text_tokens(tokenizer, text, arguments.tokens, start=60_000))
    rows = []
    for name, continuation in ((f"copied, an edit every {EDIT_EVERY} tokens", copied), ("open text", told)):
        accepted: list[float] = []

        def run(on: bool, continuation: Sequence[int] = continuation, accepted: list[float] = accepted) -> float:
            figure, rate = speed(engine, runner, prompt, continuation, on)
            if on:
                accepted.append(rate)
            return figure

        subjects: dict[str, Callable[[], float]] = {"on": lambda run=run: run(True), "off": lambda run=run: run(False)}
        figures = medians(arguments.rounds, subjects)
        rows.append([name, figures["off"], figures["on"], figures["on"] / figures["off"], accepted[-1]])
    engine.close()
    table(("text", "off tok/s", "on tok/s", "times", "accepted"), rows)
    sys.stdout.write("Goals: copied at least 1.8 times, open text never below 0.97 times.\n")


if __name__ == "__main__":
    main()
