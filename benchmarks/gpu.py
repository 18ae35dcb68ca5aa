"""Measures all about a GPU in one run, what matters most in the first four minutes.

    gpu.py MODEL.gguf [MODEL.gguf ...] [--output gpu-report.md] [--minutes 4] [--only steps,prefix,...] [--without-gpu]

Every section of each model runs in a process of its own, so that one that fails or hangs does not stop the others.
Their order is that of the report; `install` and `together` run once, for all models. A small model that comes first
makes a short run useful. Eight minutes are enough for everything.

- install: the GPUs that are found, and `localllm gpu install` of the llama.cpp that runs here, as a wheel from a local
  index into a throwaway environment, with the trial against the CPU engine.
- steps: milliseconds for a step of 1 to 16 sequences: llama.cpp's functions with argmax, our runner, our engine with
  default sampling; then as many clients of `localllm serve`.
- prefix: time to the first token of a prompt: computed, with its prefix in the KV cache, after other prompts have
  evicted it, and after restarts, from the disk until computing is known to be faster. On the CPU the next prompt moves
  it to a copy in main memory.
- freed: memory in use before and after unloading, with a long answer, and right after a cancelled long prompt.
- together: two models at once.
- images: an image through a projector of random weights, encoder and model on the GPU and on the processor.
- speed: tokens per second of a prompt and of decoding after it, with no, half and all layers on the GPUs.
- memory: the same loads, in MiB: localllm's estimate from the file, its plan with llama.cpp's dry run, llama.cpp's
  allocations, and the memory in use according to the driver, after loading and after a prompt.
- overhead: what our engine costs above llama.cpp's own functions, with all layers on the GPUs (overhead.py).
- cpu: the native engine and llama.cpp on 1, 2, 4, 8 and 16 threads (compare_llama_cpp.py).

Where llama.cpp sees no GPU, only --without-gpu measures, with no layers on one. The output also goes to --output as it
appears. A section that does not fit into --minutes is skipped, and the report says so.
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

from benchmarks import servers
from benchmarks.batched import LlamaBatch
from benchmarks.engine_tools import answer, ask, text_tokens
from benchmarks.steps import stream as stream_clients
from cpu_kernels.cores import usable_processors
from gguf_io import load_tokenizer, open_model
from gguf_io.image_rows import ImageRows
from gpu_offload.builds import BUILDS, build_for
from gpu_offload.devices import gpus
from gpu_offload.found_gpus import found_gpus
from gpu_offload.memory import projector_bytes
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams, TokenEvent
from localllm.engine.restore_costs import RestoreCosts
from localllm.engine.speculation import DraftLength
from localllm.placement.llama import LlamaRequest, plan
from localllm.placement.loaded_model import release_memory
from localllm.placement.placement import Placement

MIB = 2**20
CONTEXT, PROMPT, DECODE, ROUNDS = 4096, 512, 64, 3
STEP_PROMPT, RESTARTS = 32, 4
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
    request = LlamaRequest(context_tokens=CONTEXT, gpu_layers=layers, dry_run=True)
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


def install(*_models: Path) -> None:
    """`localllm gpu install`, with the llama.cpp of this environment as the wheel."""
    from tests.localllm import throwaway

    found = found_gpus()
    build = build_for(found) or BUILDS[-1]
    sys.stdout.write(f"Found: {', '.join(gpu.label for gpu in found) or 'no GPU'}; the build {build.name}.\n\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder, throwaway.Index().running() as index:
        assert isinstance(index, throwaway.Index)
        index.offer(*throwaway.wheel(throwaway.installed_files()))
        made = throwaway.Environment(Path(folder) / "venv")
        began = time.perf_counter()
        done = made.install("--build", build.name, "--gpu-index", index.url)
        sys.stdout.write(
            f"{done.stdout}{done.stderr}exit status {done.returncode}, {time.perf_counter() - began:.0f} s\n"
        )


def steps(path: Path) -> None:
    """A step of several sequences: llama.cpp's functions, our runner, our engine; then clients of the server."""
    DraftLength.choose = lambda *_: 0  # type: ignore[method-assign] # random weights repeat themselves
    layers, threads = layer_counts(path)[-1], min(usable_processors(), 8)
    counts, answer_tokens = ((1, 4, 8, 16), 96) if layers else ((1, 4), 16)
    most = max(counts)
    with open_model(path) as file:
        tokenizer = load_tokenizer(file)
    words = min(tokenizer.vocab_size, 9000)
    ids = np.random.default_rng(1).integers(100, words, (STEP_PROMPT + answer_tokens, most)).tolist()
    peer = LlamaBatch(path, threads, most, 2 * len(ids), flash_attention=True, gpu_layers=layers)
    theirs = {
        count: _step_ms(lambda tokens, at: (peer.step(tokens, at), peer.likeliest(len(tokens))), ids, count, peer.clear)
        for count in counts
    }
    peer.close()
    wishes = LlamaOptions(max_sequences=2 * most, threads=threads)
    runner = opened(path, planned(path, None if layers else 0, base=wishes, context_tokens=CONTEXT))
    sequences = [runner.create_sequence() for _ in range(most)]

    def step(tokens: list[int], at: int) -> None:
        runner.run(tokens, [at] * len(tokens), sequences[: len(tokens)], range(len(tokens)))

    def clear() -> None:
        for one in sequences:
            runner.truncate_sequence(one, 0)

    ours = {count: _step_ms(step, ids, count, clear) for count in counts}
    for one in sequences:
        runner.free_sequence(one)
    engine = Engine(runner, tokenizer, max_running=most)
    engine.start()
    head("sequences", "llama.cpp's functions, ms", "our runner", "our engine", "engine above llama.cpp", "tok/s")
    rates = {}
    for count in counts:
        for _ in range(2):
            streams = [
                engine.submit(
                    GenerationRequest(
                        tuple(ids[at][one] for at in range(STEP_PROMPT)),
                        SamplingParams(seed=1),
                        max_tokens=answer_tokens,
                        ignore_eos=True,
                    )
                )
                for one in range(count)
            ]
            took = [1000 * one.collect().last.timings.decode_s / (answer_tokens - 1) for one in streams]
        rates[count] = 1000 * count / median(took)
        above = f"{100 * (median(took) / theirs[count] - 1):+.0f} %"
        row(count, theirs[count], ours[count], median(took), above, rates[count])
    engine.close()
    sys.stdout.write("\n")
    head("clients", "tok/s", "of the engine's", "first TTFT ms", "last TTFT ms")
    for count in (counts[0], counts[-1]):
        with servers.localllm(path, threads, speculates=False, parallel=count) as server:
            stream_clients(server, count, 8, 0)
            done = stream_clients(server, count, answer_tokens, 1)
        rate = count * answer_tokens / done.took
        row(count, rate, f"{100 * rate / rates[count]:.0f} %", 1000 * min(done.ttft), 1000 * max(done.ttft))


