"""The sizes and constants of a model, read from a GGUF's metadata and checked before anything is allocated."""

from dataclasses import dataclass, replace

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from models import expert_sizes, layer_sizes
from models.errors import SECTIONS, UnsupportedModelError, integers, refusal, refuse_unread
from models.layer_sizes import (
    CONVOLUTION,
    LATENT_RANK,
    MAX_CONVOLUTION,
    MAX_HEAD_SIZE,
    MAX_LAYERS,
    MAX_WIDTH,
    DeltaNetSizes,
    Heads,
    Latents,
    attending_layers,
    delta_net_sizes,
    in_each_layer,
    read_latents,
)
from models.rope_config import (
    MAX_CONTEXT,
    QueryGrowth,
    RopeScaling,
    query_growth,
    rope_base,
    rope_scaling,
    stated_number,
    window_rope_base,
)
from models.scan_sizes import ALONE, SCANS, ScanSizes, scan_sizes, scanning_layers

MAX_VOCABULARY = 1 << 22
_LEAST_FACTOR = 1e-6
_VOCABULARY = "tokenizer.ggml.tokens"
_EMBEDDING_TENSOR = "token_embd.weight"
_GATING = "expert_gating_func"
_SHARED_EXPERT, _DENSE, _LATENT = "ffn_up_shexp.weight", "ffn_up.weight", "ffn_latent_down.weight"
_PER_LAYER_NORM, _STREAMS = "per_layer_proj_norm.weight", "altup_proj.weight"


@dataclass(frozen=True)
class StatedFactors:
    """Factors that a file states, None for those it does not. Each architecture defines what they mean."""

    embedding: float | None
    residual: float | None
    attention: float | None
    logits: float | None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in values, contexts in tokens."""

    architecture: str
    layers: int
    embedding: int
    # Width of the dense network, or of each expert.
    feed_forward: int
    # Width of the shared expert, 0 if there is none.
    shared_feed_forward: int
    # Whether each layer has experts.
    mixes: tuple[bool, ...]
    # Each layer's width of the dense network, 0 if the layer has none.
    dense_feed_forwards: tuple[int, ...]
    # attends, recurs: for each layer, whether it has attention, and whether it has a state: of a gated delta network
    # (delta_net), of a selective scan (scan), or of a short convolution over `convolution` tokens. A layer may have
    # both.
    attends: tuple[bool, ...]
    recurs: tuple[bool, ...]
    # Each layer's heads; heads, kv_heads and head_size are those of layers without a window.
    layer_heads: tuple[Heads, ...]
    # For each layer, the layer whose keys and values it reads: itself, or an earlier one.
    kv_layers: tuple[int, ...]
    # Values that a layer gets from each token's second embedding, 0 if there is none.
    per_layer_width: int
    # For each layer, how many standard deviations above the mean a gate must be to be kept, -inf to keep all.
    sparsity: tuple[float, ...]
    # Each layer's xIELU factors, if that is the activation.
    xielu: tuple[tuple[float, ...], ...]
    # Number of parallel residual streams, and the index of the one that layers compute with.
    altup: tuple[int, int]
    convolution: int
    delta_net: DeltaNetSizes | None
    scan: ScanSizes | None
    heads: int
    kv_heads: int
    head_size: int
    # None if heads have keys and values of their own; else there is one key-value head, of the size that a token
    # stores.
    latents: Latents | None
    vocabulary: int
    context: int
    epsilon: float
    rope_base: float
    rope_scaling: RopeScaling
    # Whether Granite's heads are rotated at all.
    rope_finetuned: bool
    # Rotation base of sliding-window layers, if the file states it.
    window_rope_base: float | None
    query_growth: QueryGrowth | None
    # None if not stated, as are windowed and causal. windowed: whether each layer has a window.
    window: int | None
    windowed: tuple[bool, ...] | None
    factors: StatedFactors
    # Its name in the file, or empty.
    activation: str
    experts: int
    experts_used: int
    # Values of the latent that experts read and write in place of the row, or 0.
    expert_latent: int
    # expert_groups, expert_groups_used: equal groups that experts are divided into, and from how many of them a row's
    # experts are chosen.
    expert_groups: int
    expert_groups_used: int
    # gating, normalise_experts, expert_scale: as the file states them.
    gating: int | None
    normalise_experts: bool
    expert_scale: float | None
    attention_cap: float | None
    logit_cap: float | None
    # Whether rows see only themselves and those before.
    causal: bool | None
    # Values of the concatenated rows that a drafting layer reads.
    joins: int = 0
    # How many rotated pairs follow each component of an image's positions (M-RoPE), empty if positions are numbers.
    position_sections: tuple[int, ...] = ()
    # How many first layers add a part of an image's rows to their output.
    image_layers: int = 0
    # Whether rows of images come among tokens, see reading_images.
    reads_images: bool = False

    def stores(self, layer: int) -> bool:
        """Whether a layer stores keys and values of its own."""
        return self.attends[layer] and self.kv_layers[layer] == layer

    @property
    def last_stored(self) -> int:
        """The last layer that stores keys, values or a state; later layers affect only a row's own logits."""
        return max(layer for layer in range(self.layers) if self.stores(layer) or self.recurs[layer])

    @property
    def slot_sizes(self) -> DeltaNetSizes | ScanSizes | None:
        """Sizes of states that are kept in slots, None if the model has none."""
        return self.delta_net or self.scan

    @property
    def narrows(self) -> bool:
        """Whether the last layers are computed only for rows with requested logits. Never with experts."""
        return self.last_stored < self.layers - 1 and not self.experts

    @property
    def longest_head(self) -> int:
        """The largest padded head size."""
        return max(heads.padded for heads in self.layer_heads)

    @property
    def longest(self) -> int:
        """Values of the longest input row of any matrix product."""
        widths = self.feed_forward, self.shared_feed_forward, *self.dense_feed_forwards
        attended = [heads.queries * heads.size for heads in self.layer_heads]
        if self.latents:
            attended = [self.heads * self.latents.value, self.latents.query_rank]
        of_values = self.slot_sizes.inner if self.slot_sizes else 0
        return max(self.embedding, self.joins, self.per_layer_width, self.expert_latent, *widths, *attended, of_values)


