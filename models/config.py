"""The sizes and constants of a model, read from a GGUF's metadata and checked before anything is allocated."""

import math
from dataclasses import dataclass

from cpu_kernels.kv_types import PAGE_TOKENS
from gguf_io import ModelFile
from gguf_io.errors import ModelFileError, shortened
from gguf_io.metadata import MetadataArray
from models.delta_sizes import DeltaNetSizes, attending_layers, delta_net_sizes
from models.errors import UnsupportedModelError
from models.refusals import refuse_unread

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_SIZE = 512
MAX_EXPERTS = 1024
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 24
MAX_ROPE_BASE = 1e12
_VOCABULARY = "tokenizer.ggml.tokens"
_EMBEDDING_TENSOR = "token_embd.weight"
_CONVOLUTION, _GATING = "shortconv.l_cache", "expert_gating_func"
_ROUTER, _EXPERTS, _SHARED_EXPERT = "ffn_gate_inp.weight", "ffn_up_exps.weight", "ffn_up_shexp.weight"
MAX_CONVOLUTION = PAGE_TOKENS + 1
"""A convolution reaches back by a page at most."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotation is stretched beyond the trained context. kind: none, linear, yarn or longrope (factor tensors).

    log_multiplier: how much of YaRN's sharpening the model has learnt to do without, 0 for none.
    """

    kind: str
    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    log_multiplier: float


@dataclass(frozen=True)
class StatedFactors:
    """Factors that a file states, None where it does not. What they mean is the architecture's affair."""

    embedding: float | None
    residual: float | None
    attention: float | None
    logits: float | None


