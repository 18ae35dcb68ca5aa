"""Sizes of attention: each layer's heads and window, and whose keys and values it reads."""

from dataclasses import dataclass
from functools import cached_property

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from models.errors import TWO_SIZES, UnsupportedModelError, refusal
from models.sizes import latents
from models.sizes.latents import Latents
from models.sizes.reading import (
    MAX_CONTEXT,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    in_each_layer,
    same_in_all_layers,
    stated_number,
    whole_vectors,
)

ALL_FIRST = {"laguna": 4, "modern-bert": 3, "smallthinker": 4}
"""Architectures whose first layer of each period has no window, with the period to use if the file states none."""
# Tokens of a chunk in architectures whose windows are chunks, if the file does not state them, as llama.cpp assumes.
_CHUNKS = {"llama4": 8192}
# Default for Gemma 3n files that do not state it: all layers from this one on share keys and values.
_SHARED_FROM = {"gemma3n": 20}


@dataclass(frozen=True)
class Heads:
    """A layer's attention heads: query heads, key-value heads, values per head, and how many of those are rotated.

    latent: values of a latent, which precede the rotated ones; 0 if heads have keys and values of their own. multiple:
    heads are padded to one of it; 16 only with keys and values in 16 bits.
    """

    queries: int
    keys: int
    size: int
    rope_size: int
    latent: int = 0
    multiple: int = 32

    @cached_property
    def padded(self) -> int:
        """A head's values, padded to whole vectors; a latent and its rotated part separately."""
        return whole_vectors(self.latent, 32) + self.padded_turned

    @property
    def padded_turned(self) -> int:
        """The same without the latent."""
        return whole_vectors(self.size - self.latent, self.multiple)

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.queries // self.keys


@dataclass(frozen=True)
class AttentionSizes:
    """Of all layers."""

    # The heads of layers without a window.
    usual: Heads
    # Whether each layer has attention.
    attends: tuple[bool, ...]
    # Each layer's heads; those of a layer without attention do not matter.
    layer_heads: tuple[Heads, ...]
    # For each layer, the layer whose keys and values it reads: itself, or an earlier one.
    kv_layers: tuple[int, ...]
    # None if heads have keys and values of their own; else there is one key-value head, of the size that a token
    # stores.
    latents: Latents | None
    # window, windowed, cap, causal: None if not stated. window: or chunk. windowed: whether each layer has a window.
    window: int | None
    windowed: tuple[bool, ...] | None
    cap: float | None
    # Whether rows see only themselves and those before.
    causal: bool | None


