"""Our engine's overhead above llama.cpp: the same file, prompts and greedy tokens with and without us.

    overhead.py MODEL.gguf [--prompt 256] [--answer 48] [--rounds 5] [--threads 1] [--kept 0] [--gpu-layers 0]
    overhead.py MODEL.gguf ... --http [--llama-server PROGRAM] [--starts 1] [--control]

In this process: llama.cpp's C interface and an argmax, llama-cpp-python's Llama, and our engine on our runner. With
--http: llama-cpp-python's server (or llama.cpp's own llama-server, if --llama-server names the program) and
`localllm serve --backend llama`, with the same client. They take turns within a round, a second apart, and every round
has a new prompt, so that no cache helps; speculative decoding is off. CPU seconds are of the whole process that
computes, and are more reliable than wall time on a busy machine. Two instances of one program differ by some percent
for as long as they run: --starts starts the servers several times, in changing order, with --rounds each, and --control
runs the peer's server twice. --kept measures llama.cpp and our engine again with that many tokens of another prompt
cached, and llama.cpp with as many tokens of another sequence in its cells.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from benchmarks.engine_tools import GREEDY, SETTLED_S, table
from benchmarks.llama_peer import LlamaPeer
from benchmarks.servers import Server, llama_cpp, llama_server, localllm
from gguf_io import load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from gpu_offload.loading import model_params
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.answer.request import AnswerRequest
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest
from localllm.engine.speculation import DraftLength
from localllm.remote.connection import Endpoint
from localllm.remote.openai import OpenAIServer


@dataclass(frozen=True)
class Measure:
    """Seconds to the first token and per token after it: wall time, and CPU time."""

    ttft: float
    per_token: float
    prompt_cpu: float
    token_cpu: float


# Called with a prompt's token ids and the number of tokens to generate; yields at each token.
Subject = Callable[[list[int], int], Iterator[object]]


def plain(path: Path, context: int, threads: int, gpu_layers: int, kept: int = 0) -> Subject:
    """llama.cpp's own functions only. kept: tokens of another sequence that stay in its cells."""
    peer = LlamaPeer(path, threads, context, flash_attention=True, gpu_layers=gpu_layers)
    if kept:
        peer.keep(kept)

    def run(prompt: list[int], count: int) -> Iterator[int]:
        peer.cut(0)
        rows = prompt
        for _ in range(count):
            peer.append(rows)
            rows = [int(peer.logits().argmax())]
            yield rows[0]

    return run


def binding(path: Path, context: int, threads: int, gpu_layers: int) -> Subject:
    """llama-cpp-python's usual interface, with our model parameters: Llama itself cannot turn AMX kernels off."""
    from llama_cpp import Llama, llama_cpp

    options = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": gpu_layers, "flash_attn": True}
    with patch.object(llama_cpp, "llama_model_default_params", return_value=model_params(LlamaOptions())):
        model: Any = Llama(str(path), n_ctx=context, verbose=False, **options)

    def run(prompt: list[int], count: int) -> Iterator[int]:
        return islice(model.generate(prompt, temp=0.0, repeat_penalty=1.0), count)

    return run


def ours(path: Path, context: int, threads: int, gpu_layers: int) -> Subject:
    """Our engine on our runner."""
    with open_model(path) as file:
        tokenizer = load_tokenizer(file)
        options = LlamaOptions(context_tokens=context, threads=threads, gpu_layers=gpu_layers)
        runner = LlamaCppRunner(file, replace(options, split_mode="none"))
    engine = Engine(runner, tokenizer)
    engine.start()

    def run(prompt: list[int], count: int) -> Iterator[object]:
        request = GenerationRequest(tuple(prompt), GREEDY, max_tokens=count, ignore_eos=True)
        return (event for event in engine.submit(request) if event.token_ids)

    return run


def over_http(server: Server, tokenizer: Tokenizer) -> Subject:
    """A server; the prompt is sent as a text of numbers, cut to the same number of tokens."""
    remote = OpenAIServer(Endpoint.parse(server.url))

    def run(prompt: list[int], count: int) -> Iterator[object]:
        numbers = " ".join(f"{token % 1000}" for token in prompt)
        text = tokenizer.decode(tokenizer.encode(numbers)[: len(prompt)])
        sampling = {"temperature": 0.0, "repeat_penalty": 1.0}
        request = AnswerRequest(prompt=text, sampling=sampling, max_tokens=count, ignore_eos=True)
        for event in remote.model(server.model).prepare(request).submit():
            if event.error:
                raise RuntimeError(event.error)
            if event.parts:
                yield event

    return run