def _step_ms(
    step: Callable[[list[int], int], object], ids: list[list[int]], count: int, clear: Callable[[], None]
) -> float:
    """The median time of a step of `count` sequences after their prompts, which are computed token by token."""
    clear()
    times = []
    for at, tokens in enumerate(ids):
        began = time.perf_counter()
        step(tokens[:count], at)
        if at >= STEP_PROMPT:
            times.append(1000 * (time.perf_counter() - began))
    return median(times)


def freed(path: Path) -> None:
    """Memory in use around unloading: of the first GPU by its driver, or of this process without one."""
    with open_model(path) as file:
        tokenizer = load_tokenizer(file)
    words = min(tokenizer.vocab_size, 9000) - 100
    what = "GPU" if gpus() else "process"
    head(f"MiB of the {what}", "before", "loaded", "after the answer", "close ms", "closed", "after 3 s")
    for cancelled in (False, True):
        before = _used_mib()
        with tempfile.TemporaryDirectory() as folder:
            runner = opened(path, planned(path, None if gpus() else 0, context_tokens=2 * CONTEXT))
            engine = Engine(runner, tokenizer, disk=DiskCache(Path(folder), runner.info.kv_layout, 2**32))
            engine.start()
            loaded = _used_mib()
            length = min(6000 if gpus() else 1200, engine.context - 16)
            prompt = tuple(100 + 7919 * at % words for at in range(length))
            stream = engine.submit(GenerationRequest(prompt, SamplingParams(seed=1), max_tokens=8))
            last = None
            for last in stream:
                if cancelled and last.progress is not None and last.progress.prefilled:
                    stream.cancel()
            assert last is not None
            after, began = _used_mib(), time.perf_counter()
            engine.close()
            took = 1000 * (time.perf_counter() - began)
            del engine, runner
            release_memory()
            closed = _used_mib()
            time.sleep(3)
        how = "cancelled within the prompt" if cancelled else "answered"
        row(f"{how} ({last.finish_reason})", before, loaded, after, took, closed, _used_mib())


def _used_mib() -> float:
    return driver_mib() if gpus() else psutil.Process().memory_info().rss / MIB


