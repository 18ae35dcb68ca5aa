"""Summarizes a model file by the properties that people choose a model by."""

from collections import Counter
from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.metadata import MetadataArray


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """All tensors of one block format."""

    type: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class FileSummary:
    """A summary of a model file. Sizes are bytes, lengths tokens; None if the file does not say.

    quantization: the block format with most bytes. notes: ModelFile's, about a file in another program's layout.
    """

    name: str
    architecture: str
    parameters: int
    quantization: str
    file_bytes: int
    context: int | None
    vocabulary: int | None
    layers: int | None
    width: int | None
    heads: int | None
    tensor_groups: tuple[TensorGroup, ...]
    chat_template: str | None
    notes: tuple[str, ...] = ()


def summarize(model: ModelFile) -> FileSummary:
    """Summarize from the header alone. Raises ModelFileError if a key has the wrong type."""
    groups = _tensor_groups(model)
    return FileSummary(
        name=model.name,
        architecture=model.architecture,
        parameters=model.parameter_count,
        quantization=groups[0].type if groups else "none",
        file_bytes=model.size_bytes,
        context=_number(model, "context_length"),
        vocabulary=_vocabulary(model),
        layers=_number(model, "block_count"),
        width=_number(model, "embedding_length"),
        heads=_number(model, "attention.head_count"),
        tensor_groups=groups,
        chat_template=model.metadata.get_str("tokenizer.chat_template", "") or None,
        notes=model.notes,
    )


def _tensor_groups(model: ModelFile) -> tuple[TensorGroup, ...]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in model.tensors.values():
        counts[tensor.type.name] += 1
        sizes[tensor.type.name] += tensor.nbytes
    return tuple(TensorGroup(name, counts[name], size) for name, size in sizes.most_common())


def _vocabulary(model: ModelFile) -> int | None:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, MetadataArray) else _number(model, "vocab_size")


def _number(model: ModelFile, key: str) -> int | None:
    """A number of the architecture's metadata. None if it is missing or differs per layer."""
    key = f"{model.architecture}.{key}"
    value = model.metadata.get(key)
    return model.metadata.get_int(key) if isinstance(value, int) else None
