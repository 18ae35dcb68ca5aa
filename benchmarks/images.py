"""Pictures encoded by our kernels and by llama.cpp: processor time and similarity, alternating, with random weights.

    python benchmarks/images.py MODEL.gguf [--kind gemma3] [--layers 2] [--threads 1] [--rounds 3]

MODEL: any language model that llama.cpp loads, whose width the projector gets. The transformer has the real shape but
for its number of layers; times of all layers follow in proportion.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from gguf_io import open_model
from models.vision.encoder import open_encoder
from tests.models.vision.projectors import write_vision
from tests.oracle.vision_oracle import LlamaVision

SHAPES = {
    "gemma3": ({"side": 896, "patch": 14, "merge": 4, "width": 1152, "hidden": 4304, "heads": 16}, (896, 896)),
    "qwen3vl_merger": ({"patch": 16, "width": 1152, "hidden": 4304, "heads": 16}, (1280, 704)),
}


def measured(call: Callable[[], list[np.ndarray]]) -> tuple[float, np.ndarray]:
    """Seconds of processor time, and all rows."""
    start = time.process_time()
    rows = call()
    return time.process_time() - start, np.concatenate(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kind", choices=SHAPES, default="gemma3")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    shape, (width, height) = SHAPES[arguments.kind]
    with open_model(arguments.model) as file:
        text = file.metadata.get_int(f"{file.architecture}.embedding_length")
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = write_vision(
            Path(folder) / "projector.gguf",
            arguments.kind,
            weights=gguf.GGMLQuantizationType.F16,
            **shape,
            layers=arguments.layers,
            text=text,
        )
        llama = LlamaVision(path, arguments.model, threads=arguments.threads)
        with open_model(path) as file, open_encoder(file, arguments.threads) as encoder:
            layout = encoder.layout(width, height)
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(arguments.rounds):
                seconds, mine = measured(lambda: encoder.encode(pixels, layout))
                ours.append(seconds)
                seconds, others = measured(lambda: llama.rows(pixels))
                theirs.append(seconds)
        llama.close()
    norms = np.linalg.norm(mine, axis=1) * np.linalg.norm(others, axis=1)
    least = float((np.einsum("ij,ij->i", mine, others) / norms).min())
    first, second = statistics.median(ours), statistics.median(theirs)
    sys.stdout.write(
        f"{arguments.kind} {width}x{height}, {arguments.layers} layers, {arguments.threads} threads: "
        f"localllm {first:.2f} s, llama.cpp {second:.2f} s of processor time, ratio {second / first:.2f}, "
        f"cosine {least:.6f}, {layout.tokens} tokens\n"
    )


if __name__ == "__main__":
    main()
