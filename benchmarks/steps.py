"""What the engine and the server add to a device's own time, for 1 to 16 sequences.

    steps.py MODEL.gguf [--shape 7b] [--sequences 1,4,8,16] [--tokens 200] [--rounds 3] [--greedy] [--no-server]
    steps.py MODEL.gguf --profile 16

The device is a runner that sleeps for a step's time and returns logits of 32,000 words, or as many as the tokenizer
has if these are more: a GPU that takes no processor time. --shape: of the models whose steps were timed on an H100.
Of MODEL only the tokenizer is used. "outside" is the time for which the device waits between two steps, "of it
working" the engine's thread's processor time in it, which other programs hardly change, "processor" the process's
time per step, with the readers'. With the server, as many clients stream from `localllm serve` on the same runner;
their rate is compared with the engine's.
"""

import argparse
import asyncio
import cProfile
import ctypes
import json
import os
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks import servers
from benchmarks.engine_tools import GREEDY, table
from gguf_io import load_tokenizer, open_model
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.runner import Begin
from localllm.engine.speculation import DraftLength
from localllm.wings.lab.simulate.costs import Curve, StepTimes
from localllm.wings.lab.simulate.runner import SimulatedRunner, VirtualClock

SHAPE = "STEPS_BENCHMARK_SHAPE"  # tells the server's process
# Milliseconds of llama.cpp's functions by rows (docs/benchmarks.md). For 1b, 4 and 16 rows were not timed there.
SHAPES = {"7b": {1: 3.45, 4: 5.55, 8: 8.28, 16: 8.70}, "1b": {1: 1.20, 4: 1.70, 8: 2.42, 16: 2.60}}
WORDS = 32_000
_PR_SET_TIMERSLACK = 29
PROMPT_ROW_S = 2e-6
POOL = 64  # distinct rows of logits, more than a processor's cache holds
PROMPT = 200  # tokens


