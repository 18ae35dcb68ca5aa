"""Decodes and prefills beside busy loops and llama.cpp: speed should fall by the share of the cores that they take.

    competitor.py MODEL.gguf [--threads 2] [--competitors 0,1] [--pin] [--decode 32] [--prefill 256] [--rounds 5]

For each number of busy loops, both are computed with --threads threads, on llama.cpp with as many, and with one thread,
in turn; medians. Each speed is followed by its share of the speed without busy loops, which come first. "fair share" is
the share that is left if the system divides the cores equally. --pin keeps each busy loop on a core of its own (Linux).
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.compare_llama_cpp import Ours
from benchmarks.engine_tools import SETTLED_S, medians, table
from benchmarks.llama_peer import LlamaPeer
from cpu_kernels.cores import usable_processors


def spin(processor: int | None) -> None:
    """Keep one core busy forever. processor: the only one to use."""
    if processor is not None:
        os.sched_setaffinity(0, {processor})
    while True:
        pass


def speed(subject: Ours | LlamaPeer, tokens: int, at_once: int) -> float:
    """Tokens per second, starting from an empty sequence, when no threads of another turn spin any more."""
    subject.cut(0)
    time.sleep(SETTLED_S)
    began = time.perf_counter()
    for first in range(100, 100 + tokens, at_once):
        subject.append(range(first, min(first + at_once, 100 + tokens)))
    return tokens / (time.perf_counter() - began)


def fair(threads: int, competitors: int, pinned: bool) -> float:
    """The share of the speed alone that is left to `threads` threads beside busy loops of one thread each."""
    processors = usable_processors()
    if not pinned:
        return min(1.0, processors / (threads + competitors))
    free = min(threads, max(0, processors - competitors))
    return (free + (threads - free) / 2) / threads


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--competitors", default="0,1")
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    subjects: dict[str, Ours | LlamaPeer] = {
        "ours": Ours(arguments.model, arguments.threads, 4096),
        "peer": LlamaPeer(arguments.model, arguments.threads, 4096, flash_attention=True),
        "one": Ours(arguments.model, 1, 4096),
    }
    turns: dict[str, Callable[[], float]] = {
        f"{work} {name}": partial(speed, subject, tokens, at_once)
        for work, tokens, at_once in (("decode", arguments.decode, 1), ("prefill", arguments.prefill, 512))
        for name, subject in subjects.items()
    }
    cores = sorted(os.sched_getaffinity(0)) if arguments.pin else []
    alone: dict[str, float] = {}
    rows = []
    for competitors in map(int, arguments.competitors.split(",")):
        on = [cores[-1 - i % len(cores)] if cores else None for i in range(competitors)]
        spinning = [multiprocessing.Process(target=spin, args=(each,), daemon=True) for each in on]
        for process in spinning:
            process.start()
        try:
            found = medians(arguments.rounds, turns)
        finally:
            for process in spinning:
                process.kill()
                process.join()
        alone = alone or found
        for work in ("decode", "prefill"):
            figures = [(found[one], alone[one]) for one in turns if one.startswith(work)]
            cells = [f"{figure:.4g} ({figure / before:.0%})" for figure, before in figures]
            share = fair(arguments.threads, competitors, arguments.pin)
            rows.append((work, competitors, f"{share:.0%}", *cells))
    many = f"{arguments.threads} threads"
    table(("tok/s", "busy loops", "fair share", many, f"llama.cpp, {many}", "1 thread"), rows)


if __name__ == "__main__":
    main()
