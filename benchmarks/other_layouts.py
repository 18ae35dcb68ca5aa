"""The cost of loading a model in another program's layout with llama.cpp: the file mapped, read, and served.

    python -m benchmarks.other_layouts model.gguf --rounds 6

Served means that a header is generated and tensors are read through gpu_offload/loading.py, as for a file in one of
Ollama's layouts. It works on any file by regenerating its own header, so that all three load the same.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine_tools import table
from gguf_io import open_model
from gguf_io.layouts import Layout
from gguf_io.model_file import ModelFile
from gpu_offload.library import llama, muted
from gpu_offload.loading import model_params, open_handle
from gpu_offload.options import LlamaOptions


def _from_path(mode: int) -> Callable[[ModelFile, Any], Any]:
    def load(model: ModelFile, params: Any) -> Any:
        params.load_mode = mode
        return llama().llama_model_load_from_file(str(model.path).encode(), params)

    return load


def _served(model: ModelFile, params: Any) -> Any:
    header = model._parts[0].header
    model._layout = Layout(model.architecture, model.metadata, model.tensors, header.encoded, ())
    return open_handle(model, params)


def main() -> None:
    """Print seconds and processor seconds of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    library = llama()
    ways = {
        "mapped": _from_path(library.LLAMA_LOAD_MODE_MMAP),
        "read": _from_path(library.LLAMA_LOAD_MODE_NONE),
        "served": _served,
    }
    figures: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, load in ways.items():
            with open_model(arguments.model) as model, muted():
                wall, cpu = time.perf_counter(), time.process_time()
                handle = load(model, model_params(LlamaOptions(gpu_layers=0)))
                figures[way].append((time.perf_counter() - wall, time.process_time() - cpu))
                library.llama_model_free(handle)
    rows = []
    for way, pairs in figures.items():
        for what, times in zip(("wall", "processor"), zip(*pairs, strict=True), strict=True):
            rows.append((way, what, f"{median(times):.2f}", f"{min(times):.2f}"))
    table(("the file is", "seconds", "median", "least"), rows)


if __name__ == "__main__":
    main()