@dataclass
class Times:
    """When steps began and ended, how much processor time was used until then, and each step's rows.

    A step ends when the device is ready, or when the caller, having waited for it, goes on. own_began, own_ended: the
    calling thread's processor time.
    """

    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    own_began: list[float] = field(default_factory=list)
    own_ended: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class SleepingRunner(SimulatedRunner):
    """A device that takes a shape's time for a step, and none of the processor's."""

    def __init__(self, shape: str, words: int, usable: int, ends: Sequence[int]) -> None:
        """words: logits of a row. Tokens from `usable` on, and ends, are never chosen. shape: "" takes no time."""
        no_time = Curve(((1, 0.0),))
        super().__init__(StepTimes(no_time, no_time), VirtualClock(), pages=16_384, context=32_768)
        self.info = replace(self.info, backend="sleeping", vocab_size=words, computes_aside=True)
        self._step_ms = SHAPES.get(shape, {1: 0.0})
        self.times = Times()
        random = np.random.default_rng(1)
        # A few likely tokens above many unlikely ones, as models have them.
        self._pool = random.normal(0, 2.5, (POOL, words)).astype(np.float32)
        for row in self._pool:
            row[random.integers(100, usable, 12)] += random.uniform(8, 14, 12).astype(np.float32)
        self._pool[:, usable:] = self._pool[:, list(ends)] = -30
        self._at = 0

    def prepare(self, positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]) -> Begin:
        """Begin with the tokens: store the rows; the result sleeps until the step is over."""
        rows = [(sequence, len(list(group))) for sequence, group in groupby(sequences)]
        return lambda _tokens: self._begin(rows, len(positions), len(wanted))

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        """Store the rows, sleep, return logits."""
        return self.prepare(positions, sequences, wanted)(tokens)()

    def _begin(self, stored: Sequence[tuple[int, int]], rows: int, wanted: int) -> Callable[[], NDArray[np.float32]]:
        began = time.perf_counter()
        self.times.began.append(began)
        self.times.own_began.append(time.thread_time())
        for sequence, count in stored:
            self._append(sequence, count)
        self._at = (self._at + 7) % (POOL - wanted + 1)
        step_ms = np.interp(rows, list(self._step_ms), list(self._step_ms.values()))
        due = began + float(step_ms) / 1000 + PROMPT_ROW_S * max(rows - max(self._step_ms), 0)
        return partial(self._wait, due, rows, self._pool[self._at : self._at + wanted])

    def _wait(self, due: float, rows: int, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        waited = due - time.perf_counter()
        time.sleep(max(waited, 0))
        self.times.rows.append(rows)
        self.times.used.append(time.process_time())
        self.times.own_ended.append(time.thread_time())
        self.times.ended.append(time.perf_counter() if waited > 0 else due)
        return logits


def opened(path: Path, shape: str) -> tuple[SleepingRunner, Any]:
    """A runner and the tokenizer of a model file."""
    if sys.platform == "linux":  # where a thread, and those that it starts, sleep 50 us longer than asked for
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    with open_model(path) as file:
        tokenizer = load_tokenizer(file)
    words, usable = max(WORDS, tokenizer.vocab_size), tokenizer.vocab_size - 256  # the last ids may be control tokens
    return SleepingRunner(shape, words, usable, [end for end in tokenizer.eog_ids if end < usable]), tokenizer


def run_engine(engine: Engine, sequences: int, tokens: int, greedy: bool) -> None:
    """Let that many readers read an answer each, each on a thread of its own as the front ends do."""
    random = np.random.default_rng(sequences)
    sampling = GREEDY if greedy else SamplingParams(seed=1)
    prompts = [tuple(random.integers(1000, 9000, PROMPT).tolist()) for _ in range(sequences)]
    streams = [engine.submit(GenerationRequest(one, sampling, tokens)) for one in prompts]
    readers = [threading.Thread(target=stream.collect) for stream in streams]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def decode_steps(times: Times, sequences: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Of each decoding step of all sequences, in seconds.

    For how long the device waited; the engine's thread's processor time meanwhile; the process's in all; wall time.
    """
    outside, own, used, whole = [], [], [], []
    for at in range(8, len(times.ended) - 1):
        if times.rows[at] == times.rows[at + 1] == sequences:
            outside.append(times.began[at + 1] - times.ended[at])
            own.append(times.own_began[at + 1] - times.own_ended[at])
            used.append(times.used[at + 1] - times.used[at])
            whole.append(times.ended[at + 1] - times.ended[at])
    return outside, own, used, whole


@dataclass(frozen=True)
class Streamed:
    """Seconds until each client's first text and of the whole round, and processor seconds of the server."""

    ttft: list[float]
    took: float
    used: float


async def _client(url: str, model: str, prompt: str, tokens: int) -> tuple[float, float]:
    """Times of the first text and of the end. Reads bytes only, so that the clients take little of the machine."""
    where = urlsplit(url)
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    began = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    first, seen = 0.0, b""
    while piece := await reader.read(65_536):
        if not first:
            seen += piece
            if not seen.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(seen.decode(errors="replace"))
            first = time.perf_counter() - began if b'"content":"' in seen.replace(b'"content":""', b"") else 0.0
        tail = piece
    if b"[DONE]" not in tail and b"0\r\n" not in tail:
        raise RuntimeError("the answer is incomplete")
    writer.close()
    return first, time.perf_counter() - began


def stream(server: servers.Server, clients: int, tokens: int, number: int) -> Streamed:
    """Let that many clients stream an answer each. number: makes the prompts differ."""
    process = psutil.Process(server.process.pid)

    async def all_of_them() -> list[tuple[float, float]]:
        prompts = [f"{number} {client} " + "Tell me about the sea and the ships. " * 20 for client in range(clients)]
        return await asyncio.gather(*(_client(server.url, server.model, one, tokens) for one in prompts))

    before = sum(process.cpu_times()[:2])
    began = time.perf_counter()
    done = asyncio.run(all_of_them())
    took = time.perf_counter() - began
    return Streamed([first for first, _ in done], took, sum(process.cpu_times()[:2]) - before)


def serve(arguments: Sequence[str]) -> None:
    """Be `localllm serve` with the sleeping runner."""
    from localllm.cli.main import main as command_line
    from localllm.placement import loaded_model

    def open_sleeping(file: Any, placed: Any, *_: object) -> tuple[SleepingRunner, Any]:
        return opened(file.path, os.environ[SHAPE])[0], placed

    loaded_model.open_placed = open_sleeping
    DraftLength.choose = lambda *_: 0  # type: ignore[method-assign]
    sys.argv = ["localllm", *arguments]
    command_line()


def main() -> None:
    """Parse the command line, measure, print."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--sequences", default="1,4,8,16")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--no-server", action="store_true")
    parser.add_argument("--profile", type=int, metavar="SEQUENCES", help="profile the engine's thread instead")
    arguments = parser.parse_args()
    DraftLength.choose = lambda *_: 0  # type: ignore[method-assign]
    if arguments.profile:
        profile(arguments)
        return
    counts = [int(one) for one in arguments.sequences.split(",")]
    rates = {}
    rows: list[list[object]] = []
    for sequences in counts:
        runner, tokenizer = opened(arguments.model, arguments.shape)
        engine = Engine(runner, tokenizer, max_running=max(counts))
        engine.start()
        for _ in range(arguments.rounds):
            run_engine(engine, sequences, arguments.tokens, arguments.greedy)
        engine.close()
        outside, own, used, whole = decode_steps(runner.times, sequences)
        rates[sequences] = sequences / statistics.fmean(whole)
        most, middle = 1e3 * statistics.fmean(outside), 1e3 * statistics.median(outside)
        device = SHAPES[arguments.shape][sequences]
        above = f"{100 * most / device:.1f} %", f"{100 * middle / device:.1f} %"
        processor = 1e3 * statistics.fmean(used)
        working = 1e3 * statistics.median(own)
        rows.append([sequences, most, middle, working, processor, device, rates[sequences], *above])
    heads = [
        "sequences",
        "outside ms",
        "median",
        "of it working",
        "processor ms",
        "device ms",
        "tok/s",
        "above it",
        "median",
    ]
    table(heads, rows)
    if arguments.no_server:
        return
    rows = []
    os.environ[SHAPE] = arguments.shape
    for clients in counts:
        with servers.sleeping(arguments.model, clients) as server:
            stream(server, clients, 8, 0)
            done = [stream(server, clients, arguments.tokens, 1 + at) for at in range(arguments.rounds)]
        tokens = clients * arguments.tokens
        rate = statistics.median(tokens / one.took for one in done)
        firsts = statistics.median(1e3 * min(one.ttft) for one in done)
        lasts = statistics.median(1e3 * max(one.ttft) for one in done)
        used = statistics.median(1e3 * one.used / tokens for one in done)
        rows.append([clients, rate, f"{100 * rate / rates[clients]:.0f} %", firsts, lasts, used])
    table(["clients", "tok/s", "of the engine's rate", "first TTFT ms", "last TTFT ms", "processor ms a token"], rows)


def profile(arguments: argparse.Namespace) -> None:
    """Profile the engine's steps on this thread."""
    runner, tokenizer = opened(arguments.model, "")
    engine = Engine(runner, tokenizer, max_running=arguments.profile)
    random = np.random.default_rng(1)
    sampling = GREEDY if arguments.greedy else SamplingParams(seed=1)
    for _ in range(arguments.profile):
        prompt = tuple(random.integers(1000, 9000, PROMPT).tolist())
        engine.submit(GenerationRequest(prompt, sampling, arguments.tokens)).set_listener(lambda: None)
    profiler = cProfile.Profile()
    for _ in range(20):
        engine.step()
    profiler.enable()
    for _ in range(150):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    engine.close()


if __name__ == "__main__":
    main()
