"""Decodes eight sequences together, on our engine's runner and on llama.cpp, alternating; prints medians and ratios.

    batched.py MODEL.gguf ... [--threads 1,2] [--sequences 8] [--prompt 32] [--decode 16] [--rounds 5]

All sequences have random tokens of their own. llama.cpp decodes them with one llama_decode per step, with and without
flash attention; its better median counts. "Alone" is one sequence of the same length on our engine.
"""

import argparse
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.engine_tools import medians, table
from benchmarks.llama_peer import LlamaPeer
from gguf_io import open_model
from models.native_runner import NativeRunner


class Batch(Protocol):
    """Several sequences that grow together."""

    def step(self, tokens: list[int], position: int) -> None:
        """Compute one token for each sequence, with logits for all."""

    def clear(self) -> None:
        """Forget all sequences."""


class Ours:
    """Sequences on the native runner."""

    def __init__(self, path: Path, threads: int, sequences: int, context: int) -> None:
        with open_model(path) as file:
            self.runner = NativeRunner(file, kv_bytes=sequences * context * 400_000, threads=threads)
        self._sequences = [self.runner.create_sequence() for _ in range(sequences)]

    def step(self, tokens: list[int], position: int) -> None:
        """Compute one token for each of the first len(tokens) sequences."""
        rows = len(tokens)
        self.runner.run(tokens, [position] * rows, self._sequences[:rows], range(rows))

    def clear(self) -> None:
        """Forget all sequences."""
        for sequence in self._sequences:
            self.runner.truncate_sequence(sequence, 0)


class LlamaBatch(LlamaPeer):
    """Sequences on llama.cpp, computed in one batch."""

    def __init__(
        self, path: Path, threads: int, sequences: int, context: int, *, flash_attention: bool, gpu_layers: int = 0
    ) -> None:
        super().__init__(
            path,
            threads,
            sequences * context,
            flash_attention=flash_attention,
            sequences=sequences,
            gpu_layers=gpu_layers,
        )
        self._batch: Any = self._llama.llama_batch_init(sequences, 0, 1)

    def step(self, tokens: list[int], position: int) -> None:
        """Compute one token for each sequence."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, 1
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = row
        if self._llama.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        self._llama.llama_get_logits_ith(self._context, -1)[0]

    def likeliest(self, rows: int) -> list[int]:
        """The token with the largest logit in each row of the last step."""
        logits = [self._llama.llama_get_logits_ith(self._context, row) for row in range(rows)]
        return [int(np.ctypeslib.as_array(row, shape=(self._vocabulary,)).argmax()) for row in logits]

    def close(self) -> None:
        """Free the batch, the context and the model."""
        self._llama.llama_batch_free(self._batch)
        super().close()


def speed(batch: Batch, tokens: list[list[int]], prompt: int) -> float:
    """Tokens per second of all sequences after a prompt. tokens: for each step, one per sequence."""
    batch.clear()
    for position, step in enumerate(tokens[:prompt]):
        batch.step(step, position)
    began = time.perf_counter()
    for position, step in enumerate(tokens[prompt:], start=prompt):
        batch.step(step, position)
    return sum(map(len, tokens[prompt:])) / (time.perf_counter() - began)


def compare(path: Path, threads: int, arguments: argparse.Namespace) -> tuple[object, ...]:
    """Measure one file at one thread count; return a row of the table."""
    sequences, prompt = arguments.sequences, arguments.prompt
    steps = np.random.default_rng(1).integers(100, 20_000, (prompt + arguments.decode, sequences)).tolist()
    single = [step[:1] for step in steps]
    context = len(steps) + 64
    ours = Ours(path, threads, sequences, context)
    peers = [LlamaBatch(path, threads, sequences, context, flash_attention=flash) for flash in (False, True)]
    found = medians(
        arguments.rounds,
        {
            "ours": lambda: speed(ours, steps, prompt),
            "alone": lambda: speed(ours, single, prompt),
            "plain": lambda: speed(peers[0], steps, prompt),
            "flash": lambda: speed(peers[1], steps, prompt),
        },
    )
    ours.runner.close()
    for peer in peers:
        peer.close()
    llama = max(found["plain"], found["flash"])
    together, alone = found["ours"], found["alone"]
    return path.stem, threads, together, llama, together / llama, alone, together / alone


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = [compare(path, threads, arguments) for path in arguments.models for threads in _numbers(arguments.threads)]
    together = f"{arguments.sequences} together"
    table(("model", "threads", together, "llama.cpp", "ratio", "alone", "times alone"), rows)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