def together(*models: Path) -> None:
    """Two models in memory: each alone, then both at once."""
    engines, before = [], _used_mib()
    head("model", "MiB after loading", "alone, tok/s", "beside the other, tok/s")
    for path in (models[0], models[-1]):
        with open_model(path) as file:
            tokenizer = load_tokenizer(file)
        engine = Engine(opened(path, planned(path, None if gpus() else 0)), tokenizer)
        engine.start()
        engines.append((path, engine, _used_mib() - before))
    tokens = 128 if gpus() else 16
    request = GenerationRequest(tuple(range(100, 164)), SamplingParams(seed=1), max_tokens=tokens, ignore_eos=True)

    def rate(last: TokenEvent) -> float:
        return (tokens - 1) / last.timings.decode_s

    for _, engine, _ in engines:
        engine.submit(request).collect()
    alone = [rate(engine.submit(request).collect().last) for _, engine, _ in engines]
    streams = [engine.submit(request) for _, engine, _ in engines]
    both = [rate(stream.collect().last) for stream in streams]
    for (path, engine, used), one, beside in zip(engines, alone, both, strict=True):
        row(path.stem, used, one, beside)
        engine.close()


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
    head("prefix", "prompt", "cached, memory", "cached, disk", "stored, computed", "restoring ms", "TTFT ms")

    def note(engine: Engine, where: str, tokens: list[int]) -> tuple[int, ...]:
        last, said = answer(engine, tokens, 8)
        counts, times = last.counts, (1000 * last.timings.restore_s, 1000 * last.timings.ttft_s)
        row(where, counts.prompt, counts.cached_memory, counts.cached_disk, counts.recomputed, *times)
        return said

    costs = RestoreCosts()  # as load_model keeps them between processes

    def engine_on(folder: str) -> Engine:
        runner = opened(path, planned(path, None if gpus() else 0, base=LlamaOptions(max_sequences=12)))
        engine = Engine(runner, tokenizer, disk=DiskCache(Path(folder), runner.info.kv_layout, 2**32), costs=costs)
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
        for start in range(1, RESTARTS + 1):
            engine = engine_on(folder)
            note(engine, f"after restart {start}", [*turn, *warm[: 25 + start]])
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
    from tests.gpu_offload.projector_runs import see
    from tests.picture_files import png
    from tests.projector_files import write_projector

    with open_model(path) as model:
        width = model.metadata.get_int(f"{model.architecture}.embedding_length")
    # The shape of Gemma 3's encoder, with fewer layers.
    shape = {"width": 1152, "hidden": 4304, "side": 448, "patch": 14, "layers": 6, "heads": 16, "merge": 4}
    logits = []
    head("layers on GPUs", "rows", "encode ms", "read ms", "GPU planned MiB", "driver MiB")
    with tempfile.TemporaryDirectory() as folder:
        projector = write_projector(Path(folder) / "mmproj.gguf", "gemma3", **shape, text=width)
        for layers in layer_counts(path)[::-2]:
            made = planned(path, layers, projector_bytes=projector_bytes(projector))
            before = driver_mib()
            runner = opened(path, made, mmproj=projector)
            assert runner.projector is not None
            see(runner, png(1))
            began = time.perf_counter()
            pieces = see(runner, png(2))
            encoded = time.perf_counter()
            sequence, at = runner.create_sequence(), 0
            for piece in pieces:
                if isinstance(piece, ImageRows):
                    runner.append_image(sequence, piece, at)
                    at += piece.length
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


ONCE = {one.__name__: one for one in (install, together)}
SECTIONS: dict[str, Callable[..., None]] = {
    one.__name__: one for one in (steps, prefix, freed, together, images, install, speed, memory, overhead, cpu)
}


def _child(module: str, *arguments: str) -> None:
    """Run another benchmark with its output on ours."""
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def run_section(name: str, paths: list[Path], seconds: float, tell: Callable[[str], None]) -> None:
    """Run a section as a process, which is killed with its children after `seconds`."""
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", *map(str, paths), "--section", name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as process:
        end = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        end.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tell(line)
            code = process.wait()
        finally:
            end.cancel()
            if process.poll() is None:  # this program was interrupted or terminated
                os.killpg(process.pid, signal.SIGKILL)
    took = time.monotonic() - began
    tell(f"({took:.0f} s{'' if code == 0 else f'; FAILED with exit code {code}'})\n")


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--minutes", type=float, default=4.0, help="no section runs on after these")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--without-gpu", action="store_true", help="measure on the processor if there is no GPU")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        SECTIONS[arguments.section](*arguments.models)
        return
    sections = arguments.only.split(",")
    for path in arguments.models:
        if not path.is_file():
            parser.error(f"{path} is not a file")
    if unknown := [name for name in sections if name not in SECTIONS]:
        parser.error(f"there is no section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    devices = gpus()
    if not devices and not arguments.without_gpu:
        parser.error(
            "llama.cpp sees no GPU here. If there is one, `localllm gpu install` installs the build for it; "
            "--without-gpu measures on the processor"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + 60 * arguments.minutes
    with arguments.output.open("w", encoding="utf-8") as report:

        def tell(text: str) -> None:
            for stream in (sys.stdout, report):
                stream.write(text)
                stream.flush()

        found = ", ".join(f"{gpu.name} {gpu.description}, {gpu.free_bytes // MIB:,} MiB free" for gpu in devices)
        tell(f"GPUs: {found or 'none'}. {usable_processors()} processors, load {os.getloadavg()[0]:.1f}.\n")
        # By section, then by model: the sections about GPUs come first, since the processor's take longest.
        for name in sections:
            for paths in [arguments.models] if name in ONCE else [[path] for path in arguments.models]:
                left = deadline - time.monotonic()
                tell(f"\n## {name}, {', '.join(path.stem for path in paths)}\n\n")
                if left < _LEAST_SECONDS:
                    tell("(left out: the time is over)\n")
                else:
                    run_section(name, paths, left, tell)


if __name__ == "__main__":
    main()
