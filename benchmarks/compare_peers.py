"""Prefill and decode of our engine, llama.cpp, OpenVINO GenAI and mistral.rs on one file, in turn; prints medians.

    compare_peers.py MODEL.gguf --python PROGRAM [--threads 2,1] [--prefill 512] [--decode 48] [--rounds 3]

--python names an interpreter with `openvino-genai` and `mistralrs` (wheels on PyPI); a peer that it lacks, or that
cannot read the file, is named in the table with its reason. All stay loaded, each in its own process but for ours and
llama.cpp, and wait while another one computes. Peers read a prompt of one repeated word and count its tokens
themselves. Figures are tokens per second.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare_llama_cpp import Ours, Subject
from benchmarks.engine_tools import SETTLED_S, table
from benchmarks.llama_peer import LlamaPeer

PEERS = {"OpenVINO GenAI": "openvino", "mistral.rs": "mistral.rs"}
PAGE = 256
Speeds = tuple[float, float]
Measure = Callable[[int, int], Speeds]


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


def rows(model: Path, python: str, threads: int, sizes: tuple[int, int], rounds: int) -> list[tuple[str, ...]]:
    """A row for each system with a number of threads. sizes: tokens of the prompt and of the answer."""
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
            refused.append((name, str(threads), f"does not run: {error}"[:100], ""))
    try:
        figures = measured(measures, sizes, rounds)
    finally:
        ours.close()
        llama.close()
        for peer in peers:
            peer.close()
    return [*((name, str(threads), *figures[name]) for name in figures), *refused]


def measured(measures: dict[str, Measure], sizes: tuple[int, int], rounds: int) -> dict[str, tuple[str, str]]:
    """Medians of prefill and decode of each system, which take turns; a first round does not count."""
    found: dict[str, list[Speeds]] = {name: [] for name in measures}
    for at in range(rounds + 1):
        for name, measure in measures.items():
            time.sleep(SETTLED_S)
            speeds = measure(*sizes)
            if at:
                found[name].append(speeds)
    return {name: (_median(values, 0), _median(values, 1)) for name, values in found.items()}


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
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sizes = arguments.prefill, arguments.decode
    shown = []
    for threads in map(int, arguments.threads.split(",")):
        shown += rows(arguments.model, arguments.python, threads, sizes, arguments.rounds)
    table(("system", "threads", "prefill", "decode"), shown)


if __name__ == "__main__":
    main()
