"""Measures all about a GPU in one run: speed by layers, memory against the plan, prefixes, overhead, images; the CPU.

    gpu.py MODEL.gguf [MODEL.gguf ...] [--output gpu-report.md] [--minutes 8] [--only speed,memory,...]

Every section of each model runs in a process of its own, so that one that fails or hangs does not stop the others:

- speed: tokens per second of a prompt and of decoding after it, with no, half and all layers on the GPUs.
- memory: the same loads, in MiB: localllm's estimate from the file, its plan with llama.cpp's dry run, llama.cpp's
  allocations, and the memory in use according to the driver, after loading and after a prompt.
- prefix: time to the first token of a prompt: computed, with its prefix in the KV cache, after other prompts have
  evicted it, and from disk after a restart. On the CPU the next prompt moves it to a copy in main memory.
- overhead: what our engine costs above llama.cpp's own functions, with all layers on the GPUs (overhead.py).
- images: an image through a projector of random weights, encoder and model on the GPU and on the processor.
- cpu: the native engine and llama.cpp on 1, 2, 4, 8 and 16 threads (compare_llama_cpp.py).

Without a GPU the sections run with no layers on one. The output also goes to --output as it appears. A section that
does not fit into --minutes is skipped, and the report says so.
"""

import argparse
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from benchmarks.engine_tools import answer, ask, text_tokens
from cpu_kernels.cores import usable_processors
from gguf_io import load_tokenizer, open_model
from gpu_offload.devices import gpus
from gpu_offload.image_rows import ImageRows
from gpu_offload.memory import projector_bytes
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.placement.llama import Request, plan
from localllm.placement.placement import Placement

MIB = 2**20
CONTEXT, PROMPT, DECODE, ROUNDS = 4096, 512, 64, 3
THREADS = (1, 2, 4, 8, 16)
_LEAST_SECONDS = 15  # a section with less time is skipped
# A device's buffers may be of several kinds, such as "MTL0_Mapped"; "CUDA_Host" is main memory.
_BUFFER = re.compile(r"(\S+?)(?:_Mapped|_Private)? +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")
_TEXT = "The quick brown fox jumps over the lazy dog, and number {} follows it through field {} until evening. "


class Allocated(logging.Handler):
    """The buffers that llama.cpp logs while it loads, in MiB by device."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Add up a line's buffers."""
        for device, _, size in _BUFFER.findall(record.getMessage()):
            self.sizes[device] = self.sizes.get(device, 0.0) + float(size)


@contextmanager
def allocations() -> Iterator[dict[str, float]]:
    """Read llama.cpp's log inside the block: MiB by device."""
    log, found = logging.getLogger("localllm.llama_cpp"), Allocated()
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(found)
    try:
        yield found.sizes
    finally:
        log.removeHandler(found)


def planned(path: Path, layers: int | None, **wishes: object) -> Placement:
    """A plan for this machine. layers: None means as many as fit, 0 none."""
    request = Request(context_tokens=CONTEXT, gpu_layers=layers, dry_run=True)
    with open_model(path) as model:
        devices = [] if layers == 0 else gpus()
        return plan(model, devices, psutil.virtual_memory().available, replace(request, **wishes))  # type: ignore[arg-type]


def opened(path: Path, made: Placement, **wishes: object) -> LlamaCppRunner:
    """A runner that follows a plan."""
    with open_model(path) as model:
        return LlamaCppRunner(model, replace(made.options, **wishes))  # type: ignore[arg-type]


