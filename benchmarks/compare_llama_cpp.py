"""Prefill and decode speed of our engine and of llama.cpp on the same files, alternating; prints medians and ratios.

    compare_llama_cpp.py MODEL.gguf ... [--threads 1,2] [--prefill 512] [--decode 128] [--rounds 5] [--depth 0]
                         [--prefill-depth 0] [--kv-type-k f16] [--kv-type-v f16] [--processor-time] [--json]

Both run in this process with the same number of threads, one after the other within a round, so that a busy machine
slows both alike; --processor-time reads the processor time of one thread instead of the clock. llama.cpp is measured
with and without flash attention, and its better median counts. Every round decodes from --depth tokens on: the KV of
the prefill is repeated up to there, since prompts of that length would take llama.cpp minutes and the content of the KV
does not change the time; states of recurrent layers are computed. Prefill may also begin at a depth: a token's cost
grows linearly with its depth, so 512 tokens in the middle of a long prompt cost as much as its average tokens. Decode
speed is that of a turn's median token, and memory reading also counts by its median sample: whatever takes a core away
for some milliseconds affects few of them. Before each turn, all threads of the previous one have stopped spinning.

The machine's limits are measured before and after each of our turns, with the same number of threads, and reading also
between its tokens: our reads in decode are given as a share of memory reading, our products in prefill as a share of
multiplying (see `localllm bench`).
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

from benchmarks.engine_tools import SETTLED_S
from benchmarks.llama_peer import LlamaPeer
from gguf_io import open_model
from localllm.speed.work import TokenWork, looks
from localllm.wings.lab.roofline.limits import LimitProbes, Limits
from models.config import read_config
from models.kv_layout import bytes_of_tokens, stored_types
from models.native_runner import NativeRunner

# Memory reading is measured once per this many of our tokens; and seconds until our threads are parked again.
_TOKENS_A_READING, _PARKED = 6, 0.004
# Tokens computed before decode if no prefill is measured.
_FILLED = 512


class Subject(Protocol):
    """An engine that computes one sequence."""

    def append(self, tokens: Sequence[int]) -> None:
        """Compute tokens and append them to the sequence."""

    def cut(self, length: int) -> None:
        """Drop the sequence's tokens from `length` on."""

    def repeat(self, length: int) -> None:
        """Fill the sequence up to `length` tokens by repeating its keys and values."""

    def close(self) -> None:
        """Free everything."""


class Ours:
    """One sequence on the native runner."""

    def __init__(self, path: Path, threads: int, context: int, kv_types: tuple[str, str] = ("f16", "f16")) -> None:
        with open_model(path) as file:
            config = read_config(file)
            kv_bytes = bytes_of_tokens(config, stored_types(config, kv_types), context)
            self.runner = NativeRunner(file, kv_bytes=kv_bytes, threads=threads, kv_types=kv_types)
            self._looks = looks(file, kv_types)
        self._recurs = any(config.recurs)
        self._sequence = self.runner.create_sequence()

    def append(self, tokens: Sequence[int]) -> None:
        """Compute tokens and append them, 512 at a time, with logits of the last."""
        for first in range(0, len(tokens), 512):
            piece = tokens[first : first + 512]
            start = self.runner.sequence_length(self._sequence)
            positions = range(start, start + len(piece))
            self.runner.run(piece, positions, [self._sequence] * len(piece), [len(piece) - 1])
        self.runner.keep_window(self._sequence, self.runner.sequence_length(self._sequence))

    def cut(self, length: int) -> None:
        """Drop the sequence's tokens from `length` on."""
        self.runner.truncate_sequence(self._sequence, length)

    def repeat(self, length: int) -> None:
        """Fill the sequence up to `length` tokens by repeating its keys and values; recurrent layers compute them."""
        info, have = self.runner.info, self.runner.sequence_length(self._sequence)
        computed = length if self._recurs else min(length, info.window_tokens)
        self.append([100 + i % 1000 for i in range(have, computed)])
        have = max(have, computed)
        end = length // info.page_size * info.page_size if info.window_tokens else length
        window = self.runner.export_state(self._sequence, have) if info.window_tokens and end > have else b""
        for start in range(have, end, have):
            count = min(have, end - start)
            data = self.runner.export_kv(self._sequence, 0, count)
            self.runner.import_kv(self._sequence, start, start + count, data)
        if window:
            self.runner.import_state(self._sequence, window)
        self.append(range(100, 100 + length - max(have, end)))

    def work(self) -> TokenWork:
        """The work per token; call it after a token has been decoded."""
        return TokenWork(*self.runner.last_step().products(), self._looks)

    def close(self) -> None:
        """Free everything."""
        self.runner.close()


@dataclass(frozen=True)
class Row:
    """Medians in tokens per second. of_limit: our share of memory reading (decode) or of multiplying (prefill)."""

    model: str
    threads: int
    depth: int
    measure: str
    kv_types: str
    ours: float
    llama_cpp: float
    llama_cpp_attention: str
    of_limit: float

    @property
    def ratio(self) -> float:
        """How many times as fast we are."""
        return self.ours / self.llama_cpp


@dataclass(frozen=True)
class Turns:
    """Tokens per second of each subject's turns, and the machine's limits meanwhile. label: names the work.

    decoded: tokens decoded one by one, 0 for prefill.
    """

    label: str
    depth: int
    decoded: int
    found: dict[str, list[float]]
    limits: Limits