def read_config(file: ModelFile) -> ModelConfig:
    """Read and check a model's configuration.

    Raises ModelFileError for a missing or out-of-range key, UnsupportedModelError for sizes that differ between layers.
    """
    metadata, name = file.metadata, file.architecture
    layers, scan = _layers(file), scan_sizes(file) if name in SCANS else None
    query_heads = layer_sizes.query_heads(file, layers, may_lack=scan is not None)
    kv_heads, heads = layer_sizes.kv_heads(file, query_heads, may_lack=scan is not None), max(query_heads)
    attends = tuple(count > 0 for count in kv_heads)
    delta_net = delta_net_sizes(file)
    if delta_net:
        attends = attending_layers(file, layers)
    embedding = metadata.get_int(f"{name}.embedding_length", minimum=1, maximum=MAX_WIDTH)
    latents = read_latents(file) if f"{name}.{LATENT_RANK}" in metadata else None
    if latents:
        kv_heads = (1,) * layers
    head_size = latents.stored if latents else _head_size(file, embedding // heads if heads else 2)
    refuse_unread(file)
    context = metadata.get_int(f"{name}.context_length", minimum=1, maximum=MAX_CONTEXT)
    rope_size = _rope_size(file, head_size)
    window = _window(file)
    windowed = layer_sizes.windowed_layers(file, window)
    latent = latents.rank if latents else 0
    alike = Heads(max(heads, 1), next((count for count in kv_heads if count), 1), head_size, rope_size, latent)
    dense_layers = metadata.get_int(f"{name}.leading_dense_block_count", 0, maximum=layers)
    period = expert_sizes.period(file)
    first = f"blk.{expert_sizes.first_experts(file, layers) if name in ALONE else int(period > 0) or dense_layers}."
    experts = expert_sizes.experts(file, first)
    dense = dense_layers or period or not experts or name in ALONE or first + _DENSE in file.tensors
    width_key, narrowest = f"{name}.feed_forward_length", 0 if scan else 1
    widths = in_each_layer(file, width_key, MAX_WIDTH, layers, narrowest)[:layers] if dense else ()
    recurs = tuple(not one for one in attends)
    if scan:
        recurs = scanning_layers(file, attends, widths)
    scaling = rope_scaling(file, context)
    used = expert_sizes.experts_used(file, experts)
    groups, groups_used = expert_sizes.expert_groups(file, experts, used)
    return ModelConfig(
        architecture=name,
        layers=layers,
        embedding=embedding,
        feed_forward=expert_sizes.expert_width(file, first) if experts else max(widths),
        shared_feed_forward=_rows(file, first + _SHARED_EXPERT) if experts else 0,
        mixes=tuple(
            experts > 0 and layer >= dense_layers and (not period or layer % period == 1) for layer in range(layers)
        ),
        dense_feed_forwards=widths,
        attends=attends,
        recurs=recurs,
        layer_heads=layer_sizes.layer_heads(file, alike, query_heads, kv_heads, windowed),
        kv_layers=layer_sizes.kv_layers(file, windowed, layers),
        per_layer_width=_per_layer_width(file),
        sparsity=layer_sizes.sparsity(file, layers),
        xielu=layer_sizes.xielu(file, layers),
        altup=_altup(file),
        convolution=0
        if delta_net or scan or not any(recurs)
        else metadata.get_int(f"{name}.{CONVOLUTION}", minimum=2, maximum=MAX_CONVOLUTION),
        delta_net=delta_net,
        scan=scan,
        heads=alike.queries,
        kv_heads=alike.keys,
        head_size=head_size,
        latents=latents,
        vocabulary=_vocabulary(file),
        context=context,
        epsilon=_epsilon(file),
        rope_base=rope_base(file, head_size, scaling),
        rope_scaling=scaling,
        rope_finetuned=metadata.get_bool(f"{name}.rope.scaling.finetuned", True),
        window_rope_base=window_rope_base(file, scaling),
        query_growth=query_growth(file, scaling.original_context),
        window=window,
        windowed=windowed,
        factors=StatedFactors(
            embedding=stated_number(file, "embedding_scale", least=_LEAST_FACTOR),
            residual=stated_number(file, "residual_scale", least=_LEAST_FACTOR),
            attention=stated_number(file, "attention.scale", least=_LEAST_FACTOR),
            logits=stated_number(file, "logit_scale", least=_LEAST_FACTOR),
        ),
        activation=metadata.get_str(f"{name}.hidden_activation", ""),
        experts=experts,
        experts_used=used,
        expert_latent=_rows(file, first + _LATENT) if experts else 0,
        expert_groups=groups,
        expert_groups_used=groups_used,
        gating=metadata.get_int(f"{name}.{_GATING}") if f"{name}.{_GATING}" in metadata else None,
        normalise_experts=metadata.get_bool(f"{name}.expert_weights_norm", False),
        expert_scale=stated_number(file, "expert_weights_scale"),
        attention_cap=stated_number(file, "attn_logit_softcapping"),
        logit_cap=stated_number(file, "final_logit_softcapping"),
        causal=metadata.get_bool(f"{name}.attention.causal", True) if f"{name}.attention.causal" in metadata else None,
        position_sections=_position_sections(file),
        image_layers=metadata.get_int(f"{name}.n_deepstack_layers", 0, maximum=layers),
    )


def _position_sections(file: ModelFile) -> tuple[int, ...]:
    """The sections of M-RoPE, for time, rows and columns. Raises ModelFileError for impossible ones."""
    sections = tuple(integers(file, SECTIONS)[:3])
    if any(not 0 <= pairs <= MAX_HEAD_SIZE for pairs in sections):
        raise ModelFileError(
            f"{file.path}: {file.architecture}.{SECTIONS} is {list(sections)}. Use another version of the model."
        )
    return sections if any(sections) else ()


def reading_images(file: ModelFile, config: ModelConfig) -> ModelConfig:
    """The configuration of a model beside a projector.

    Raises UnsupportedModelError for one whose images the native engine does not compute.
    """
    if any(config.recurs) or config.latents or config.altup[0] > 1:
        kind = "parallel streams" if config.altup[0] > 1 else "latents" if config.latents else "states"
        raise refusal(file, f"{file.architecture} has {kind}, and images")
    return replace(config, reads_images=True)


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


def _vocabulary(file: ModelFile) -> int:
    """Rows of the embedding, one per token. Raises ModelFileError if the tokenizer has another number of tokens.

    Otherwise there would be tokens without logits, or logits without a token. llama.cpp refuses such files too.
    """
    tokens = file.metadata.get(_VOCABULARY)
    if file.architecture == "eagle3":  # a draft head, which uses its model's vocabulary
        return 0
    rows = _rows(file, _EMBEDDING_TENSOR, required=True)
    if isinstance(tokens, MetadataArray) and len(tokens) != rows:
        raise ModelFileError(
            f"{file.path}: {_EMBEDDING_TENSOR} has {rows} rows and {_VOCABULARY} has {len(tokens)} tokens. "
            "The file is damaged: download or convert it again."
        )
    return rows


def _layers(file: ModelFile) -> int:
    """Number of layers, without the multi-token-prediction layers behind them."""
    metadata, name = file.metadata, file.architecture
    layers = metadata.get_int(f"{name}.block_count", minimum=1, maximum=MAX_LAYERS)
    return layers - metadata.get_int(f"{name}.nextn_predict_layers", 0, maximum=layers - 1)


def _rows(file: ModelFile, name: str, *, required: bool = False) -> int:
    """Rows of a matrix, 0 if the file has none and it is not required. Raises UnsupportedModelError."""
    tensor = file.tensors.get(name)
    if tensor is None and not required:
        return 0
    if tensor is None or len(tensor.shape) != 2 or not 1 <= tensor.shape[0] <= MAX_VOCABULARY:
        raise UnsupportedModelError(
            f"{file.path}: the tensor {name} is missing or has an unusable shape. Use another version of the model."
        )
    return tensor.shape[0]


def _epsilon(file: ModelFile) -> float:
    """The epsilon of norms: a file states one of two keys, for RMSNorm or for LayerNorm."""
    of_mean_square, of_variance = (f"{file.architecture}.attention.layer_norm_{kind}epsilon" for kind in ("rms_", ""))
    key = of_variance if of_mean_square not in file.metadata and of_variance in file.metadata else of_mean_square
    return file.metadata.get_float(key, minimum=0.0, maximum=1.0)


def _window(file: ModelFile) -> int | None:
    key = f"{file.architecture}.attention.sliding_window"
    return file.metadata.get_int(key, maximum=MAX_CONTEXT) if key in file.metadata else None


def _per_layer_width(file: ModelFile) -> int:
    """Values that each layer gets from a token's second embedding, 0 if there is none."""
    norm = file.tensors.get(_PER_LAYER_NORM)
    width = norm.shape[0] if norm else 0
    key = f"{file.architecture}.embedding_length_per_layer_input"
    if file.metadata.get_int(key, width, maximum=MAX_WIDTH) != width:
        raise ModelFileError(
            f"{file.path}: {key} is {file.metadata[key]}, but the per-layer embedding tensors are {width} wide. "
            "Use another version of the model."
        )
    return width


def _altup(file: ModelFile) -> tuple[int, int]:
    """The number of parallel residual streams, and the index of the one that layers compute with."""
    tensor = file.tensors.get(_STREAMS)
    streams = tensor.shape[0] + 1 if tensor and len(tensor.shape) == 3 else 1
    prefix = f"{file.architecture}.altup"
    if file.metadata.get_int(f"{prefix}.num_inputs", streams) != streams:
        raise ModelFileError(
            f"{file.path}: {prefix}.num_inputs does not fit the tensor {_STREAMS}, which is for {streams} streams. "
            "Use another version of the model."
        )
    return streams, file.metadata.get_int(f"{prefix}.active_idx", 0, maximum=streams - 1)
