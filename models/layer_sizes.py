"""Sizes of a model's layers, read from a file: heads, latents, delta networks, and sizes that differ between layers."""

import math
from dataclasses import dataclass
from functools import cached_property

from cpu_kernels.kv_types import PAGE_TOKENS
from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from models.errors import TWO_SIZES, UnsupportedModelError

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_SIZE = 512
MAX_CONVOLUTION = PAGE_TOKENS + 1
"""A convolution reaches back at most one page."""
CONVOLUTION = "shortconv.l_cache"
ALL_FIRST = {"laguna": 4, "modern-bert": 3, "smallthinker": 4}
"""Architectures whose first layer of each period has no window, with the period to use if the file states none."""
_WITH_XIELU, _XIELU = ("apertus",), "xielu"  # the keys of its factors have no architecture prefix
# Default for Gemma 3n files that do not state it: all layers from this one on share keys and values.
_SHARED_FROM = {"gemma3n": 20}
ALL_COUNT = float("-inf")
"""The sparsity threshold that keeps every gate."""
# Likewise, sparse gates: the first ten layers keep the largest 5 %.
_SPARSE = {"gemma3n": (10, 1.6448533535003662)}
# Limits for attention on latents: values of a latent, and of a part of a head.
MAX_RANK = 4096
MAX_PART = 1024
LATENT_RANK, _QUERY_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
_TURNED = "rope.dimension_count"
_KEY, _VALUE = "attention.key_length", "attention.value_length"
# Tensors and keys of gated delta networks.
_BETA, _RECURRENT = (".ssm_beta.weight", ".ssm_ba.weight"), "attention.recurrent_layers"


@dataclass(frozen=True)
class Heads:
    """A layer's attention heads: query heads, key-value heads, values per head, and how many of those are rotated.

    latent: values of a latent, which precede the rotated ones; 0 if heads have keys and values of their own.
    """

    queries: int
    keys: int
    size: int
    rope_size: int
    latent: int = 0

    @cached_property
    def padded(self) -> int:
        """A head's values, padded so that each half fills whole vectors; a latent and its rotated part separately."""
        return _padded(self.latent) + self.padded_turned

    @property
    def padded_turned(self) -> int:
        """The same without the latent."""
        return _padded(self.size - self.latent)

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.queries // self.keys