class Comparison:
    """One file at one thread count."""

    def __init__(self, path: Path, threads: int, arguments: argparse.Namespace) -> None:
        """Load the model on our engine, and on llama.cpp with and without flash attention, which q8_0 values need."""
        self._depth = max(arguments.prefill_depth + arguments.prefill, arguments.depth)
        self._arguments = arguments
        self._types = arguments.kv_type_k, arguments.kv_type_v
        self._clock = time.thread_time if arguments.processor_time else time.perf_counter
        self._tokens = np.random.default_rng(1).integers(100, 20_000, self._depth + arguments.decode).tolist()
        self._name, self._threads = path.stem, threads
        context = self._depth + arguments.decode + 64
        self._ours = Ours(path, threads, context, self._types)
        self._subjects: dict[str, Subject] = {"ours": self._ours}
        for name in ("flash", "plain") if self._types[1] == "f16" else ("flash",):
            self._subjects[name] = LlamaPeer(
                path, threads, context, flash_attention=name == "flash", kv_types=self._types
            )
        self._probes = LimitProbes(threads, self._clock)

    def run(self) -> list[Row]:
        """Measure everything, and free it."""
        arguments, depth = self._arguments, self._depth
        turns = []
        if arguments.prefill:
            turns.append(self._prefill(arguments.prefill, arguments.rounds + 1))
        else:
            self._start(depth)
        self._fill(depth)
        turns.append(self._decode(depth, arguments.decode, arguments.rounds + 1))
        rows = [self._row(one) for one in turns]
        for subject in self._subjects.values():
            subject.close()
        self._probes.close()
        return rows

    def _prefill(self, count: int, rounds: int) -> Turns:
        """Prompts of `count` tokens, or parts of longer ones; the last one stays in the sequences."""
        found: dict[str, list[float]] = {name: [] for name in self._subjects}
        behind = self._arguments.prefill_depth
        if behind:
            self._start(behind)
            self._fill(behind)
        for _ in range(rounds):
            for name, subject in self._subjects.items():
                subject.cut(behind)
                taken = self._turn(name, partial(subject.append, self._tokens[behind : behind + count]))
                found[name].append(count / taken)
        return Turns(f"prefill {count}", behind, 0, found, self._limits())

    def _start(self, depth: int) -> None:
        """Compute the first of `depth` tokens, at most _FILLED, in every sequence."""
        for subject in self._subjects.values():
            subject.append(self._tokens[: min(depth, _FILLED)])

    def _fill(self, depth: int) -> None:
        """Fill every sequence up to `depth` tokens, with copies of those that were computed."""
        for subject in self._subjects.values():
            if depth:
                subject.repeat(depth)

    def _decode(self, depth: int, count: int, rounds: int) -> Turns:
        """Decode `count` tokens one by one after `depth` others; a turn's speed is that of its median token."""
        found: dict[str, list[float]] = {name: [] for name in self._subjects}
        for _ in range(rounds):
            for name, subject in self._subjects.items():
                times: list[float] = []
                pause = self._read if name == "ours" else None
                self._turn(name, partial(one_by_one, subject, self._tokens[depth:], self._clock, times, pause))
                found[name].append(1 / statistics.median(times))
                subject.cut(depth)
        return Turns(f"decode {count}", depth, count, found, self._limits())

    def _turn(self, name: str, work: Callable[[], None]) -> float:
        """How long `work` takes once no threads spin; the machine's limits are measured before and after our turns."""
        time.sleep(SETTLED_S)
        if name == "ours":
            self._probes.sample()
        start = self._clock()
        work()
        taken = self._clock() - start
        if name == "ours":
            self._probes.sample()
        return taken

    def _read(self) -> None:
        time.sleep(_PARKED)
        self._probes.sample("read")
        time.sleep(_PARKED)

    def _limits(self) -> Limits:
        """The limits measured since the last call, since memory bandwidth changes from minute to minute."""
        limits = self._probes.limits()
        self._probes.forget()
        return limits

    def _row(self, turns: Turns) -> Row:
        """Medians of all rounds except the first, if there are more; llama.cpp's better variant."""
        medians = {name: statistics.median(figures[1:] or figures) for name, figures in turns.found.items()}
        ours = medians.pop("ours")
        flag = max(medians, key=lambda name: medians[name])
        share = self._share(turns, ours)
        types = "/".join(self._types)
        return Row(self._name, self._threads, turns.depth, turns.label, types, ours, medians[flag], flag, share)

    def _share(self, turns: Turns, rate: float) -> float:
        work, limits = self._ours.work(), turns.limits
        if turns.decoded:
            return work.decode(turns.depth, turns.decoded).read * rate / limits.read.median
        cost = work.prefill(int(turns.label.split()[1]), self._ours.runner.info.max_rows)
        return (cost.int8 / limits.int8.median + cost.floats / limits.floats.median) * rate


def one_by_one(
    subject: Subject,
    tokens: Sequence[int],
    clock: Callable[[], float],
    times: list[float],
    pause: Callable[[], None] | None,
) -> None:
    """Decode, and append each token's time to `times`; call `pause` once per _TOKENS_A_READING tokens."""
    for at, token in enumerate(tokens):
        if pause and at % _TOKENS_A_READING == 0:
            pause()
        start = clock()
        subject.append([token])
        times.append(clock() - start)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--prefill-depth", type=int, default=0, help="tokens in the sequence before the prefill")
    parser.add_argument("--depth", type=int, default=0, help="least tokens in the sequence before decoding")
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
            found = Comparison(path, threads, arguments).run()
            rows += found
            if not arguments.json:
                for row in found:
                    limit = "multiplying" if row.measure.startswith("prefill") else "reading"
                    sys.stdout.write(
                        f"{row.model:28} {row.threads} thr  {row.kv_types:10} {row.measure:12} at {row.depth:5}  "
                        f"ours {row.ours:8.1f}  llama.cpp {row.llama_cpp:8.1f} ({row.llama_cpp_attention})  "
                        f"ratio {row.ratio:5.2f}  of {limit} {row.of_limit:4.0%}\n"
                    )
                    sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
