"""What every list tells of a model's file, in Ollama's words."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from gguf_io import open_model
from localllm.library.listing import file_type
from localllm.server.catalog import facts_of
from localllm.text import human_count


def details_of(path: Path) -> dict[str, Any]:
    """The `details` of a model, read from its header."""
    summary = facts_of(path).summary
    return {
        "parent_model": "",
        "format": "gguf",
        "family": summary.architecture,
        "families": [summary.architecture],
        "parameter_size": human_count(summary.parameters).replace(" ", ""),
        "quantization_level": _quantization(path, path.stat().st_mtime_ns),
        "context_length": summary.context or 0,
        "embedding_length": summary.width or 0,
    }


def told_of(path: Path) -> dict[str, Any]:
    """What every list tells of a model's file. Raises ModelFileError and its kin."""
    facts = facts_of(path)
    return {"size": facts.summary.file_bytes, "digest": facts.digest, "details": details_of(path)}


@lru_cache(maxsize=256)
def _quantization(path: Path, _changed: int) -> str:
    """The name of `general.file_type`, or the block format that holds most bytes."""
    with open_model(path) as file:
        return file_type(file) or facts_of(path).summary.quantization
