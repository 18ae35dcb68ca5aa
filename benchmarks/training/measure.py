"""Perplexity of GGUF files on held-out conversations: of the answers, and of all tokens.

python -m benchmarks.training.measure FOLDER model-F32.gguf model-Q8_0.gguf
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.training.tokens import load_encoder, stream
from gguf_io import open_model
from models.native_runner import NativeRunner

SEED, LENGTH = 987_654_321, 512


def surprises(runner: NativeRunner, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Negative log-likelihoods, in nats, of all tokens but the first."""
    sequence = runner.create_sequence()
    count = len(tokens)
    logits = runner.run(tokens.tolist(), list(range(count)), [sequence] * count, list(range(count)))
    rows = logits[:-1].astype(np.float64)
    runner.free_sequence(sequence)
    return np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(count - 1), tokens[1:]]


def main() -> None:
    """Print one line for each file."""
    parser = argparse.ArgumentParser(description="Measure the built-in model on unseen conversations.")
    parser.add_argument("folder", type=Path, help="the folder given to train")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--pieces", type=int, default=40)
    chosen = parser.parse_args()
    pieces = list(itertools.islice(stream(load_encoder(chosen.folder / "tokenizer.json"), SEED, LENGTH), chosen.pieces))
    answered = np.concatenate([weights[1:] == 1 for _, weights in pieces])
    for path in chosen.files:
        with open_model(path) as file:
            runner = NativeRunner(file, kv_bytes=32 << 20)
            found = np.concatenate([surprises(runner, tokens) for tokens, _ in pieces])
            runner.close()
        sys.stdout.write(
            f"{path.name}: answers {np.exp(found[answered].mean()):.4f} ({answered.sum()} tokens), "
            f"all {np.exp(found.mean()):.4f} ({len(found)} tokens)\n"
        )


if __name__ == "__main__":
    main()
