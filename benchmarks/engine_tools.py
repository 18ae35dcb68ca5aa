"""Shared code of the engine's benchmarks: loading, one request, text of a given length, tables."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gguf_io import load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams, TokenEvent
from models.native_runner import NativeRunner

GREEDY = SamplingParams(temperature=0)
KV_BYTES = 2 * 2**30
SETTLED_S = 1.0
"""Seconds after which llama.cpp's threads, and ours, no longer spin for more work."""


class Served(NamedTuple):
    """A model on the native engine, which is running."""

    engine: Engine
    tokenizer: Tokenizer


def serve(path: Path, threads: int | None = None, folder: Path | None = None, **options: Any) -> Served:
    """Load a model. folder: of the disk tier, None for no disk tier. options: the engine's."""
    with open_model(path) as file:
        tokenizer = load_tokenizer(file)
        runner = NativeRunner(file, kv_bytes=KV_BYTES, threads=threads)
    disk = DiskCache(folder, runner.info.kv_layout) if folder else None
    engine = Engine(runner, tokenizer, disk=disk, **options)
    engine.start()
    return Served(engine, tokenizer)


def ask(engine: Engine, prompt: Sequence[int], max_tokens: int, **others: Any) -> TokenEvent:
    """The last event of a greedy answer."""
    return answer(engine, prompt, max_tokens, **others)[0]


def answer(engine: Engine, prompt: Sequence[int], max_tokens: int, **others: Any) -> tuple[TokenEvent, tuple[int, ...]]:
    """The last event and the tokens of a greedy answer."""
    request = GenerationRequest(tuple(prompt), GREEDY, max_tokens=max_tokens, ignore_eos=True, **others)
    done = engine.submit(request).collect()
    return done.last, done.token_ids


def text_tokens(tokenizer: Tokenizer, text: str, count: int, start: int = 0) -> tuple[int, ...]:
    """The first `count` tokens of a text from character `start` on. Raises ValueError if it is too short."""
    tokens = tokenizer.encode(text[start : start + 12 * count], add_special=False)
    if len(tokens) < count:
        raise ValueError("the text is too short")
    return tuple(tokens[:count])


def medians(rounds: int, subjects: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Run the subjects in turn, `rounds` rounds after a warm-up round; return the median of each."""
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for at in range(rounds + 1):
        for name, subject in subjects.items():
            figure = subject()
            if at:
                figures[name].append(figure)
    return {name: statistics.median(values) for name, values in figures.items()}


def chosen_clock(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Callable[[], float]:
    """The clock that --processor-time selects. Exits with an error if it is used with --threads other than 1."""
    if arguments.processor_time and arguments.threads not in (1, [1]):
        parser.error("--processor-time needs --threads 1: threads that wait take time, too")
    return time.process_time if arguments.processor_time else time.monotonic


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest value that `share` of the values do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table, floats with three significant digits."""
    cells = [list(headings), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(headings))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    sys.stdout.write("\n".join(lines) + "\n\n")
    sys.stdout.flush()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