def _padded(values: int) -> int:
    return -(-values // 32) * 32


def same_in_all_layers(file: ModelFile, key: str, maximum: int) -> int:
    """A number that the file states once, or once per layer. Raises UnsupportedModelError if layers differ."""
    values = set(in_each_layer(file, key, maximum, 1))
    if len(values) != 1:
        raise UnsupportedModelError(
            f"{file.path}: {key} differs between layers, which the native engine does not support.",
            remedy="Use --backend llama.",
        )
    return values.pop()


def in_each_layer(file: ModelFile, key: str, maximum: int, layers: int, minimum: int = 1) -> tuple[int, ...]:
    """A number for each layer, which the file states once or once per layer. Raises ModelFileError if out of range."""
    if not isinstance(file.metadata.get(key), MetadataArray):
        return (file.metadata.get_int(key, minimum=minimum, maximum=maximum),) * layers
    values = tuple(file.metadata.get_list(key, int))
    for value in values:
        if not minimum <= value <= maximum:
            raise ModelFileError(
                f"{file.path}: {key} is {value}, outside {minimum}..{maximum}. Use another version of the model."
            )
    if len(values) < layers:
        raise ModelFileError(
            f"{file.path}: {key} has {len(values)} numbers for {layers} layers. Use another version of the model."
        )
    return values


def slides_in_period(period: int, layer: int, all_first: bool = False) -> bool:
    """Whether a layer has a window if the first (all_first) or last layer of each period has none. 0: all have one."""
    return period == 0 or layer % period != (0 if all_first else period - 1)


def windowed_layers(file: ModelFile, window: int | None) -> tuple[bool, ...] | None:
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


def layer_heads(
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


def kv_layers(file: ModelFile, windowed: tuple[bool, ...] | None, layers: int) -> tuple[int, ...]:
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
    if f"{file.architecture}.{LATENT_RANK}" in file.metadata:
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
    convolves = f"{file.architecture}.{CONVOLUTION}" in file.metadata
    counts = in_each_layer(file, key, MAX_HEADS, layers, 0 if convolves or may_lack else 1)[:layers]
    if not any(counts):
        raise UnsupportedModelError(
            f"{file.path}: {key} gives no layer key-value heads, which the native engine needs.",
            remedy="Use --backend llama.",
        )
    return counts


def sparsity(file: ModelFile, layers: int) -> tuple[float, ...]:
    """For each layer, how many standard deviations above the mean a gate must be to be kept; -inf keeps all."""
    key = f"{file.architecture}.activation_sparsity_scale"
    if key in file.metadata:
        return tuple(file.metadata.get_list(key, float, length=layers))
    count, deviations = _SPARSE.get(file.architecture, (0, 0.0))
    return tuple(deviations if layer < count else ALL_COUNT for layer in range(layers))


def xielu(file: ModelFile, layers: int) -> tuple[tuple[float, ...], ...]:
    """Each layer's xIELU factors as cpu_kernels.activations takes them; empty if it is not the activation.

    Files state the factors once or once per layer; alphas are the softplus of the stated values. Raises ModelFileError
    for a key that is missing or not finite.
    """
    if file.architecture not in _WITH_XIELU:
        return ()
    stated = (_factors(file, name, layers) for name in ("alpha_n", "alpha_p", "beta", "eps"))
    return tuple((beta + _softplus(n), _softplus(p), beta, eps) for n, p, beta, eps in zip(*stated, strict=True))


def _factors(file: ModelFile, name: str, layers: int) -> list[float]:
    key = f"{_XIELU}.{name}"
    if not isinstance(file.metadata.get(key), MetadataArray):
        return [file.metadata.get_float(key)] * layers
    values = file.metadata.get_list(key, float, length=layers)
    if not all(map(math.isfinite, values)):
        raise ModelFileError(f"{file.path}: {key} has a value that is not a number. Use another version of the model.")
    return values


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@dataclass(frozen=True)
class Latents:
    """Sizes of attention on latents, in values: of what a token stores for all heads, and of the heads made from it.

    rank: the latent. query_rank: the latent that queries are made from, 0 if they are made from the row itself. plain,
    turned: the parts of a head's query and key without and with rotation; the rotated part is stored after the latent.
    value: a head's value.
    """

    rank: int
    query_rank: int
    plain: int
    turned: int
    value: int

    @property
    def stored(self) -> int:
        """Values that a token stores in a layer."""
        return self.rank + self.turned


def read_latents(file: ModelFile) -> Latents:
    """The sizes of latents of a file that states LATENT_RANK: others have keys and values of their own.

    Files come in two generations. Newer ones state the stored sizes as head sizes and the heads' own sizes under
    separate keys (`_mla`), and have one tensor of all heads' key matrices and one of their value matrices. Older ones
    state the heads' sizes and have both matrices in one tensor. The computation is the same.
    Raises ModelFileError for sizes that are missing or do not fit together.
    """
    metadata, name = file.metadata, file.architecture

    def size(key: str, maximum: int = MAX_PART) -> int:
        return metadata.get_int(f"{name}.{key}", minimum=1, maximum=maximum)

    generation = "_mla" if f"{name}.{_KEY}_mla" in metadata else ""
    key, turned = size(_KEY + generation), size(_TURNED)
    if turned % 2 or turned >= key:
        raise ModelFileError(
            f"{file.path}: {name}.{_TURNED} is {turned}, which must be an even number below the head size, {key}. "
            "Use another version of the model."
        )
    return Latents(
        rank=size(LATENT_RANK, MAX_RANK),
        query_rank=size(_QUERY_RANK, MAX_RANK) if "blk.0.attn_q_a.weight" in file.tensors else 0,
        plain=key - turned,
        turned=turned,
        value=size(_VALUE + generation),
    )


@dataclass(frozen=True)
class DeltaNetSizes:
    """Number of key (and query) heads and of value heads, values per head, and rows that the convolution reads."""

    key_heads: int
    value_heads: int
    head_size: int
    reach: int

    @property
    def padded(self) -> int:
        """A head's values rounded up to whole vectors."""
        return -(-self.head_size // 16) * 16

    @property
    def inner(self) -> int:
        """Values of an output row."""
        return self.value_heads * self.head_size

    @property
    def slot_parts(self) -> int:
        """Parts of a layer's slot, which are divided among threads."""
        return self.key_heads

    @property
    def part_bytes(self) -> int:
        """Bytes of one part of a layer's slot."""
        from cpu_kernels import delta_net  # most models have none

        return 4 * delta_net.head_floats(self.value_heads // self.key_heads, self.padded, self.reach)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that a thread needs."""
        from cpu_kernels import delta_net

        return delta_net.scratch_bytes(self.value_heads // self.key_heads, self.padded)


def delta_net_sizes(file: ModelFile) -> DeltaNetSizes | None:
    """Sizes of a file's gated delta networks (under the keys of state-space models), None if it has none.

    Raises ModelFileError for a missing or out-of-range key, UnsupportedModelError for sizes that do not fit together.
    """
    if not any(tensor.endswith(_BETA) for tensor in file.tensors):
        return None
    metadata, name = file.metadata, f"{file.architecture}.ssm"
    value_heads = metadata.get_int(f"{name}.time_step_rank", minimum=1, maximum=MAX_HEADS)
    key_heads = metadata.get_int(f"{name}.group_count", minimum=1, maximum=MAX_HEADS)
    size = metadata.get_int(f"{name}.state_size", minimum=2, maximum=MAX_HEAD_SIZE)
    inner = metadata.get_int(f"{name}.inner_size", minimum=1, maximum=MAX_WIDTH)
    if value_heads % key_heads or inner != value_heads * size:
        raise UnsupportedModelError(
            f"{file.path}: {key_heads} heads of keys and {value_heads} of values, of {size} each, do not make a gated "
            f"delta network of {inner} values.",
            remedy="Use --backend llama.",
        )
    reach = metadata.get_int(f"{name}.conv_kernel", minimum=2, maximum=MAX_CONVOLUTION)
    return DeltaNetSizes(key_heads, value_heads, size, reach)


def attending_layers(file: ModelFile, layers: int) -> tuple[bool, ...]:
    """Which layers of a model with gated delta networks have attention: every fourth, unless the file says otherwise.

    Raises UnsupportedModelError if none has.
    """
    metadata, name = file.metadata, file.architecture
    if f"{name}.{_RECURRENT}" in metadata:
        blocks = metadata.get_int(f"{name}.block_count", minimum=1, maximum=MAX_LAYERS)
        recurrent = metadata.get_list(f"{name}.{_RECURRENT}", bool, length=blocks)
        attends = tuple(not one for one in recurrent[:layers])
    else:
        period = metadata.get_int(f"{name}.full_attention_interval", 4, minimum=1, maximum=MAX_LAYERS)
        attends = tuple((layer + 1) % period == 0 for layer in range(layers))
    if not any(attends):
        raise UnsupportedModelError(f"{file.path}: no layer has attention.", remedy="Use --backend llama.")
    return attends
