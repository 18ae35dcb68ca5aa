"""Embeds texts on our engine and on llama.cpp, alternating; prints medians of tokens per second, and ratios.

    embeddings.py MODEL.gguf ... [--threads 2] [--rounds 5] [--processor-time]

Texts are random tokens: one short text, many short ones, some of 8 to 250 tokens, and a few of 512. llama.cpp gets 1, 8
or all of them at a time and computes up to 32 in a batch, as long as they fit into the model's longest text; its best
median counts. --processor-time measures processor time instead of wall time, for one thread on a machine that others
use too. "differs" is the largest difference between vectors of length 1.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.engine_tools import SETTLED_S, medians, table
from gguf_io import open_model
from gpu_offload.options import LlamaOptions
from gpu_offload.text_encoder import LlamaTextEncoder
from models.text_encoder import TextEncoder

_TOGETHER = (1, 8, 1024)
_LONGEST = 512
_TOKENS = 2048  # at the least in a measurement


def workloads(vocabulary: int) -> dict[str, list[list[int]]]:
    """Texts by the name of their workload."""
    random = np.random.default_rng(1)
    lengths = {
        "1 of 16": [16],
        "32 of 16": [16] * 32,
        "16 of 8 to 250": random.integers(8, 250, 16).tolist(),
        "4 of 512": [_LONGEST] * 4,
    }
    low = min(100, vocabulary // 2)
    return {
        name: [random.integers(low, vocabulary, count).tolist() for count in counts] for name, counts in lengths.items()
    }


def speed(
    encoder: TextEncoder | LlamaTextEncoder, texts: Sequence[list[int]], together: int, clock: Callable[[], float]
) -> float:
    """Tokens per second, with `together` texts at a time; few are computed repeatedly."""
    tokens = sum(map(len, texts))
    times = max(1, _TOKENS // tokens)
    time.sleep(SETTLED_S)
    began = clock()
    for _ in range(times):
        for first in range(0, len(texts), together):
            encoder.pooled(texts[first : first + together])
    return times * tokens / (clock() - began)


def unit(rows: NDArray[Any]) -> NDArray[Any]:
    """The rows scaled to length 1."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def compare(path: Path, threads: int, rounds: int, clock: Callable[[], float]) -> list[tuple[object, ...]]:
    """Measure one file; return rows of the table."""
    rows: list[tuple[object, ...]] = []
    with (
        open_model(path) as file,
        TextEncoder(file, threads=threads) as ours,
        LlamaTextEncoder(file, LlamaOptions(gpu_layers=0, threads=threads)) as peer,
    ):
        vocabulary = file.tensors["token_embd.weight"].shape[0]
        for name, texts in workloads(vocabulary).items():
            sizes = sorted({min(size, len(texts)) for size in _TOGETHER})
            subjects = {str(size): lambda size=size, texts=texts: speed(peer, texts, size, clock) for size in sizes}
            found = medians(rounds, {"ours": lambda texts=texts: speed(ours, texts, len(texts), clock), **subjects})
            best = max(found[str(size)] for size in sizes)
            difference = float(np.abs(unit(ours.pooled(texts)) - unit(peer.pooled(texts))).max())
            rows.append((path.stem, name, found["ours"], best, found["ours"] / best, difference))
    return rows


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.processor_time else time.perf_counter
    for path in arguments.models:
        rows = compare(path, arguments.threads, arguments.rounds, clock)
        table(("model", "texts", "tok/s", "llama.cpp", "ratio", "differs"), rows)


if __name__ == "__main__":
    main()
