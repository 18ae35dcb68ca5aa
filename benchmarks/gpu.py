"""What a GPU brings, and whether it takes what was planned.

    gpu.py MODEL.gguf [MODEL.gguf ...] [--context 4096] [--prompt 512] [--decode 64] [--rounds 5]

Each model with no, half and all of its layers on the GPUs that llama.cpp sees: tokens a second of a prompt and of
decoding after it, medians; and the bytes that localllm's plan names beside those that llama.cpp reports for them, in
MiB. Without a GPU the first line alone can be measured, and it says so.
"""

import argparse
import logging
import re
import sys
import time
from pathlib import Path
from statistics import median

import psutil

from benchmarks.engine_tools import table
from gguf_io import open_model
from gpu_offload.devices import gpus
from gpu_offload.planner import Plan, PlanRequest, plan
from gpu_offload.runner import LlamaCppRunner

MIB = 2**20
# A device's buffers may be of several kinds, as "MTL0_Mapped"; "CUDA_Host" is main memory.
_BUFFER = re.compile(r"(\S+?)(?:_Mapped|_Private)? +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")


class Reported(logging.Handler):
    """The buffers that llama.cpp names while it loads, in MiB, by device."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Add up a line's buffers."""
        for device, _, size in _BUFFER.findall(record.getMessage()):
            self.sizes[device] = self.sizes.get(device, 0.0) + float(size)


def loaded(path: Path, layers: int, context: int) -> tuple[LlamaCppRunner, Plan, dict[str, float]]:
    """A runner with so many layers on GPUs, its plan, and what llama.cpp reports."""
    devices = gpus() if layers else []
    log, reported = logging.getLogger("localllm.llama_cpp"), Reported()
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(reported)
    try:
        with open_model(path) as model:
            request = PlanRequest(context_tokens=context, gpu_layers=layers or None)
            made = plan(model, devices, psutil.virtual_memory().available, request)
            return LlamaCppRunner(model, made.options), made, reported.sizes
    finally:
        log.removeHandler(reported)


def speeds(runner: LlamaCppRunner, prompt: int, decode: int, rounds: int) -> tuple[float, float]:
    """Tokens a second of a prompt, and of decoding after it: medians of rounds after one that does not count."""
    prefilled, decoded = [], []
    for _ in range(rounds + 1):
        sequence = runner.create_sequence()
        began = time.perf_counter()
        for first in range(0, prompt, runner.max_rows):
            count = min(runner.max_rows, prompt - first)
            runner.run([100] * count, range(first, first + count), [sequence] * count, [count - 1])
        prefilled.append(prompt / (time.perf_counter() - began))
        began = time.perf_counter()
        for position in range(prompt, prompt + decode):
            runner.run([100], [position], [sequence], [0])
        decoded.append(decode / (time.perf_counter() - began))
        runner.free_sequence(sequence)
    return median(prefilled[1:]), median(decoded[1:])


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found = {gpu.name: gpu.description for gpu in gpus()}
    sys.stdout.write(f"GPUs: {', '.join(map(' '.join, found.items())) or 'none, so that 0 layers alone can run'}\n\n")
    rows = []
    for path in arguments.models:
        with open_model(path) as model:
            units = model.metadata.get_int(f"{model.architecture}.block_count") + 1  # the output is one
        for layers in (0, units // 2, units) if found else (0,):
            runner, made, reported = loaded(path, layers, arguments.context)
            prefill, decode = speeds(runner, arguments.prompt, arguments.decode, arguments.rounds)
            runner.close()
            on_gpus = sum(size for name, size in reported.items() if name in found)
            memory = (
                made.uses[0].needed / MIB,
                sum(reported.values()) - on_gpus,
                sum(use.needed for use in made.uses[1:]) / MIB,
                on_gpus,
            )
            rows.append((path.stem, f"{layers} of {units}", prefill, decode, *memory))
    table(
        ("model", "layers", "prefill tok/s", "decode tok/s", "planned RAM", "RAM", "planned GPU", "GPU"),
        rows,
    )


if __name__ == "__main__":
    main()
