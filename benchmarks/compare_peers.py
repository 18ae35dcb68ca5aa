"""Prefill and decode of our engine, llama.cpp, OpenVINO GenAI and mistral.rs on one file, in turn; prints medians.

    compare_peers.py MODEL.gguf --python PROGRAM [--threads 2,1] [--prefill 512] [--decode 48] [--minutes 12]

Prints one table for all numbers of threads, with the machine and the versions. There are as many rounds as fit into the
minutes, loading included, and at least one that counts; fewer threads get more of the time.

--python names an interpreter with `openvino-genai` and `mistralrs` (wheels on PyPI); a peer that it lacks, or that
cannot read the file, is named in the table with its reason. All stay loaded, each in its own process but for ours and
llama.cpp, and wait while another one computes. Peers read a prompt of one repeated word and count its tokens
themselves. Figures are tokens per second.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare_llama_cpp import Ours, Subject
from benchmarks.engine_tools import SETTLED_S, table
from benchmarks.llama_peer import LlamaPeer
from cpu_kernels.cores import processor_name, usable_cores
from cpu_kernels.isa import ISA

PEERS = {"OpenVINO GenAI": "openvino", "mistral.rs": "mistral.rs"}
PAGE = 256
Speeds = tuple[float, float]
Measure = Callable[[int, int], Speeds]
PACKAGES = ("llama_cpp_python", "openvino-genai", "mistralrs")
# Prints the versions of the packages that its arguments name, a line each, empty for one that is missing.
VERSIONS = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        print(version(name))
    except PackageNotFoundError:
        print()
"""


def here(subject: Subject, prefill: int, decode: int) -> Speeds:
    """Speeds of an engine in this process, from an empty sequence."""
    subject.cut(0)
    began = time.perf_counter()
    subject.append([100 + at % 1_000 for at in range(prefill)])
    middle = time.perf_counter()
    for token in range(100, 100 + decode):
        subject.append([token])
    return prefill / (middle - began), decode / (time.perf_counter() - middle)


class PeerProcess:
    """A peer in a process of another interpreter. Raises RuntimeError with its last words if it ends."""

    def __init__(self, python: str, name: str, model: Path, threads: int) -> None:
        command = [python, str(Path(__file__).with_name("peer_process.py")), name, str(model.absolute()), str(threads)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._answer()

    def __call__(self, prefill: int, decode: int) -> Speeds:
        """Speeds of one answer to a prompt of about `prefill` tokens."""
        assert self._process.stdin
        self._process.stdin.write(f"{prefill} {decode}\n")
        self._process.stdin.flush()
        found = self._answer()
        return found["prompt"] / found["prompt_s"], found["tokens"] / found["tokens_s"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            lines = [text.strip() for text in self._process.communicate()[1].splitlines() if text.strip()]
            raise RuntimeError(lines[-1] if lines else "it ended without a word")
        found: dict[str, Any] = json.loads(line)
        return found


def rows(model: Path, python: str, threads: int, sizes: tuple[int, int], seconds: float) -> list[tuple[str, ...]]:
    """A row for each system with a number of threads. sizes: tokens of the prompt and of the answer."""
    ends = time.monotonic() + seconds
    context = -(-sum(sizes) // PAGE) * PAGE
    ours, llama = Ours(model, threads, context), LlamaPeer(model, threads, context, flash_attention=True)
    measures: dict[str, Measure] = {
        "localllm": lambda prefill, decode: here(ours, prefill, decode),
        "llama.cpp": lambda prefill, decode: here(llama, prefill, decode),
    }
    peers: list[PeerProcess] = []
    refused = []
    for name, argument in PEERS.items():
        try:
            peers.append(PeerProcess(python, argument, model, threads))
            measures[name] = peers[-1]
        except RuntimeError as error:
            refused.append((name, str(threads), f"does not run: {error}"[:100], "", ""))
    try:
        figures = measured(measures, sizes, ends)
    finally:
        ours.close()
        llama.close()
        for peer in peers:
            peer.close()
    return [*((name, str(threads), *figures[name]) for name in figures), *refused]


def measured(measures: dict[str, Measure], sizes: tuple[int, int], ends: float) -> dict[str, tuple[str, str, str]]:
    """Medians of prefill and decode of each system, which take turns, and the rounds; a first one does not count.

    ends: the time after which no round should last.
    """
    found: dict[str, list[Speeds]] = {name: [] for name in measures}
    rounds, took = -1, 0.0
    while rounds < 1 or time.monotonic() + took < ends:
        began = time.monotonic()
        for name, measure in measures.items():
            time.sleep(SETTLED_S)
            found[name].append(measure(*sizes))
        rounds, took = rounds + 1, time.monotonic() - began
    return {name: (_median(values[1:], 0), _median(values[1:], 1), str(rounds)) for name, values in found.items()}


def described(model: Path, python: str, sizes: tuple[int, int]) -> str:
    """The model, the machine and the versions, in a line."""
    found = []
    for program, names in ((sys.executable, PACKAGES[:1]), (python, PACKAGES[1:])):
        told = subprocess.run([program, "-c", VERSIONS, *names], capture_output=True, text=True, check=True).stdout
        found += [f"{name} {version}" for name, version in zip(names, told.split("\n"), strict=False) if version]
    machine = f"{processor_name()}, {usable_cores()} cores, {ISA.name}"
    return f"{model.name}, {sizes[0]} tokens and {sizes[1]}, tok/s, {machine}, {date.today()}; {', '.join(found)}"


def _median(values: Sequence[Speeds], at: int) -> str:
    return f"{median(value[at] for value in values):.1f}"


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--python", required=True, metavar="PROGRAM")
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=48)
    parser.add_argument("--minutes", type=float, default=12)
    arguments = parser.parse_args()
    sizes = arguments.prefill, arguments.decode
    counts = [int(count) for count in arguments.threads.split(",")]
    ends, shown = time.monotonic() + 60 * arguments.minutes, []
    for at, threads in enumerate(counts):
        share = (1 / threads) / sum(1 / count for count in counts[at:])
        shown += rows(arguments.model, arguments.python, threads, sizes, share * (ends - time.monotonic()))
    sys.stdout.write(f"{described(arguments.model, arguments.python, sizes)}\n\n")
    table(("system", "threads", "prefill", "decode", "rounds"), shown)


if __name__ == "__main__":
    main()
