"""What a model file is, in the words that people choose a model by."""

from collections import Counter
from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.metadata import MetadataArray
from localllm.memory import kv_bytes_in_file, state_bytes_in_file


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """All tensors of one block format."""

    type: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model file in short. Sizes are bytes, lengths tokens; None where the file does not say.

    quantization is the block format that holds most bytes. kv_bytes_per_token counts keys and values of all layers, in
    the types of kv_types, state_bytes the states of one sequence. notes: ModelFile's, on a file in another program's
    layout.
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
    weights_bytes: int
    kv_types: tuple[str, str]
    kv_bytes_per_token: int | None
    state_bytes: int = 0
    notes: tuple[str, ...] = ()

    def memory_bytes(self, context: int) -> int | None:
        """Weights, a sequence's states, and the keys and values of so many tokens."""
        if self.kv_bytes_per_token is None:
            return None
        return self.weights_bytes + self.state_bytes + context * self.kv_bytes_per_token


def summarize(model: ModelFile, kv_types: tuple[str, str] = ("f16", "f16")) -> ModelSummary:
    """Read a summary from the header alone, for keys and values of these types.

    Raises ModelFileError where a key is of the wrong kind, RequestError where the model's heads do not fit the types.
    """
    groups = _tensor_groups(model)
    return ModelSummary(
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
        weights_bytes=model.weights_bytes,
        kv_types=kv_types,
        kv_bytes_per_token=_kv_bytes(model, kv_types),
        state_bytes=state_bytes_in_file(model) if _number(model, "block_count") else 0,
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
    """An architecture's own number. None where it is missing or differs from layer to layer."""
    key = f"{model.architecture}.{key}"
    value = model.metadata.get(key)
    return model.metadata.get_int(key) if isinstance(value, int) else None


def _kv_bytes(model: ModelFile, kv_types: tuple[str, str]) -> int | None:
    # A file of weights without layers (a vocabulary, a projector) stores no keys and values.
    return kv_bytes_in_file(model, kv_types) if _number(model, "block_count") else None
