"""How far quantised computation is from computation in floats, ours and llama.cpp's, on a real model and text.

    fidelity.py MODEL.gguf TEXT [--tokens 512]

The reference is llama.cpp with the same weights as F32, written to a temporary file. Shown for each: the mean, median
and 99th percentile of the Kullback-Leibler divergence of its next-token probabilities from the reference's, in nats,
how often both have the same likeliest token, and the perplexity of the text.
"""

import argparse
import tempfile
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.engine_tools import table, text_tokens
from benchmarks.llama_peer import LlamaPeer
from gguf_io import load_tokenizer, open_model
from models.native_runner import NativeRunner
from tests.gguf_files import copying, finish

Floats = NDArray[np.float64]


def as_floats(source: Path, target: Path) -> None:
    """Write a copy of a model's file with all weights in F32."""
    reader, writer = copying(source, target, without=("general.file_type",))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    finish(writer)


def of_peer(path: Path, tokens: tuple[int, ...]) -> Floats:
    """llama.cpp's log-probabilities after each token."""
    peer = LlamaPeer(path, 2, len(tokens) + 64, flash_attention=False)
    rows = []
    for token in tokens:
        peer.append([token])
        rows.append(peer.logits().astype(np.float64))
    peer.close()
    return log_probabilities(np.array(rows))


def of_ours(path: Path, tokens: tuple[int, ...]) -> Floats:
    """Our log-probabilities after each token, computed as one prompt."""
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=256 << 20, threads=2)
    sequence, count = runner.create_sequence(), len(tokens)
    rows = runner.run(tokens, range(count), [sequence] * count, range(count)).astype(np.float64)
    runner.close()
    return log_probabilities(rows)


def log_probabilities(logits: Floats) -> Floats:
    """The log-softmax of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def row(name: str, found: Floats, reference: Floats, tokens: tuple[int, ...]) -> tuple[object, ...]:
    """A row of the table."""
    divergence = (np.exp(reference) * (reference - found)).sum(axis=1)
    same = float(np.mean(found.argmax(axis=1) == reference.argmax(axis=1)))
    surprise = -np.mean([found[at, token] for at, token in enumerate(tokens[1:])])
    figures = divergence.mean(), np.median(divergence), np.quantile(divergence, 0.99), same, np.exp(surprise)
    return name, *(f"{float(figure):.5f}" for figure in figures)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="of the text's beginning, at most 512")
    arguments = parser.parse_args()
    with open_model(arguments.model) as file:
        tokens = text_tokens(load_tokenizer(file), arguments.text.read_text(encoding="utf-8"), arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        floats = Path(folder) / "floats.gguf"
        as_floats(arguments.model, floats)
        reference = of_peer(floats, tokens)
    rows = [
        row("floats", reference, reference, tokens),
        row("llama.cpp", of_peer(arguments.model, tokens), reference, tokens),
        row("ours", of_ours(arguments.model, tokens), reference, tokens),
    ]
    table((arguments.model.stem, "KL mean", "median", "99 %", "same first", "perplexity"), rows)


if __name__ == "__main__":
    main()
