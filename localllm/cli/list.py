"""localllm list: the models on this machine."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from localllm.front.options import AsJson
from localllm.front.terminal import answer, note
from localllm.settings import load_settings
from localllm.text import human_bytes, human_count, human_speed, table

if TYPE_CHECKING:
    from localllm.library.listing import Listed

HEADINGS = ("NAME", "SIZE", "QUANTISATION", "PARAMETERS", "CONTEXT", "SOURCE", "MEMORY", "FITS", "TOK/S")


def list_models(as_json: AsJson = False) -> None:
    """List the models on this machine. Built-in, our own, Ollama's, Hugging Face's, LM Studio's, llama.cpp's.

    Each name works in every command. MEMORY is for the model and a conversation of 4096 tokens; FITS says whether that
    much is free now. TOK/S is the expected speed on the CPU engine, if `localllm bench` has measured this machine.
    """
    from localllm.choices import described
    from localllm.library.entry import Source
    from localllm.library.lookup import all_models

    settings = load_settings({})
    rows = described(all_models(settings), settings.threads, settings.mmproj)
    if as_json:
        answer(json.dumps([asdict(row) for row in rows], ensure_ascii=False) + "\n")
        return
    answer(table([HEADINGS, *map(_cells, rows)]))
    if all(row.source == Source.BUILT_IN for row in rows):
        note("This is only a demonstration model. `localllm pull qwen3:0.6b` downloads a small useful one.")


def _cells(row: "Listed") -> tuple[str, ...]:
    if row.problem is not None:
        return row.name, "-", "-", "-", "-", row.source, "-", f"cannot be read: {row.problem}", "-"
    return (
        row.name,
        "-" if row.size is None else human_bytes(row.size),
        row.quantization or "-",
        "-" if row.parameters is None else human_count(row.parameters),
        "-" if row.context is None else str(row.context),
        row.source,
        "-" if row.memory is None else human_bytes(row.memory),
        {True: "yes", False: "no", None: "unknown"}[row.fits],
        "-" if row.speed is None else human_speed(row.speed),
    )
