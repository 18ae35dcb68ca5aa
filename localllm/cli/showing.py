"""What `localllm show` does: reads a model's header and describes it."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from textwrap import indent

from gguf_io import open_model
from gguf_io.metadata import Metadata, Value
from localllm.front.terminal import answer
from localllm.library.entry import ManifestDefaults
from localllm.library.lookup import find
from localllm.library.summary import FileSummary, summarize
from localllm.placement.backends import loaded_projector, native_kv_types
from localllm.placement.memory import memory_of
from localllm.settings import load_settings
from localllm.text import human_bytes, human_count, table
from models.needs import Needs

MAX_SHOWN_ITEMS = 16
MAX_SHOWN_CHARS = 100


def show_model(model: str, as_json: bool) -> None:
    """Print the description of a model. Raises LibraryError for an unknown one."""
    settings = load_settings({})
    found = find(model, settings)
    defaults = found.defaults() if found.manifest is not None else None
    with open_model(found.path) as file:
        projector = loaded_projector(file, settings.mmproj, found.projectors())
        summary, types = summarize(file), native_kv_types(file, settings.kv_types)
        needs = memory_of(file, types, projector)
        if as_json:
            shown = _as_object(summary, needs, types, file.metadata) | (
                {"defaults": asdict(defaults)} if defaults else {}
            )
            answer(json.dumps(shown, ensure_ascii=False, default=str) + "\n")
        else:
            answer("\n".join([*_as_text(summary, needs, types, file.metadata), *_defaults(defaults)]) + "\n")


def _as_object(
    summary: FileSummary, needs: Needs | None, kv_types: tuple[str, str], metadata: Metadata
) -> dict[str, object]:
    return asdict(summary) | {
        "kv_types": kv_types,
        "weights_bytes": needs and needs.weights,
        "buffers_bytes": needs and needs.buffers,
        "kv_bytes_per_token": needs and needs.kv_per_token,
        "window_bytes_per_token": needs and needs.window_per_token,
        "window_tokens": needs and needs.window_tokens,
        "state_bytes": needs and needs.states(0),
        "memory_bytes": needs and needs.total(summary.context or 0),
        "metadata": {key: _json_value(value) for key, value in metadata.items()},
    }


def _json_value(value: Value) -> object:
    """A metadata value for JSON: long arrays become their length, infinities and NaN become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool):
        return value
    return list(value) if len(value) <= MAX_SHOWN_ITEMS else {"items": len(value)}


def _as_text(summary: FileSummary, needs: Needs | None, kv_types: tuple[str, str], metadata: Metadata) -> Iterator[str]:
    parameters = f"{human_count(summary.parameters)} parameters"
    yield f"{summary.name}: {summary.architecture}, {parameters}, {summary.quantization}"
    yield from summary.notes
    yield ""
    yield from _table(
        ("file", human_bytes(summary.file_bytes)),
        ("context", _known(summary.context, " tokens")),
        ("vocabulary", _known(summary.vocabulary, " tokens")),
        ("layers", _known(summary.layers)),
        ("width", _known(summary.width)),
        ("heads", _known(summary.heads)),
        ("chat template", f"{len(summary.chat_template)} characters" if summary.chat_template else "none"),
    )
    yield "\nTensors"
    yield from _table(
        *((group.type, f"{group.tensors:>5}  {human_bytes(group.bytes)}") for group in summary.tensor_groups)
    )
    yield "\nMemory needed"
    yield from _table(*_memory(needs, kv_types, summary.context))
    yield "\nMetadata"
    yield from _table(*((key, _short(value)) for key, value in metadata.items() if key != "tokenizer.chat_template"))
    if summary.chat_template:
        yield f"\nChat template\n{summary.chat_template}"


def _defaults(defaults: ManifestDefaults | None) -> Iterator[str]:
    """What a manifest (Ollama's or our own) adds to the file."""
    if defaults is None:
        return
    if defaults.parameters:
        yield "\nParameters"
        yield from _table(*((name, str(value)) for name, value in defaults.parameters.items()))
    texts = (
        ("System", defaults.system),
        ("Template", defaults.template),
        *(("License", text) for text in defaults.licenses),
    )
    for title, text in texts:
        if text:
            yield f"\n{title}\n{text}"
    if defaults.messages:
        yield "\nMessages"
        yield from _table(*((message["role"], _short(message["content"])) for message in defaults.messages))


def _memory(needs: Needs | None, kv_types: tuple[str, str], context: int | None) -> Iterator[tuple[str, str]]:
    if needs is None:
        yield "keys and values", "unknown for this architecture"
        return
    yield "weights", human_bytes(needs.weights)
    yield "buffers", human_bytes(needs.buffers)
    keys, values = kv_types
    types = keys if keys == values else f"{keys} and {values}"
    yield "keys and values", f"{human_bytes(needs.kv_per_token)} a token in {types}"
    if needs.window_tokens:
        of_windows = f"{human_bytes(needs.window_per_token)} for each of {needs.window_tokens} tokens at most"
        yield "of sliding windows", of_windows
    if states := needs.states(0):
        yield "states", human_bytes(states)
    if context:
        yield "together", f"{human_bytes(needs.total(context))} at {context} tokens"


def _table(*rows: tuple[str, str]) -> Iterator[str]:
    if rows:
        yield indent(table(rows).rstrip(), "  ")


def _known(number: int | None, unit: str = "") -> str:
    return "unknown" if number is None else f"{number}{unit}"


def _short(value: Value) -> str:
    if isinstance(value, str | int | float | bool):
        text = str(value).replace("\n", "\\n")
    elif len(value) <= MAX_SHOWN_ITEMS:
        text = ", ".join(map(str, value))
    else:
        text = f"[{len(value)} items]"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
