"""Processor time of choosing a token: each sampling option alone, over vocabularies of several sizes.

    python -m benchmarks.sampling [--size 262144] [--rounds 40] [--model MODEL.gguf]

Logits are random: flat ones (normal, deviation 1), where most tokens stay candidates, and peaked ones (deviation 4); or
those that a model computes within this text. Figures are the least and the median of the thread's processor time in
milliseconds; what other programs do on the machine changes the median more.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.engine_tools import KV_BYTES
from gguf_io import load_tokenizer, open_model
from localllm.engine.request import SamplingParams
from localllm.engine.sampling import Sampler
from models.native_runner import NativeRunner

NONE: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "greedy": {"temperature": 0.0},
    "temperature 1": NONE,
    "temperature 0.7": NONE | {"temperature": 0.7},
    "dynamic temperature": NONE | {"dynatemp_range": 0.3},
    "top-p 0.95": NONE | {"top_p": 0.95},
    "top-p 0.95, temperature 0.7": NONE | {"top_p": 0.95, "temperature": 0.7},
    "top-p 0.5": NONE | {"top_p": 0.5},
    "top-k 1000": NONE | {"top_k": 1000},
    "min-p 0.05": NONE | {"min_p": 0.05},
    "typical 0.9": NONE | {"typical_p": 0.9},
    "top-n-sigma 1": NONE | {"top_n_sigma": 1.0},
    "XTC": NONE | {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "Mirostat": NONE | {"mirostat": 2},
    "repeat penalty": NONE | {"repeat_penalty": 1.1, "repeat_last_n": -1},
    "DRY": NONE | {"dry_multiplier": 0.8},
    "logit bias of 300": NONE | {"logit_bias": {7 * i: -1.0 for i in range(300)}},
    "mask": NONE,
    "mask, defaults": {},
    "banned": NONE,
    "log-probabilities": NONE | {"logprobs": 20},
}
HISTORY = 2000
ROWS = 4


def milliseconds(way: str, logits: np.ndarray, rounds: int) -> tuple[float, float]:
    """Least and median processor time of a token."""
    size = logits.shape[1]
    random = np.random.default_rng(5)
    history = random.integers(0, min(size, 500), HISTORY).tolist()
    sampler = Sampler(SamplingParams(**WAYS[way], seed=1), size, history, lambda token: b"t%d " % token)
    allowed = random.random(size) < 0.5 if way.startswith("mask") else None
    banned = np.arange(3) if way == "banned" else None
    taken = []
    for number in range(rounds):
        began = time.thread_time()
        token, _ = sampler.sample(logits[number % len(logits)], allowed, banned)
        sampler.accept(token)
        taken.append(time.thread_time() - began)
    return 1000 * min(taken), 1000 * median(taken)


def logits_of(path: Path) -> np.ndarray:
    """A model's logits after some tokens of this module's description."""
    with open_model(path) as file:
        runner, tokenizer = NativeRunner(file, kv_bytes=KV_BYTES // 8, threads=1), load_tokenizer(file)
    tokens = tokenizer.encode(str(__doc__))
    rows = range(len(tokens))
    wanted = rows[len(tokens) // ROWS - 1 :: len(tokens) // ROWS]
    return runner.run(tokens, rows, [runner.create_sequence()] * len(rows), wanted)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="*", default=[32_000, 151_936, 262_144])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    random = np.random.default_rng(1)
    rows: dict[tuple[int, str], np.ndarray] = {}
    if arguments.model:
        logits = logits_of(arguments.model)
        rows[logits.shape[1], "model"] = logits
    rows |= {
        (size, kind): (random.normal(size=(ROWS, size)) * deviation).astype(np.float32)
        for size in arguments.size
        for kind, deviation in (("flat", 1.0), ("peaked", 4.0))
    }
    sys.stdout.write(f"{'ms a token':28}" + "".join(f"{f'{size} {kind}':>15}" for size, kind in rows) + "\n")
    for way in WAYS:
        figures = [milliseconds(way, logits, arguments.rounds) for logits in rows.values()]
        sys.stdout.write(f"{way:28}" + "".join(f"{least:9.3f}{middle:6.3f}" for least, middle in figures) + "\n")


if __name__ == "__main__":
    main()
