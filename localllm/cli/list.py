"""localllm list: the models on this machine."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from localllm.cli.options import AsJson, Debug
from localllm.cli.terminal import answer, note
from localllm.text import human_bytes, human_count, table

if TYPE_CHECKING:
    from localllm.library.listing import Listed

HEADINGS = ("NAME", "SIZE", "QUANTISATION", "PARAMETERS", "CONTEXT", "SOURCE", "FITS")


def list_models(as_json: AsJson = False, debug: Debug = False) -> None:
    """List the models on this machine. The built-in one, our own, Ollama's, Hugging Face's, LM Studio's, llama.cpp's.

    Every name can be given wherever a model is asked for. FITS says whether the memory that is free now is enough.
    """
    from localllm.library.entry import Source
    from localllm.library.listing import describe
    from localllm.library.lookup import all_models
    from localllm.settings import load_settings

    rows = [describe(model) for model in all_models(load_settings({}))]
    if as_json:
        answer(json.dumps([asdict(row) for row in rows], ensure_ascii=False) + "\n")
        return
    answer(table([HEADINGS, *map(_cells, rows)]))
    if all(row.source == Source.BUILT_IN for row in rows):
        note("This one is for demonstration alone. `localllm pull qwen3:0.6b` gets a small one that is of use.")


def _cells(row: "Listed") -> tuple[str, ...]:
    if row.problem is not None:
        return row.name, "-", "-", "-", "-", row.source, f"cannot be read: {row.problem}"
    return (
        row.name,
        "-" if row.size is None else human_bytes(row.size),
        row.quantization or "-",
        "-" if row.parameters is None else human_count(row.parameters),
        "-" if row.context is None else str(row.context),
        row.source,
        {True: "yes", False: "no", None: "unknown"}[row.fits],
    )