@dataclass(frozen=True)
class QueryGrowth:
    """Queries are multiplied by 1 + scale * log(1 + floor(position / length))."""

    scale: float
    length: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in values, contexts in tokens.

    feed_forward: width of the dense network, or of each expert. shared_feed_forward: width of the shared expert, 0
    where there is none. dense_layers, dense_feed_forward: layers before the first that has experts, and their
    width. attends: for each layer, whether it has attention; others have a gated delta network (delta_net), or a
    short convolution over `convolution` tokens. gating, normalise_experts, expert_scale: what the file states of
    experts, in its numbers. rope_size: values of a head that are rotated. window_rope_base: rotation base of layers
    with a window, where the file states it. rope_finetuned: Granite's switch, whether heads are rotated at all.
    window, window_pattern (a period, or which layers), causal (whether rows see only those before them): None where
    not stated.
    """

    architecture: str
    layers: int
    embedding: int
    feed_forward: int
    shared_feed_forward: int
    dense_layers: int
    dense_feed_forward: int
    attends: tuple[bool, ...]
    convolution: int
    delta_net: DeltaNetSizes | None
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    epsilon: float
    rope_size: int
    rope_base: float
    rope_scaling: RopeScaling
    rope_finetuned: bool
    window_rope_base: float | None
    query_growth: QueryGrowth | None
    window: int | None
    window_pattern: int | tuple[bool, ...] | None
    factors: StatedFactors
    experts: int
    experts_used: int
    gating: int | None
    normalise_experts: bool
    expert_scale: float | None
    attention_cap: float | None
    logit_cap: float | None
    causal: bool | None

    @property
    def padded_head(self) -> int:
        """A head's values rounded up so that each half fills whole vectors."""
        return -(-self.head_size // 32) * 32

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads

    @property
    def longest(self) -> int:
        """Values of the longest row that goes into a product."""
        widths = self.feed_forward, self.shared_feed_forward, self.dense_feed_forward
        of_values = self.delta_net.value_heads * self.delta_net.head_size if self.delta_net else 0
        return max(self.embedding, *widths, self.heads * self.head_size, of_values)


def read_config(file: ModelFile) -> ModelConfig:
    """Read and check a model's configuration.

    Raises ModelFileError for a missing or absurd key, UnsupportedModelError for sizes that differ between layers.
    """
    metadata, name = file.metadata, file.architecture
    heads = _same_in_all_layers(file, f"{name}.attention.head_count", MAX_HEADS)
    kv_key = f"{name}.attention.head_count_kv"
    layers = _layers(file)
    kv_heads, attends = _kv_heads(file, kv_key, layers) if kv_key in metadata else (heads, (True,) * layers)
    delta_net = delta_net_sizes(file)
    if delta_net:
        attends = attending_layers(file, layers)
    embedding = metadata.get_int(f"{name}.embedding_length", minimum=1, maximum=MAX_WIDTH)
    if heads % kv_heads:
        raise UnsupportedModelError(f"{file.path}: {kv_key}: {heads} heads cannot share {kv_heads} key-value heads.")
    head_size = metadata.get_int(f"{name}.attention.key_length", embedding // heads, minimum=2, maximum=MAX_HEAD_SIZE)
    value_size = metadata.get_int(f"{name}.attention.value_length", head_size, minimum=2, maximum=MAX_HEAD_SIZE)
    if value_size != head_size or head_size % 2:
        raise UnsupportedModelError(
            f"{file.path}: heads of {head_size} (keys) and {value_size} (values): the native engine needs one even "
            f"size. Use --backend llama."
        )
    refuse_unread(file)
    context = metadata.get_int(f"{name}.context_length", minimum=1, maximum=MAX_CONTEXT)
    rope_size = metadata.get_int(f"{name}.rope.dimension_count", head_size, minimum=2, maximum=head_size)
    dense_layers = metadata.get_int(f"{name}.leading_dense_block_count", 0, maximum=layers)
    first = f"blk.{dense_layers}."
    experts = metadata.get_int(f"{name}.expert_count", 0, maximum=MAX_EXPERTS) if first + _ROUTER in file.tensors else 0
    width = _same_in_all_layers(file, f"{name}.feed_forward_length", MAX_WIDTH) if dense_layers or not experts else 0
    scaling = _rope_scaling(file, context)
    return ModelConfig(
        architecture=name,
        layers=layers,
        embedding=embedding,
        feed_forward=_expert_width(file, first + _EXPERTS) if experts else width,
        shared_feed_forward=_rows(file, first + _SHARED_EXPERT) if experts else 0,
        dense_layers=dense_layers if experts else layers,
        dense_feed_forward=width,
        attends=attends,
        convolution=0
        if all(attends) or delta_net
        else metadata.get_int(f"{name}.{_CONVOLUTION}", minimum=2, maximum=MAX_CONVOLUTION),
        delta_net=delta_net,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary=_vocabulary(file),
        context=context,
        epsilon=_epsilon(file),
        rope_size=rope_size,
        rope_base=_rope_base(file, head_size, scaling),
        rope_scaling=scaling,
        rope_finetuned=metadata.get_bool(f"{name}.rope.scaling.finetuned", True),
        window_rope_base=_window_rope_base(file, scaling),
        query_growth=_query_growth(file, scaling.original_context),
        window=_window(file),
        window_pattern=_window_pattern(file),
        factors=StatedFactors(
            embedding=_optional(file, "embedding_scale"),
            residual=_optional(file, "residual_scale"),
            attention=_optional(file, "attention.scale"),
            logits=_optional(file, "logit_scale"),
        ),
        experts=experts,
        experts_used=_experts_used(file, experts),
        gating=metadata.get_int(f"{name}.{_GATING}") if f"{name}.{_GATING}" in metadata else None,
        normalise_experts=metadata.get_bool(f"{name}.expert_weights_norm", False),
        expert_scale=_optional(file, "expert_weights_scale"),
        attention_cap=_optional(file, "attn_logit_softcapping"),
        logit_cap=_optional(file, "final_logit_softcapping"),
        causal=metadata.get_bool(f"{name}.attention.causal", True) if f"{name}.attention.causal" in metadata else None,
    )


def _same_in_all_layers(file: ModelFile, key: str, maximum: int) -> int:
    """A number that the file states once, or once per layer; it must be the same in all of them."""
    value = file.metadata.get(key)
    if not isinstance(value, MetadataArray):
        return file.metadata.get_int(key, minimum=1, maximum=maximum)
    values = set(file.metadata.get_list(key, int))
    if len(values) != 1:
        raise UnsupportedModelError(
            f"{file.path}: {key} differs between layers, which the native engine does not support. Use --backend llama."
        )
    if not 1 <= (only := values.pop()) <= maximum:
        raise ModelFileError(f"{file.path}: {key} is {only}, outside 1..{maximum}. Get another edition of the model.")
    return only


def _kv_heads(file: ModelFile, key: str, layers: int) -> tuple[int, tuple[bool, ...]]:
    """Key-value heads of the layers that have attention, and which those are: others state 0 heads."""
    stated = file.metadata.get_list(key, int) if isinstance(file.metadata.get(key), MetadataArray) else []
    if 0 not in stated or f"{file.architecture}.{_CONVOLUTION}" not in file.metadata:
        return _same_in_all_layers(file, key, MAX_HEADS), (True,) * layers
    attends = tuple(heads > 0 for heads in stated[:layers])
    counts = set(stated[:layers]) - {0}
    if len(attends) < layers or len(counts) != 1 or not 1 <= (only := counts.pop()) <= MAX_HEADS:
        raise UnsupportedModelError(
            f"{file.path}: {key} does not give each of {layers} layers either 0 heads or one number of heads that all "
            "the others share, which the native engine needs. Use --backend llama."
        )
    return only, attends


def _vocabulary(file: ModelFile) -> int:
    """Rows of the embedding, one per token. Like llama.cpp, a vocabulary of another size is refused.

    Otherwise there would be tokens without logits, or logits without a token.
    """
    rows, tokens = _rows(file, _EMBEDDING_TENSOR, required=True), file.metadata.get(_VOCABULARY)
    if isinstance(tokens, MetadataArray) and len(tokens) != rows:
        raise ModelFileError(
            f"{file.path}: {_EMBEDDING_TENSOR} has {rows} rows and {_VOCABULARY} has {len(tokens)} tokens. "
            "The file is damaged: download or convert it again."
        )
    return rows


def _expert_width(file: ModelFile, name: str) -> int:
    """Width of an expert's hidden layer, from the tensor: files state it by different keys, or not at all."""
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 3 or not 1 <= tensor.shape[1] <= MAX_WIDTH:
        raise UnsupportedModelError(
            f"{file.path}: the tensor {name} is missing or has an unusable shape. Get another edition of the model."
        )
    return tensor.shape[1]


def _experts_used(file: ModelFile, experts: int) -> int:
    key = f"{file.architecture}.expert_used_count"
    return _same_in_all_layers(file, key, experts) if experts and key in file.metadata else min(experts, 1)


def _layers(file: ModelFile) -> int:
    """Layers that are computed, without the multi-token-prediction layers behind them."""
    metadata, name = file.metadata, file.architecture
    layers = metadata.get_int(f"{name}.block_count", minimum=1, maximum=MAX_LAYERS)
    return layers - metadata.get_int(f"{name}.nextn_predict_layers", 0, maximum=layers - 1)


def _rows(file: ModelFile, name: str, *, required: bool = False) -> int:
    """Rows of a matrix, 0 where there is none."""
    tensor = file.tensors.get(name)
    if tensor is None and not required:
        return 0
    if tensor is None or len(tensor.shape) != 2 or not 1 <= tensor.shape[0] <= MAX_VOCABULARY:
        raise UnsupportedModelError(
            f"{file.path}: the tensor {name} is missing or has an unusable shape. Get another edition of the model."
        )
    return tensor.shape[0]


def _epsilon(file: ModelFile) -> float:
    """What norms add to a variance or a mean square: a file states one of two keys, by the kind of its norms."""
    of_mean_square, of_variance = (f"{file.architecture}.attention.layer_norm_{kind}epsilon" for kind in ("rms_", ""))
    key = of_variance if of_mean_square not in file.metadata and of_variance in file.metadata else of_mean_square
    return file.metadata.get_float(key, minimum=0.0, maximum=1.0)


def _window(file: ModelFile) -> int | None:
    key = f"{file.architecture}.attention.sliding_window"
    return file.metadata.get_int(key, maximum=MAX_CONTEXT) if key in file.metadata else None


def _window_pattern(file: ModelFile) -> int | tuple[bool, ...] | None:
    key = f"{file.architecture}.attention.sliding_window_pattern"
    if key not in file.metadata:
        return None
    if isinstance(file.metadata[key], int):
        return file.metadata.get_int(key, maximum=MAX_LAYERS)
    layers = file.metadata.get_int(f"{file.architecture}.block_count", minimum=1, maximum=MAX_LAYERS)
    return tuple(file.metadata.get_list(key, bool, length=layers))


def _rope_base(file: ModelFile, head_size: int, scaling: RopeScaling) -> float:
    """The base of the rotation; Hunyuan's files raise it by an NTK-aware `alpha`."""
    metadata, key = file.metadata, f"{file.architecture}.rope.freq_base"
    base = metadata.get_float(key, 10_000.0, minimum=1.0, maximum=MAX_ROPE_BASE)
    alpha = metadata.get_float(f"{file.architecture}.rope.scaling.alpha", 0.0, minimum=0.0, maximum=1e6)
    if alpha:
        base = base * alpha ** (head_size / (head_size - 2)) if head_size > 2 else math.inf
    return _checked_base(file, key, base, scaling)


def _window_rope_base(file: ModelFile, scaling: RopeScaling) -> float | None:
    base = _optional(file, "rope.freq_base_swa", MAX_ROPE_BASE)
    return None if base is None else _checked_base(file, f"{file.architecture}.rope.freq_base_swa", base, scaling)


def _checked_base(file: ModelFile, key: str, base: float, scaling: RopeScaling) -> float:
    """The base, if it is usable: YaRN divides by its logarithm."""
    if not math.isfinite(base) or base < 1.0 or (base == 1.0 and scaling.kind == "yarn"):
        raise ModelFileError(
            f"{file.path}: {key}: the rotation's base is {base:g}, which cannot be computed with. "
            "Get another edition of the model."
        )
    return base


def _query_growth(file: ModelFile, length: int) -> QueryGrowth | None:
    scale = _optional(file, "attention.temperature_scale")
    return QueryGrowth(scale, length) if scale else None


def _rope_scaling(file: ModelFile, context: int) -> RopeScaling:
    metadata, prefix = file.metadata, f"{file.architecture}.rope.scaling"
    kind = metadata.get_str(f"{prefix}.type", "none")
    factor = metadata.get_float(
        f"{prefix}.factor",
        metadata.get_float(f"{file.architecture}.rope.scale_linear", 1.0, minimum=0.0, maximum=1e6),
        minimum=0.0,
        maximum=1e6,
    )
    if f"{prefix}.type" not in metadata and factor not in (0.0, 1.0):
        kind = "linear"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(
            f"{file.path}: {prefix}.type is '{shortened(kind)}', which the native engine does not support."
        )
    return RopeScaling(
        kind=kind,
        factor=factor or 1.0,
        original_context=metadata.get_int(f"{prefix}.original_context_length", context, minimum=1, maximum=MAX_CONTEXT),
        attention_factor=metadata.get_float(f"{prefix}.attn_factor", 1.0, minimum=0.0, maximum=100.0),
        beta_fast=metadata.get_float(f"{prefix}.yarn_beta_fast", 32.0, minimum=1e-6, maximum=1e6),
        beta_slow=metadata.get_float(f"{prefix}.yarn_beta_slow", 1.0, minimum=1e-6, maximum=1e6),
        log_multiplier=metadata.get_float(f"{prefix}.yarn_log_multiplier", 0.0, minimum=0.0, maximum=100.0),
    )


def _optional(file: ModelFile, key: str, maximum: float = 1e6) -> float | None:
    key = f"{file.architecture}.{key}"
    return file.metadata.get_float(key, minimum=0.0, maximum=maximum) if key in file.metadata else None
