"""What LoRA adapters cost on the native engine: a step with and without them, by processor time.

    python -m benchmarks.adapters model.gguf [--rank 16] [--rows 1,8] [--adapters 4] [--rounds 9]

Adapters of random values for every matrix of the layers are written to a temporary folder. Steps of one token for each
sequence alternate between no adapters and one for each sequence, and the median of the ratios of their processor time
is printed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np

from gguf_io import ModelFile, open_model
from gguf_io.lora import Adapter
from gguf_io.runner_info import AdapterSet
from models.native_runner import NativeRunner

STEPS = 6  # of each kind in a round


def write_adapter(path: Path, model: ModelFile, rank: int, seed: int) -> Path:
    """Write an adapter for every matrix of the model's layers, as llama.cpp's converter does."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, tensor in model.tensors.items():
        if name.startswith("blk.") and len(tensor.shape) == 2:
            outputs, inputs = tensor.shape
            for part, shape in (("lora_a", (rank, inputs)), ("lora_b", (outputs, rank))):
                writer.add_tensor(f"{name}.{part}", random.normal(0, 0.01, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def step_seconds(runner: NativeRunner, sequences: Sequence[int]) -> float:
    """Processor time of some steps of one token for each sequence, which are then taken back."""
    began, rows = time.process_time(), range(len(sequences))
    for _ in range(STEPS):
        positions = [runner.sequence_length(sequence) for sequence in sequences]
        runner.run([1] * len(sequences), positions, sequences, rows)
    taken = time.process_time() - began
    for sequence in sequences:
        runner.truncate_sequence(sequence, runner.sequence_length(sequence) - STEPS)
    return taken


def started(runner: NativeRunner, sets: Sequence[AdapterSet]) -> list[int]:
    """Sequences with a short prompt, computed with these adapters."""
    made = [runner.create_sequence(chosen) for chosen in sets]
    for sequence in made:
        runner.run(range(1, 33), range(32), [sequence] * 32, [31])
    return made


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        model = opened.enter_context(open_model(options.model))
        paths = [write_adapter(folder / f"{seed}.gguf", model, options.rank, seed) for seed in range(options.adapters)]
        adapters = [Adapter(opened.enter_context(open_model(path)), model) for path in paths]
        runner = NativeRunner(model, kv_bytes=1 << 28, threads=options.threads, adapters=adapters)
        opened.callback(runner.close)
        for rows in map(int, options.rows.split(",")):
            plain = started(runner, [()] * rows)
            used = [((row % options.adapters, 1.0),) for row in range(rows)]
            changed = started(runner, used)
            ratios, seconds = [], []
            for _ in range(options.rounds):
                without = step_seconds(runner, plain)
                ratios.append(step_seconds(runner, changed) / without)
                seconds.append(without)
            few = min(rows, options.adapters)
            sys.stdout.write(
                f"{rows} rows, {few} adapters of rank {options.rank}: {statistics.median(ratios):.3f} times the "
                f"processor time without ({1000 * statistics.median(seconds) / STEPS:.1f} ms a step)\n"
            )
            sys.stdout.flush()
            for sequence in (*plain, *changed):
                runner.free_sequence(sequence)


if __name__ == "__main__":
    main()