def read(
    file: ModelFile, query_heads: tuple[int, ...], kv_heads: tuple[int, ...], attends: tuple[bool, ...], embedding: int
) -> AttentionSizes:
    """Read the sizes. query_heads, kv_heads: of each layer, from the functions of that name.

    Raises ModelFileError for a missing or out-of-range key, UnsupportedModelError for heads that do not fit together.
    """
    metadata, name, heads = file.metadata, file.architecture, max(query_heads)
    of_latents = latents.read(file) if latents.stated(file) else None
    if of_latents:
        kv_heads = (1,) * len(kv_heads)
    size = of_latents.stored if of_latents else _head_size(file, embedding // heads if heads else 2)
    rank, turned = of_latents.rank if of_latents else 0, _rope_size(file, size)
    usual = Heads(max(heads, 1), next(filter(None, kv_heads), 1), size, turned, rank)
    window = _window(file)
    windowed, causal = _windowed_layers(file, window), f"{name}.attention.causal"
    return AttentionSizes(
        usual=usual,
        attends=attends,
        layer_heads=_layer_heads(file, usual, query_heads, kv_heads, windowed),
        kv_layers=_kv_layers(file, windowed, len(attends)),
        latents=of_latents,
        window=window,
        windowed=windowed,
        cap=stated_number(file, "attn_logit_softcapping"),
        causal=metadata.get_bool(causal, True) if causal in metadata else None,
    )


def _head_size(file: ModelFile, default: int) -> int:
    """The head size of keys and values, which must be the same and even. Raises UnsupportedModelError."""
    metadata, prefix = file.metadata, f"{file.architecture}.attention"
    size = metadata.get_int(f"{prefix}.key_length", default, minimum=2, maximum=MAX_HEAD_SIZE)
    value_size = metadata.get_int(f"{prefix}.value_length", size, minimum=2, maximum=MAX_HEAD_SIZE)
    if value_size != size or size % 2:
        raise UnsupportedModelError(
            f"{file.path}: heads of {size} (keys) and {value_size} (values): the native engine needs one even size.",
            remedy="Use --backend llama.",
        )
    return size


def _rope_size(file: ModelFile, head_size: int) -> int:
    """The values of a head that are rotated, in pairs. Raises ModelFileError for an odd number."""
    key = f"{file.architecture}.rope.dimension_count"
    size = file.metadata.get_int(key, head_size, minimum=2, maximum=head_size)
    if size % 2:
        raise ModelFileError(f"{file.path}: {key} is {size}, which must be even. Use another version of the model.")
    return size


def _window(file: ModelFile) -> int | None:
    """The width of windows that the file states, or the size of chunks.

    Raises UnsupportedModelError if layers that usually have chunks have none.
    """
    metadata, name = file.metadata, file.architecture
    key = f"{name}.attention.sliding_window"
    if name not in _CHUNKS:
        return metadata.get_int(key, maximum=MAX_CONTEXT) if key in metadata else None
    if metadata.get(key) == 0:
        raise refusal(file, f"{key} is 0: attention without chunks")
    return metadata.get_int(f"{name}.attention.chunk_size", _CHUNKS[name], minimum=1, maximum=MAX_CONTEXT)


def slides_in_period(period: int, layer: int, all_first: bool = False) -> bool:
    """Whether a layer has a window if the first (all_first) or last layer of each period has none. 0: all have one."""
    return period == 0 or layer % period != (0 if all_first else period - 1)


def _windowed_layers(file: ModelFile, window: int | None) -> tuple[bool, ...] | None:
    """Which layers have a window, those for multi-token prediction included; None if the file does not say.

    window: the width that the file states. Files state a period, or a flag per layer.
    """
    metadata, name = file.metadata, file.architecture
    key, default = f"{name}.attention.sliding_window_pattern", ALL_FIRST.get(name) if window else None
    if key not in metadata and default is None:
        return None
    layers = metadata.get_int(f"{name}.block_count", minimum=1, maximum=MAX_LAYERS)
    if not isinstance(metadata.get(key, 0), int):
        return tuple(metadata.get_list(key, bool, length=layers))
    period = metadata.get_int(key, default, maximum=MAX_LAYERS)
    return tuple(slides_in_period(period, layer, name in ALL_FIRST) for layer in range(layers))


def _layer_heads(
    file: ModelFile,
    heads: Heads,
    query_heads: tuple[int, ...],
    kv_heads: tuple[int, ...],
    windowed: tuple[bool, ...] | None,
) -> tuple[Heads, ...]:
    """Each layer's heads. heads: of a layer without a window. kv_heads: of each layer, 0 if it has no attention.

    Raises UnsupportedModelError if heads do not fit together.
    """
    metadata, name = file.metadata, file.architecture
    size, turned = heads.size, heads.rope_size
    if name not in TWO_SIZES or windowed is None:
        windowed = (False,) * len(kv_heads)
    else:
        size = metadata.get_int(f"{name}.attention.key_length_swa", size, minimum=2, maximum=MAX_HEAD_SIZE)
        values = metadata.get_int(f"{name}.attention.value_length_swa", size, minimum=2, maximum=MAX_HEAD_SIZE)
        turned = metadata.get_int(f"{name}.rope.dimension_count_swa", min(turned, size), minimum=2, maximum=size)
        if values != size or size % 2 or turned % 2:
            raise UnsupportedModelError(
                f"{file.path}: heads of {size} (keys) and {values} (values) in layers with a window, of which {turned} "
                "are rotated: the native engine needs one even size.",
                remedy="Use --backend llama.",
            )
    found = []
    for layer, (count, stated) in enumerate(zip(query_heads, kv_heads, strict=True)):
        queries, keys = count or heads.queries, stated or heads.keys
        if queries % keys:
            raise UnsupportedModelError(
                f"{file.path}: {name}.attention.head_count_kv: {queries} heads of layer {layer} cannot share "
                f"{keys} key-value heads."
            )
        of_layer = (size, turned) if windowed[layer] else (heads.size, heads.rope_size)
        found.append(Heads(queries, keys, *of_layer, heads.latent))
    return tuple(found)


def _kv_layers(file: ModelFile, windowed: tuple[bool, ...] | None, layers: int) -> tuple[int, ...]:
    """For each layer, the layer whose keys and values it reads.

    Sharing layers, the last ones, read those of the last layer of their kind (with or without a window) that does not
    share. Raises UnsupportedModelError or ModelFileError if that layer cannot be determined.
    """
    key = f"{file.architecture}.attention.shared_kv_layers"
    default = max(0, layers - _SHARED_FROM.get(file.architecture, layers))
    shared = file.metadata.get_int(key, default, maximum=layers - 1)
    own = layers - shared
    if shared and windowed is None:
        raise UnsupportedModelError(
            f"{file.path}: {file.architecture}.attention.sliding_window_pattern does not say which layers have a "
            "window, which the native engine needs to know of layers that share keys and values.",
            remedy="Use --backend llama.",
        )
    found = list(range(own))
    for layer in range(own, layers):
        alike = [other for other in range(own) if windowed and windowed[other] == windowed[layer]]
        if not alike:
            raise ModelFileError(
                f"{file.path}: {key} is {shared}, and layer {layer} finds no layer to share keys and values with. "
                "Use another version of the model."
            )
        found.append(alike[-1])
    return tuple(found)


def query_heads(file: ModelFile, layers: int, *, may_lack: bool) -> tuple[int, ...]:
    """Query heads of each layer. may_lack: layers may have 0. With latents, all layers must have the same number."""
    key = f"{file.architecture}.attention.head_count"
    if may_lack and file.metadata.get(key, 0) == 0:
        return (0,) * layers
    if latents.stated(file):
        return (same_in_all_layers(file, key, MAX_HEADS),) * layers
    return in_each_layer(file, key, MAX_HEADS, layers, 0 if may_lack else 1)[:layers]


def kv_heads(file: ModelFile, heads: tuple[int, ...], *, may_lack: bool) -> tuple[int, ...]:
    """Key-value heads of each layer, 0 for a layer without attention. may_lack: layers may have 0.

    heads: query heads of each layer; if all are 0, no layer has attention. Raises UnsupportedModelError if there are
    query heads and no layer has key-value heads.
    """
    key = f"{file.architecture}.attention.head_count_kv"
    if key not in file.metadata or not any(heads):
        return heads
    layers = len(heads)
    counts = in_each_layer(file, key, MAX_HEADS, layers, 0 if may_lack else 1)[:layers]
    if not any(counts):
        raise UnsupportedModelError(
            f"{file.path}: {key} gives no layer key-value heads, which the native engine needs.",
            remedy="Use --backend llama.",
        )
    return counts