def cpu_of(process: psutil.Process) -> float:
    """CPU seconds that the process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def draw(random: np.random.Generator, count: int) -> list[int]:
    """Token ids of a new random prompt."""
    ids: list[int] = random.integers(1000, 9000, count).tolist()
    return ids


def measure(
    subjects: dict[str, tuple[Subject, psutil.Process]], arguments: argparse.Namespace, random: np.random.Generator
) -> dict[str, list[Measure]]:
    """Measure the subjects in turn, with a new prompt and a new order each round; the first round does not count."""
    order = deque(subjects.items())
    rounds: list[dict[str, Measure]] = []
    while len(rounds) <= arguments.rounds:
        prompt = draw(random, arguments.prompt)
        order.rotate()
        told = {name: time_one(subject, process, prompt, arguments.answer) for name, (subject, process) in order}
        measures = {name: measure for name, measure in told.items() if measure}
        if len(measures) == len(told):
            rounds.append(measures)
    return {name: [measures[name] for measures in rounds[1:]] for name in subjects}


def time_one(subject: Subject, process: psutil.Process, prompt: list[int], answer: int) -> Measure | None:
    """Measure one prompt and its answer; None if it ended with its first token, as random prompts sometimes do."""
    time.sleep(SETTLED_S)
    times = [(time.perf_counter(), cpu_of(process))]
    for _ in subject(prompt, answer):
        times.append((time.perf_counter(), cpu_of(process)))
    tokens = len(times) - 2
    if tokens < 1:
        return None
    began, first, last = times[0], times[1], times[-1]
    return Measure(
        ttft=first[0] - began[0],
        per_token=(last[0] - first[0]) / tokens,
        prompt_cpu=first[1] - began[1],
        token_cpu=(last[1] - first[1]) / tokens,
    )


def show(found: dict[str, list[Measure]]) -> None:
    """Print medians, and each subject's excess over the first, from the ratios within a round."""
    base = [astuple(figure) for figure in next(iter(found.values()))]
    rows = []
    for name, figures in found.items():
        values = [astuple(figure) for figure in figures]
        ratios = [[a / b - 1 for a, b in zip(own, first, strict=True)] for own, first in zip(values, base, strict=True)]
        cells: list[object] = [name]
        for column, ratio in zip(zip(*values, strict=True), zip(*ratios, strict=True), strict=True):
            cells.append(f"{statistics.median(column):.4g} ({100 * statistics.median(ratio):+.1f} %)")
        rows.append(cells)
    table(("seconds", "TTFT", "a token", "CPU of the prompt", "CPU of a token"), rows)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kept", type=int, default=0)
    parser.add_argument("--gpu-layers", type=int, default=0, help="on the first GPU; not with --http")
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--control", action="store_true")
    arguments = parser.parse_args()
    if arguments.http and arguments.kept:
        parser.error("--kept is for our engine in this process; leave --http out")
    if not arguments.http and (arguments.starts > 1 or arguments.control):
        parser.error("--starts and --control are for servers; add --http")
    random = np.random.default_rng(1)
    context = 2 * (arguments.prompt + arguments.answer) + 256
    sys.stdout.write(f"{arguments.model.name}, {arguments.threads} threads, load {os.getloadavg()[0]:.1f}\n\n")
    # Our engine caches every prompt; copies in main memory may hold half as many tokens as there are cells.
    context = 2 * ((arguments.rounds + 1) * context + arguments.kept)
    if arguments.http:
        show(measure_servers(arguments, context, random))
        return
    DraftLength.choose = lambda *_: 0  # type: ignore[method-assign]
    here = psutil.Process()
    made = {"llama.cpp": plain, "llama-cpp-python": binding, "our engine": ours}
    subjects = {
        name: (make(arguments.model, context, arguments.threads, arguments.gpu_layers), here)
        for name, make in made.items()
    }
    show(measure(subjects, arguments, random))
    if arguments.kept:
        del subjects["llama-cpp-python"]
        ask, _ = subjects["our engine"]
        deque(ask(draw(random, arguments.kept), 1), maxlen=0)
        beside = plain(arguments.model, context, arguments.threads, arguments.gpu_layers, arguments.kept)
        subjects["llama.cpp, as many in its cells"] = beside, here
        sys.stdout.write(f"\nOur engine keeps {arguments.kept} tokens of another prompt\n\n")
        show(measure(subjects, arguments, random))


def measure_servers(
    arguments: argparse.Namespace, context: int, random: np.random.Generator
) -> dict[str, list[Measure]]:
    """The servers' figures over all starts; prints each start's TTFT relative to the first server's."""
    model, threads, program = arguments.model, arguments.threads, arguments.llama_server
    with open_model(model) as file:
        tokenizer = load_tokenizer(file)

    def peer() -> contextlib.AbstractContextManager[Server]:
        own_program = llama_server(program, model, threads, context) if program else None
        return own_program or llama_cpp(sys.executable, model, threads, context)

    def our_server() -> contextlib.AbstractContextManager[Server]:
        return localllm(model, threads, flags=("--backend", "llama", "--ctx", str(context)), speculates=False)

    makers = {"llama-server" if program else "llama-cpp-python": peer, "localllm, no speculation": our_server}
    makers |= {"the first again": peer} if arguments.control else {}
    found: dict[str, list[Measure]] = {name: [] for name in makers}
    order = deque(makers.items())
    for start in range(arguments.starts):
        with contextlib.ExitStack() as stack:
            started = {name: stack.enter_context(make()) for name, make in order}
            subjects = {
                name: (over_http(started[name], tokenizer), psutil.Process(started[name].process.pid))
                for name in makers
            }
            now = measure(subjects, arguments, random)
        for name, figures in now.items():
            found[name] += figures
        base, *others = now
        told = (f"{name} {100 * _median_ratio(now[name], now[base]):+.1f} %" for name in others)
        sys.stdout.write(f"start {start + 1}, TTFT: {', '.join(told)}\n")
        order.rotate()
    sys.stdout.write("\n")
    return found


def _median_ratio(figures: list[Measure], base: list[Measure]) -> float:
    return statistics.median(one.ttft / other.ttft - 1 for one, other in zip(figures, base, strict=True))


if __name__ == "__main__":
    main()