def layer_counts(path: Path) -> tuple[int, ...]:
    """Layer counts to measure: none, half and all, counting the output as one; only none without a GPU."""
    with open_model(path) as model:
        units = model.metadata.get_int(f"{model.architecture}.block_count") + 1
    return (0, units // 2, units) if gpus() else (0,)


def driver_mib() -> float:
    """MiB in use on the first GPU by all programs, according to its driver."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return float(subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout)
    found = gpus()
    return (found[0].total_bytes - found[0].free_bytes) / MIB if found else 0.0


def prompt_once(runner: LlamaCppRunner, tokens: int, decode: int) -> tuple[float, float]:
    """Tokens per second of a prompt, and of decoding after it."""
    sequence = runner.create_sequence()
    began = time.perf_counter()
    for first in range(0, tokens, runner.info.max_rows):
        count = min(runner.info.max_rows, tokens - first)
        runner.run([100] * count, range(first, first + count), [sequence] * count, [count - 1])
    read = time.perf_counter()
    for position in range(tokens, tokens + decode):
        runner.run([100], [position], [sequence], [0])
    ended = time.perf_counter()
    runner.free_sequence(sequence)
    return tokens / (read - began), decode / (ended - read)


def row(*cells: object) -> None:
    """Print a row of a Markdown table and flush it, since what follows may fail."""
    texts = (f"{cell:,.{1 if abs(cell) < 100 else 0}f}" if isinstance(cell, float) else str(cell) for cell in cells)
    sys.stdout.write(f"| {' | '.join(texts)} |\n")
    sys.stdout.flush()


def head(*cells: str) -> None:
    """Print the head of a Markdown table."""
    row(*cells)
    row(*("---" for _ in cells))


def speed(path: Path) -> None:
    """Prefill and decode speed by layers on GPUs."""
    head("layers on GPUs", f"prefill {PROMPT}, tok/s", "decode, tok/s")
    for layers in layer_counts(path):
        decode = DECODE if layers else 16
        runner = opened(path, planned(path, layers))
        found = [prompt_once(runner, PROMPT, decode) for _ in range(ROUNDS + 1 if layers else 2)][1:]
        runner.close()
        row(layers, *(median(column) for column in zip(*found, strict=True)))


def memory(path: Path) -> None:
    """The planned memory against the memory used."""
    names = {gpu.name for gpu in gpus()}
    parts = "estimate", "dry run", "allocated", "driver, loaded", "driver, after a prompt", "loaded above plan"
    head("layers", "MiB of", *parts, "measured")
    for layers in layer_counts(path):
        guess, made = planned(path, layers, dry_run=False), planned(path, layers)
        before = driver_mib()  # after listing the devices, which opens them and takes memory
        with allocations() as sizes:
            runner = opened(path, made)
        loaded = driver_mib() - before
        prompt_once(runner, PROMPT, 8)
        ran = driver_mib() - before
        runner.close()
        on_gpus = sum(size for name, size in sizes.items() if name in names)
        plans = [one.device_bytes / MIB for one in (guess, made)]
        off = f"{100 * (loaded / plans[1] - 1):+.1f} %" if plans[1] else "-"
        main = [sum((one.uses[0].weights, one.uses[0].kv, one.uses[0].compute)) / MIB for one in (guess, made)]
        row(layers, "GPU", *plans, on_gpus, loaded, ran, off, "yes" if made.measured else "no")
        row(layers, "main memory", *main, sum(sizes.values()) - on_gpus, "-", "-", "-", "")


def prefix(path: Path) -> None:
    """Time to the first token by where a prompt's prefix is stored."""
    text = "".join(_TEXT.format(number, 7 * number % 1000) for number in range(4000))
    with open_model(path) as file:
        tokenizer = load_tokenizer(file)
    length = 1500 if gpus() else 600
    prompts = [list(text_tokens(tokenizer, text, length, start=30_000 * number)) for number in range(4)]
    warm = text_tokens(tokenizer, text, 40, start=200_000)
    head("prefix", "prompt", "cached, memory", "cached, disk", "TTFT ms")

    def note(engine: Engine, where: str, tokens: list[int]) -> tuple[int, ...]:
        last, said = answer(engine, tokens, 8)
        counts = last.counts
        row(where, counts.prompt, counts.cached_memory, counts.cached_disk, 1000 * last.timings.ttft_s)
        return said

    def engine_on(folder: str) -> Engine:
        runner = opened(path, planned(path, None if gpus() else 0, base=LlamaOptions(max_sequences=12)))
        engine = Engine(runner, tokenizer, disk=DiskCache(Path(folder), runner.info.kv_layout, 2**32))
        engine.start()
        ask(engine, warm, 4)
        return engine

    with tempfile.TemporaryDirectory() as folder:
        engine = engine_on(folder)
        turn = [*prompts[0], *note(engine, "computed", prompts[0]), *warm]
        note(engine, "in the KV cache", turn)
        time.sleep(3)  # copies are made while the engine is idle
        ask(engine, prompts[1], 2)
        note(engine, "after another prompt", [*turn, *warm[:20]])
        for other in prompts[2:]:
            time.sleep(1)
            ask(engine, other, 2)
        note(engine, "after two more", [*turn, *warm[:25]])
        engine.close()
        engine = engine_on(folder)
        note(engine, "from the disk", [*turn, *warm[:30]])
        engine.close()


def overhead(path: Path) -> None:
    """Our engine's cost above llama.cpp's own functions."""
    layers = layer_counts(path)[-1]
    sizes = ("256", "64", "3") if layers else ("96", "12", "3")
    flags = [f"--{name}={value}" for name, value in zip(("prompt", "answer", "rounds"), sizes, strict=True)]
    threads = min(usable_processors(), 8)
    _child("benchmarks.overhead", str(path), *flags, f"--gpu-layers={layers}", f"--threads={threads}")


def images(path: Path) -> None:
    """An image through a projector: times to encode it and to compute its rows, and the memory of both files."""
    from tests.gpu_offload import projector_files

    with open_model(path) as model:
        width = model.metadata.get_int(f"{model.architecture}.embedding_length")
    # The shape of Gemma 3's encoder, with fewer layers.
    shape = {"WIDTH": 1152, "INNER": 4304, "SIDE": 448, "PATCH": 14, "PATCHES": 1024, "LAYERS": 6}
    for name, size in shape.items():
        setattr(projector_files, name, size)
    logits = []
    head("layers on GPUs", "rows", "encode ms", "read ms", "GPU planned MiB", "driver MiB")
    with tempfile.TemporaryDirectory() as folder:
        projector = projector_files.write_projector(Path(folder) / "mmproj.gguf", "gemma3", width=width)
        for layers in layer_counts(path)[::-2]:
            made = planned(path, layers, projector_bytes=projector_bytes(projector))
            before = driver_mib()
            runner = opened(path, made, mmproj=projector)
            assert runner.projector is not None
            runner.projector.see(projector_files.png(1))
            began = time.perf_counter()
            pieces = runner.projector.see(projector_files.png(2))
            encoded = time.perf_counter()
            sequence = runner.create_sequence()
            for piece in pieces:
                if isinstance(piece, ImageRows):
                    runner.append_image(sequence, piece)
            at = runner.sequence_length(sequence)
            logits.append(runner.run([100], [at], [sequence], [0])[0].copy())
            read = time.perf_counter()
            taken = driver_mib() - before
            row(layers, at, 1000 * (encoded - began), 1000 * (read - encoded), made.device_bytes / MIB, taken)
            runner.close()
    apart = float(np.abs(logits[0] - logits[-1]).max() / logits[-1].std())
    sys.stdout.write(f"Logits after it with and without the GPU differ by {apart:.3f} of their spread at most.\n")


def cpu(path: Path) -> None:
    """The native engine against llama.cpp."""
    for threads in (count for count in THREADS if count <= usable_processors()):
        flags = f"--threads={threads}", f"--prefill={64 if threads == 1 else 128}", "--decode=16", "--rounds=1"
        _child("benchmarks.compare_llama_cpp", str(path), *flags)


SECTIONS = {one.__name__: one for one in (speed, memory, prefix, overhead, images, cpu)}


def _child(module: str, *arguments: str) -> None:
    """Run another benchmark with its output on ours."""
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def run_section(name: str, path: Path, seconds: float, tell: Callable[[str], None]) -> None:
    """Run a section as a process, which is killed with its children after `seconds`."""
    began = time.monotonic()
    tell(f"\n## {name}, {path.stem}\n\n")
    command = [sys.executable, "-m", "benchmarks.gpu", str(path), "--section", name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as process:
        end = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        end.start()
        assert process.stdout is not None
        for line in process.stdout:
            tell(line)
        code = process.wait()
        end.cancel()
    took = time.monotonic() - began
    tell(f"({took:.0f} s{'' if code == 0 else f'; FAILED with exit code {code}'})\n")


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--minutes", type=float, default=8.0, help="no section runs on after these")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        SECTIONS[arguments.section](arguments.models[0])
        return
    deadline = time.monotonic() + 60 * arguments.minutes
    with arguments.output.open("w", encoding="utf-8") as report:

        def tell(text: str) -> None:
            for stream in (sys.stdout, report):
                stream.write(text)
                stream.flush()

        found = ", ".join(f"{gpu.name} {gpu.description}, {gpu.free_bytes // MIB:,} MiB free" for gpu in gpus())
        tell(f"GPUs: {found or 'none'}. {usable_processors()} processors, load {os.getloadavg()[0]:.1f}.\n")
        # By section, then by model: the sections about GPUs come first, since the processor's take longest.
        for name in arguments.only.split(","):
            for path in arguments.models:
                left = deadline - time.monotonic()
                if left < _LEAST_SECONDS:
                    tell(f"\n## {name}, {path.stem}\n\n(left out: the time is over)\n")
                else:
                    run_section(name, path, left, tell)


if __name__ == "__main__":
    main()
