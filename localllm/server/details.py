"""What a model's file says of it, in Ollama's words, and what requests may ask of it."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from gguf_io import ModelFile, load_chat_template, load_tokenizer, open_model
from gguf_io.metadata import MetadataArray
from gpu_offload.reranker import is_reranker
from localllm.answer.local import can_think
from localllm.cli.terminal import human_count
from localllm.engine.backends import choose_backend
from localllm.engine.projectors import projector_of
from localllm.library.listing import file_type
from localllm.server.catalog import CatalogEntry, facts_of, with_files
from localllm.server.served import ModelAbout
from localllm.settings import Settings


def about(entry: CatalogEntry) -> ModelAbout:
    """What lists say of a model. Raises ModelFileError and its kin."""
    path = entry.path
    facts = facts_of(path)
    status = path.stat()
    return ModelAbout(
        name=entry.name,
        created=int(status.st_mtime),
        modified=entry.modified_at,
        digest=facts.digest,
        size=facts.summary.file_bytes,
        family=facts.summary.architecture,
        parameters=human_count(facts.summary.parameters).replace(" ", ""),
        quantization=_quantization(path, status.st_mtime_ns),
        context=facts.summary.context or 0,
        width=facts.summary.width or 0,
    )


def capabilities_of(entry: CatalogEntry, projector: Path | None) -> list[str]:
    """What requests may ask of a model: completion, embedding or reranking, and tools, thinking, insert, vision.

    Read from its file and its template once, as long as the file does not change. Raises ModelFileError and its kin.
    """
    found = _capabilities(entry.path, entry.path.stat().st_mtime_ns, entry.behaviour.template)
    return [*found, *(["vision"] if projector and "completion" in found else [])]


def projector_for(entry: CatalogEntry, settings: Settings) -> Path | None:
    """The file that lets a model see; None where there is none, or llama.cpp does not compute the model.

    Raises RequestError for a named one that is missing.
    """
    if settings.backend == "native":
        return None
    path = entry.path
    changed = path.stat().st_mtime_ns, path.parent.stat().st_mtime_ns
    return _projector(path, changed, with_files(settings, entry))


def model_info(path: Path, verbose: bool) -> dict[str, Any]:
    """The file's metadata; arrays, such as the vocabulary, are null unless verbose."""
    with open_model(path) as file:
        return {
            **{key: _json(value, verbose) for key, value in file.metadata.items() if key != "tokenizer.chat_template"},
            "general.parameter_count": file.parameter_count,
        }


def tensors_of(path: Path) -> list[dict[str, Any]]:
    """Every tensor's name, type and shape, which counts from the innermost dimension, as files do."""
    with open_model(path) as file:
        return [
            {"name": name, "type": tensor.type.name, "shape": list(reversed(tensor.shape))}
            for name, tensor in file.tensors.items()
        ]


def embeds_only(file: ModelFile) -> bool:
    """Whether a file says how its vectors are pooled, which only embedding models do."""
    return f"{file.architecture}.pooling_type" in file.metadata


def _json(value: Any, verbose: bool) -> Any:
    if isinstance(value, MetadataArray):
        return [_json(item, verbose) for item in value] if verbose else None
    if isinstance(value, float) and not abs(value) < float("inf"):  # JSON has no infinity and no NaN
        return str(value)
    return value


@lru_cache(maxsize=256)
def _quantization(path: Path, _changed: int) -> str:
    """The name of `general.file_type`, or the block format that holds most bytes."""
    with open_model(path) as file:
        return file_type(file) or facts_of(path).summary.quantization


@lru_cache(maxsize=256)
def _capabilities(path: Path, _changed: int, template_source: str | None) -> tuple[str, ...]:
    with open_model(path) as file:
        if is_reranker(file):
            return ("reranking",)
        if embeds_only(file):
            return ("embedding",)
        template, tokenizer = load_chat_template(file, template_source), load_tokenizer(file)
        found = {
            "completion": True,
            "tools": template.supports_tools,
            "thinking": can_think(template),
            "insert": None not in (tokenizer.fim_prefix_id, tokenizer.fim_suffix_id, tokenizer.fim_middle_id),
        }
    return tuple(name for name, has in found.items() if has)


@lru_cache(maxsize=256)
def _projector(path: Path, _changed: tuple[int, int], settings: Settings) -> Path | None:
    with open_model(path) as file:
        found = projector_of(file, settings)
        return found if found and choose_backend(file, settings).backend == "llama" else None
