"""What a step of a few rows costs, beside its bound: the larger of one row and n times a token of prefill.

    python -m benchmarks.rows MODEL.gguf ... [--rows 1,2,3,4,6,8,12,16] [--threads 1] [--prompt 64] [--rounds 7] [--own]

The rows are tokens of one sequence after a prompt, with logits for all, as a draft is checked. A row's price in prefill
is that of a token of 128, also with logits for all; one row stands for reading the weights. Figures are medians in
milliseconds, of one thread its processor time. The steps of all counts, and llama.cpp's, alternate. --own leaves
llama.cpp out. LOCALLLM_ISA chooses the instruction set of our kernels.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_tools import medians, table
from benchmarks.llama_peer import LlamaPeer
from cpu_kernels.isa import ISA
from gguf_io import open_model
from models.native_runner import NativeRunner

PREFILL = 128
GOAL = 1.15


class Ours:
    """A sequence with a prompt on the native runner."""

    def __init__(self, path: Path, threads: int, prompt: list[int]) -> None:
        with open_model(path) as file:
            self.runner = NativeRunner(file, kv_bytes=1 << 28, threads=threads)
        self._sequence, self._prompt = self.runner.create_sequence(), len(prompt)
        self._run(prompt, 1)

    def _run(self, tokens: list[int], wanted: int) -> None:
        count, first = len(tokens), self.runner.sequence_length(self._sequence)
        positions = range(first, first + count)
        self.runner.run(tokens, positions, [self._sequence] * count, range(count - wanted, count))

    def step(self, tokens: list[int]) -> None:
        """Append tokens, with logits for all, and drop them."""
        self._run(tokens, len(tokens))
        self.runner.truncate_sequence(self._sequence, self._prompt)


class Llama(LlamaPeer):
    """The same on llama.cpp."""

    def __init__(self, path: Path, threads: int, prompt: list[int]) -> None:
        super().__init__(path, threads, len(prompt) + PREFILL + 64, flash_attention=True)
        self._prompt = len(prompt)
        self._batch: Any = self._llama.llama_batch_init(PREFILL, 0, 1)
        self.append(prompt)

    def step(self, tokens: list[int]) -> None:
        """Append tokens, with logits for all, and drop them."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.logits[row] = token, self._prompt + row, 1
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
        if self._llama.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        self._llama.llama_get_logits_ith(self._context, -1)[0]
        self.cut(self._prompt)

    def close(self) -> None:
        """Free the batch, the context and the model."""
        self._llama.llama_batch_free(self._batch)
        super().close()


def milliseconds(step: Callable[[list[int]], None], tokens: list[int], clock: Callable[[], float]) -> float:
    """The time of a step."""
    began = clock()
    step(tokens)
    return 1000 * (clock() - began)


def measure(path: Path, threads: int, arguments: argparse.Namespace) -> None:
    """Print a table for a file."""
    clock = time.process_time if threads == 1 else time.perf_counter
    counts = [int(part) for part in arguments.rows.split(",")]
    tokens = np.random.default_rng(1).integers(100, 20_000, PREFILL).tolist()
    prompt = np.random.default_rng(2).integers(100, 20_000, arguments.prompt).tolist()
    ours = Ours(path, threads, prompt)
    peer = None if arguments.own else Llama(path, threads, prompt)
    subjects = {}
    for count in sorted({1, PREFILL, *counts}):
        subjects[f"ours {count}"] = lambda count=count: milliseconds(ours.step, tokens[:count], clock)
        if peer is not None:
            subjects[f"llama.cpp {count}"] = lambda count=count: milliseconds(peer.step, tokens[:count], clock)
    found = medians(arguments.rounds, subjects)
    ours.runner.close()
    one, each = found["ours 1"], found[f"ours {PREFILL}"] / PREFILL
    rows = []
    for count in counts:
        bound = max(one, count * each)
        row: list[object] = [count, found[f"ours {count}"], bound, found[f"ours {count}"] / bound]
        if peer is not None:
            theirs = found[f"llama.cpp {count}"]
            row += [theirs, theirs / found[f"ours {count}"]]
        rows.append(row)
    if peer is not None:
        peer.close()
    unit = "processor time" if threads == 1 else "wall time"
    sys.stdout.write(f"{path.stem}, {ISA}, threads: {threads}, {unit}; a token of prefill takes {each:.2f} ms\n\n")
    heads = ["rows", "ms", "bound", "times the bound", "llama.cpp", "times ours"]
    table(heads[: len(rows[0])], rows)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rows", default="1,2,3,4,6,8,12,16")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--own", action="store_true", help="without llama.cpp")
    arguments = parser.parse_args()
    for path in arguments.models:
        for threads in arguments.threads.split(","):
            measure(path, int(threads), arguments)
    sys.stdout.write(f"Goal: at most {GOAL} times the bound.\n")


if __name__ == "__main__":
    main()
