"""Decodes while other processes spin, beside llama.cpp: speed should fall only with the share of cores that is left.

    competitor.py MODEL.gguf [--threads 2] [--competitors 0,1,2] [--decode 16] [--rounds 5]

For each number of spinning processes, decodes with --threads threads, on llama.cpp with as many, and with one,
alternating; medians. "fair share" is what equal shares of the cores would leave of the speed without competitors.
"""

import argparse
import multiprocessing
import time
from pathlib import Path

from benchmarks.compare_llama_cpp import Ours
from benchmarks.engine_tools import medians, table
from benchmarks.llama_peer import LlamaPeer
from cpu_kernels.cores import usable_processors


def spin() -> None:
    """Keep one core busy forever."""
    while True:
        pass


def speed(subject: Ours | LlamaPeer, tokens: int) -> float:
    """Tokens per second, starting from an empty sequence."""
    subject.cut(0)
    began = time.perf_counter()
    for token in range(100, 100 + tokens):
        subject.append([token])
    return tokens / (time.perf_counter() - began)


def fair(threads: int, competitors: int) -> float:
    """The share of the processors that `threads` threads get among competitors of one thread each."""
    return min(1.0, usable_processors() / (threads + competitors))


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--competitors", default="0,1,2")
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    subjects = {
        "many": Ours(arguments.model, arguments.threads, 4096),
        "peer": LlamaPeer(arguments.model, arguments.threads, 4096, flash_attention=True),
        "one": Ours(arguments.model, 1, 4096),
    }
    rows = []
    for competitors in map(int, arguments.competitors.split(",")):
        spinning = [multiprocessing.Process(target=spin, daemon=True) for _ in range(competitors)]
        for process in spinning:
            process.start()
        try:
            found = medians(
                arguments.rounds,
                {name: lambda one=one: speed(one, arguments.decode) for name, one in subjects.items()},
            )
        finally:
            for process in spinning:
                process.kill()
                process.join()
        rows.append((competitors, found["many"], fair(arguments.threads, competitors), found["peer"], found["one"]))
    many = f"tok/s, {arguments.threads} threads"
    table(("competitors", many, "fair share", f"llama.cpp, {arguments.threads} threads", "tok/s, 1 thread"), rows)


if __name__ == "__main__":
    main()
