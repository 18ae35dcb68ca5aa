"""Pictures encoded by our kernels and by llama.cpp at full size, with random weights in F16: one table.

    python benchmarks/images.py MODEL.gguf [--kind gemma3] [--layers 27] [--threads 1 2] [--rounds 2]

MODEL: any language model that llama.cpp loads, whose width the projector gets. For each kind of encoder and number of
threads both encode the same picture in turn. The table has the median wall and processor time of each, llama.cpp's
processor time divided by ours, the least cosine between rows, the time until our first progress, the longest time from
a cancellation to its end, which is measured at three moments, and the memory that was planned and that was used.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import psutil

from gguf_io import open_model
from gguf_io.interruption import CHECKPOINT
from models.vision.encoder import ImageEncoder, open_encoder, vision_needs
from models.vision.layout import ImageLayout
from tests.oracle.vision_oracle import LlamaVision
from tests.projector_files import write_projector

SHAPES = {
    "gemma3": ({"side": 896, "patch": 14, "merge": 4, "width": 1152, "hidden": 4304, "heads": 16}, (896, 896)),
    "qwen3vl_merger": ({"patch": 16, "width": 1152, "hidden": 4304, "heads": 16}, (1280, 704)),
}
TITLES = ("encoder", "picture", "tokens", "threads", "ours s", "llama.cpp s", "ours cpu s", "llama.cpp cpu s", "ratio")
TITLES += ("cosine", "progress s", "cancel s", "planned MiB", "used MiB")
_MOMENTS = 0.05, 0.4, 0.8  # of the work, at which it is cancelled

Times = tuple[float, float]
"""Seconds on the clock, and of processor time."""


def measured(call: Callable[[], list[np.ndarray]]) -> tuple[Times, np.ndarray]:
    """The times of a call, and all of its rows."""
    clock, processor = time.perf_counter(), time.process_time()
    rows = call()
    return (time.perf_counter() - clock, time.process_time() - processor), np.concatenate(rows)


def cancelled(encoder: ImageEncoder, pixels: np.ndarray, layout: ImageLayout) -> float:
    """The longest time from a cancellation to its end: it comes just after a look at whether the work is wanted."""
    longest = 0.0
    for moment in _MOMENTS:
        asked: list[float] = []
        looks: list[float] = []

        def look(asked: list[float] = asked, looks: list[float] = looks) -> None:
            if asked:
                raise InterruptedError
            looks.append(time.perf_counter())

        def progress(done: float, moment: float = moment, asked: list[float] = asked) -> None:
            if done >= moment and not asked:
                asked.append(looks[-1])  # noqa: B023

        token = CHECKPOINT.set(look)
        try:
            encoder.encode(pixels, layout, progress)
        except InterruptedError:
            longest = max(longest, time.perf_counter() - asked[0])
        finally:
            CHECKPOINT.reset(token)
    return longest


def first_progress(encoder: ImageEncoder, pixels: np.ndarray, layout: ImageLayout) -> float:
    """Seconds until the first progress of a picture, which is then cancelled."""
    begun, seen = time.perf_counter(), []

    def look() -> None:
        if seen:
            raise InterruptedError

    token = CHECKPOINT.set(look)
    try:
        encoder.encode(pixels, layout, lambda _: seen.append(time.perf_counter() - begun))
    except InterruptedError:
        pass
    finally:
        CHECKPOINT.reset(token)
    return seen[0]


def compared(kind: str, path: Path, model: Path, threads: int, rounds: int) -> tuple[str, ...]:
    """One line of the table."""
    width, height = SHAPES[kind][1]
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    process = psutil.Process()
    before = process.memory_info().rss
    with open_model(path) as file:
        needs = vision_needs(file, threads)
        encoder = open_encoder(file, threads)
    with encoder:
        layout = encoder.layout(width, height)
        progress = first_progress(encoder, pixels, layout)
        cancel = cancelled(encoder, pixels, layout)
        used = process.memory_info().rss - before
        ours: list[Times] = []
        theirs: list[Times] = []
        with closing(LlamaVision(path, model, threads=threads)) as llama:
            for _ in range(rounds):
                times, mine = measured(lambda: encoder.encode(pixels, layout))
                ours.append(times)
                times, others = measured(lambda: llama.rows(pixels))
                theirs.append(times)
    norms = np.linalg.norm(mine, axis=1) * np.linalg.norm(others, axis=1)
    cosine = float((np.einsum("ij,ij->i", mine, others) / norms).min())
    (wall, processor), (their_wall, their_processor) = (
        [statistics.median(each) for each in zip(*times, strict=True)] for times in (ours, theirs)
    )
    sizes = f"{(needs.weights + needs.buffers) / 2**20:,.0f}", f"{used / 2**20:,.0f}"
    seconds = [f"{value:.2f}" for value in (wall, their_wall, processor, their_processor, their_processor / processor)]
    waits = f"{cosine:.6f}", f"{progress:.2f}", f"{cancel:.2f}"
    return (kind, f"{width}x{height}", str(layout.tokens), str(threads), *seconds, *waits, *sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kind", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with open_model(arguments.model) as file:
        text = file.metadata.get_int(f"{file.architecture}.embedding_length")
    sys.stdout.write(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}\n")
    for kind in arguments.kind:
        shape = SHAPES[kind][0]
        with tempfile.TemporaryDirectory() as folder:
            path = write_projector(
                Path(folder) / "projector.gguf",
                kind,
                weights=gguf.GGMLQuantizationType.F16,
                **shape,
                layers=arguments.layers,
                text=text,
            )
            for threads in arguments.threads:
                line = compared(kind, path, arguments.model, threads, arguments.rounds)
                sys.stdout.write(f"| {' | '.join(line)} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
