"""Prefill and decode of our engine and of llama.cpp on the same files, alternating; prints medians and ratios.

    compare_llama_cpp.py MODEL.gguf ... [--threads 1,2] [--prefill 512] [--decode 128] [--rounds 5] [--depth 0]
                         [--kv-type-k f16] [--kv-type-v f16] [--processor-time] [--json]

Both run in this process on the same number of threads, one after the other within a round, so that a busy machine
hurts both alike; --processor-time reads the processor time of one thread instead of the clock. llama.cpp is measured
with and without flash attention and its better median counts. The sequence is filled to --depth once, then every round
decodes from there.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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

    def cut(self, length: int) -> None:
        """Forget the sequence's tokens from `length` on."""

    def close(self) -> None:
        """Free everything."""


class Ours:
    """One sequence on the native runner."""

    def __init__(self, path: Path, threads: int, context: int, kv_types: tuple[str, str] = ("f16", "f16")) -> None:
        with open_model(path) as file:
            self.runner = NativeRunner(file, kv_bytes=context * 400_000, threads=threads, kv_types=kv_types)
        self._sequence = self.runner.create_sequence()

    def append(self, tokens: Sequence[int]) -> None:
        """Compute tokens after what is there, 512 at a time, with logits of the last."""
        for first in range(0, len(tokens), 512):
            piece = tokens[first : first + 512]
            start = self.runner.sequence_length(self._sequence)
            positions = range(start, start + len(piece))
            self.runner.run(piece, positions, [self._sequence] * len(piece), [len(piece) - 1])

    def cut(self, length: int) -> None:
        """Forget the sequence's tokens from `length` on."""
        self.runner.truncate_sequence(self._sequence, length)

    def close(self) -> None:
        """Free everything."""
        self.runner.close()


@dataclass(frozen=True)
class Row:
    """Medians in tokens a second."""

    model: str
    threads: int
    depth: int
    measure: str
    kv_types: str
    ours: float
    llama_cpp: float
    llama_cpp_attention: str

    @property
    def ratio(self) -> float:
        """How many times as fast we are."""
        return self.ours / self.llama_cpp


def seconds(clock: Callable[[], float], work: Callable[[], None]) -> float:
    """How long something takes by a clock."""
    start = clock()
    work()
    return clock() - start


def subjects_of(path: Path, threads: int, context: int, kv_types: tuple[str, str]) -> dict[str, Subject]:
    """Us, and llama.cpp with and without flash attention, which values in q8_0 need."""
    subjects: dict[str, Subject] = {
        "ours": Ours(path, threads, context, kv_types),
        "flash": LlamaPeer(path, threads, context, flash_attention=True, kv_types=kv_types),
    }
    if kv_types[1] == "f16":
        subjects["plain"] = LlamaPeer(path, threads, context, flash_attention=False, kv_types=kv_types)
    return subjects


def compare(path: Path, threads: int, arguments: argparse.Namespace) -> list[Row]:
    """Measure one file at one number of threads."""
    depth = max(arguments.prefill, arguments.depth)
    types = arguments.kv_type_k, arguments.kv_type_v
    clock = time.thread_time if arguments.processor_time else time.perf_counter
    tokens = np.random.default_rng(1).integers(100, 20_000, depth + arguments.decode).tolist()
    subjects = subjects_of(path, threads, depth + arguments.decode + 64, types)
    prefill: dict[str, list[float]] = {name: [] for name in subjects}
    decode: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(arguments.rounds + 1 if arguments.prefill else 0):
        for name, subject in subjects.items():
            subject.cut(0)
            time_taken = seconds(clock, partial(subject.append, tokens[: arguments.prefill]))
            prefill[name].append(arguments.prefill / time_taken)
    for subject in subjects.values():
        subject.append(tokens[arguments.prefill : depth])
    for _ in range(arguments.rounds + 1):
        for name, subject in subjects.items():
            time_taken = seconds(clock, partial(one_by_one, subject, tokens[depth:]))
            decode[name].append(arguments.decode / time_taken)
            subject.cut(depth)
    for subject in subjects.values():
        subject.close()
    figures = [(f"prefill {arguments.prefill}", 0, prefill)] if arguments.prefill else []
    figures.append((f"decode {arguments.decode}", depth, decode))
    return [_row(path.stem, threads, at, label, "/".join(types), found) for label, at, found in figures]


def one_by_one(subject: Subject, tokens: Sequence[int]) -> None:
    """Decode."""
    for token in tokens:
        subject.append([token])


def _row(model: str, threads: int, depth: int, label: str, types: str, found: dict[str, list[float]]) -> Row:
    """Medians of all rounds but the first, of llama.cpp's ways the better one."""
    medians = {name: statistics.median(figures[1:]) for name, figures in found.items()}
    ours = medians.pop("ours")
    return Row(model, threads, depth, label, types, ours, max(medians.values()), max(medians, key=lambda n: medians[n]))


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--depth", type=int, default=0, help="tokens in the sequence before decoding")
    parser.add_argument("--kv-type-k", default="f16")
    parser.add_argument("--kv-type-v", default="f16")
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
                for row in rows[-2 if arguments.prefill else -1 :]:
                    sys.stdout.write(
                        f"{row.model:28} {row.threads} thr  {row.kv_types:10} {row.measure:12} at {row.depth:5}  "
                        f"ours {row.ours:8.1f}  llama.cpp {row.llama_cpp:8.1f} ({row.llama_cpp_attention})  "
                        f"ratio {row.ratio:5.2f}\n"
                    )
                    sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
