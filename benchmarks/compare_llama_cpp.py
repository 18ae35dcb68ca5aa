"""Prefill and decode of our engine and of llama.cpp on the same files, alternating; prints medians and ratios.

    compare_llama_cpp.py MODEL.gguf ... [--threads 1,2] [--prefill 512] [--decode 128] [--rounds 5] [--depth 0] [--json]
        [--processor-time]

Both run in this process on the same number of threads, one after the other within a round, so that a busy machine
hurts both alike; --processor-time reads the processor time of one thread instead of the clock. llama.cpp is measured
with and without flash attention and its better median counts.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.llama_peer import LlamaPeer
from gguf_io import open_model
from models import NativeRunner


class Subject(Protocol):
    """Something that computes one sequence."""

    def append(self, tokens: Sequence[int]) -> None:
        """Compute tokens after what is there."""

    def clear(self) -> None:
        """Forget the sequence."""


class Ours:
    """One sequence on the native runner."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        with open_model(path) as file:
            self.runner = NativeRunner(file, kv_bytes=context * 400_000, threads=threads)
        self._sequence = self.runner.create_sequence()

    def append(self, tokens: Sequence[int]) -> None:
        """Compute tokens after what is there, 512 at a time, with logits of the last."""
        for first in range(0, len(tokens), 512):
            piece = tokens[first : first + 512]
            start = self.runner.sequence_length(self._sequence)
            positions = range(start, start + len(piece))
            self.runner.run(piece, positions, [self._sequence] * len(piece), [len(piece) - 1])

    def clear(self) -> None:
        """Forget the sequence."""
        self.runner.truncate_sequence(self._sequence, 0)


@dataclass(frozen=True)
class Row:
    """Medians in tokens a second."""

    model: str
    threads: int
    depth: int
    measure: str
    ours: float
    llama_cpp: float

    @property
    def ratio(self) -> float:
        """How many times as fast we are."""
        return self.ours / self.llama_cpp


def measure(
    subject: Subject, tokens: list[int], prefill: int, decode: int, depth: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Tokens a second of prefill (from an empty sequence) and of decode (after `depth` tokens or the prompt)."""
    subject.clear()
    start = clock()
    subject.append(tokens[:prefill])
    prefilled = clock() - start
    if depth > prefill:
        subject.append(tokens[prefill:depth])
    start = clock()
    for token in tokens[:decode]:
        subject.append([token])
    return prefill / prefilled, decode / (clock() - start)


def compare(path: Path, threads: int, arguments: argparse.Namespace) -> list[Row]:
    """Measure one file at one number of threads."""
    longest = max(arguments.prefill, arguments.depth)
    clock = time.thread_time if arguments.processor_time else time.perf_counter
    context = longest + arguments.decode + 64
    tokens = np.random.default_rng(1).integers(100, 20_000, longest).tolist()
    subjects: dict[str, Subject] = {
        "ours": Ours(path, threads, context),
        "plain": LlamaPeer(path, threads, context, flash_attention=False),
        "flash": LlamaPeer(path, threads, context, flash_attention=True),
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for _ in range(arguments.rounds + 1):
        for name, subject in subjects.items():
            sizes = (arguments.prefill, arguments.decode, arguments.depth)
            figures[name].append(measure(subject, tokens, *sizes, clock))
    medians = {
        name: [statistics.median(column) for column in zip(*rounds[1:], strict=True)]
        for name, rounds in figures.items()
    }
    for subject in subjects.values():
        (subject.runner if isinstance(subject, Ours) else subject).close()  # type: ignore[attr-defined]
    return [
        Row(path.stem, threads, depth, label, medians["ours"][i], max(medians["plain"][i], medians["flash"][i]))
        for i, (label, depth) in enumerate(
            ((f"prefill {arguments.prefill}", 0), (f"decode {arguments.decode}", longest))
        )
    ]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--depth", type=int, default=0, help="tokens in the sequence before decoding")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, for busy machines")
    arguments = parser.parse_args()
    if arguments.processor_time and arguments.threads != "1":
        parser.error("--processor-time counts the calling thread alone; add --threads 1")
    rows: list[Row] = []
    for path in arguments.models:
        for threads in map(int, arguments.threads.split(",")):
            rows += compare(path, threads, arguments)
            if not arguments.json:
                for row in rows[-2:]:
                    sys.stdout.write(
                        f"{row.model:28} {row.threads} thr  {row.measure:12} at {row.depth:5}  "
                        f"ours {row.ours:8.1f}  llama.cpp {row.llama_cpp:8.1f}  ratio {row.ratio:5.2f}\n"
                    )
                    sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
