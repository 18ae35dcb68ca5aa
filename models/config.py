"""The sizes and constants of a model, read from a GGUF's metadata and checked before anything is allocated."""

from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from models.errors import refusal, refuse_unread
from models.sizes import attention, convolution, delta_net, experts, feed_forward, kda, per_layer_inputs, rope, scan
from models.sizes.attention import AttentionSizes
from models.sizes.experts import ExpertSizes
from models.sizes.feed_forward import FeedForwardSizes
from models.sizes.per_layer_inputs import PerLayerSizes
from models.sizes.reading import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, rows_of, stated_number
from models.sizes.rope import RopeSizes
from models.sizes.state import SlotSizes, StateSizes

_LEAST_FACTOR = 1e-6
_VOCABULARY = "tokenizer.ggml.tokens"
_EMBEDDING_TENSOR = "token_embd.weight"


@dataclass(frozen=True)
class StatedFactors:
    """Factors that a file states, None for those it does not. Each architecture defines what they mean."""

    embedding: float | None
    residual: float | None
    attention: float | None
    logits: float | None
    # The soft cap of logits.
    logit_cap: float | None


@dataclass(frozen=True)
class ImageSizes:
    """Of images among tokens."""

    # How many first layers add a part of an image's rows to their output.
    layers: int
    # Whether there is a projector, see reading_images.
    are_read: bool = False
    # The most rows of an image that see each other, and are computed in one step.
    together: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, and of each kind of layer that it has. Sizes are in values, contexts in tokens."""

    architecture: str
    layers: int
    embedding: int
    vocabulary: int
    context: int
    epsilon: float
    factors: StatedFactors
    attention: AttentionSizes
    rope: RopeSizes
    feed_forward: FeedForwardSizes
    per_layer: PerLayerSizes
    images: ImageSizes
    # None if no layer has experts, or a state.
    experts: ExpertSizes | None
    state: StateSizes | None
    # Values of the concatenated rows that a drafting layer or a head reads.
    joins: int = 0

    @cached_property
    def recurs(self) -> tuple[bool, ...]:
        """Whether each layer has a state; a layer may have both."""
        return self.state.layers if self.state else (False,) * self.layers

    @cached_property
    def mixes(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return self.experts.layers if self.experts else (False,) * self.layers

    def stores(self, layer: int) -> bool:
        """Whether a layer stores keys and values of its own."""
        return self.attention.attends[layer] and self.attention.kv_layers[layer] == layer

    @property
    def last_stored(self) -> int:
        """The last layer that stores keys, values or a state; later layers affect only a row's own logits."""
        layer = self.layers - 1
        while not self.stores(layer) and not self.recurs[layer]:
            layer -= 1
        return layer

    @property
    def slot_sizes(self) -> SlotSizes | None:
        """Sizes of states that are kept in slots, None if the model has none."""
        return self.state if isinstance(self.state, SlotSizes) else None

    @property
    def narrows(self) -> bool:
        """Whether the last layers are computed only for rows with requested logits. Never with experts."""
        return self.last_stored < self.layers - 1 and not self.experts

    @cached_property
    def longest_head(self) -> int:
        """The largest padded head size."""
        return max(heads.padded for heads in self.attention.layer_heads)

    @cached_property
    def longest(self) -> int:
        """Values of the longest input row of any matrix product."""
        mixture, of_latents = self.experts, self.attention.latents
        widths = [self.embedding, self.joins, self.per_layer.width, *self.feed_forward.widths]
        widths += [mixture.width, mixture.shared, mixture.latent] if mixture else []
        if of_latents:
            widths += [self.attention.usual.queries * of_latents.value, of_latents.query_rank]
        else:
            widths += [heads.queries * heads.size for heads in self.attention.layer_heads]
        return max(*widths, self.slot_sizes.inner if self.slot_sizes else 0)


def read_config(file: ModelFile) -> ModelConfig:
    """Read and check a model's configuration.

    Raises ModelFileError for a missing or out-of-range key, UnsupportedModelError for sizes that differ between layers.
    """
    metadata, name, layers = file.metadata, file.architecture, _layers(file)
    kind = _state(file)
    query_heads = attention.query_heads(file, layers, may_lack=kind is scan)
    kv_heads = attention.kv_heads(file, query_heads, may_lack=kind is not None)
    embedding = metadata.get_int(f"{name}.embedding_length", minimum=1, maximum=MAX_WIDTH)
    refuse_unread(file)
    context = metadata.get_int(f"{name}.context_length", minimum=1, maximum=MAX_CONTEXT)
    mixture = experts.read(file, layers)
    network = feed_forward.read(file, layers, mixture)
    attends = tuple(map(bool, kv_heads))
    state = kind.read(file, attends, network.widths) if kind else None
    if state:
        attends = state.attends(attends)
    of_attention = attention.read(file, query_heads, kv_heads, attends, embedding)
    return ModelConfig(
        architecture=name,
        layers=layers,
        embedding=embedding,
        vocabulary=_vocabulary(file),
        context=context,
        epsilon=_epsilon(file),
        factors=StatedFactors(
            embedding=stated_number(file, "embedding_scale", least=_LEAST_FACTOR),
            residual=stated_number(file, "residual_scale", least=_LEAST_FACTOR),
            attention=stated_number(file, "attention.scale", least=_LEAST_FACTOR),
            logits=stated_number(file, "logit_scale", least=_LEAST_FACTOR),
            logit_cap=stated_number(file, "final_logit_softcapping"),
        ),
        attention=of_attention,
        rope=rope.read(file, context, of_attention.usual.size),
        feed_forward=network,
        per_layer=per_layer_inputs.read(file),
        images=ImageSizes(metadata.get_int(f"{name}.n_deepstack_layers", 0, maximum=layers)),
        experts=mixture,
        state=state,
    )


def reading_images(file: ModelFile, config: ModelConfig, together: int = 0) -> ModelConfig:
    """The configuration of a model beside a projector. together: see ImageSizes.

    Raises UnsupportedModelError for one whose images the native engine does not compute.
    """
    parallel = config.per_layer.streams > 1
    if config.attention.latents or parallel:
        raise refusal(file, f"{file.architecture} has {'parallel streams' if parallel else 'latents'}, and images")
    return replace(config, images=replace(config.images, are_read=True, together=together))


def _state(file: ModelFile) -> ModuleType | None:
    """The kind of state that a file's layers have, as its module; that in models.layers has the same name."""
    metadata, name = file.metadata, file.architecture
    if name in scan.SCANS:
        return scan
    if f"{name}.{kda.HEAD}" in metadata:
        return kda
    if any(tensor.endswith(delta_net.BETA) for tensor in file.tensors):
        return delta_net
    return convolution if f"{name}.{convolution.REACH}" in metadata else None


def _vocabulary(file: ModelFile) -> int:
    """Rows of the embedding, one per token. Raises ModelFileError if the tokenizer has another number of tokens.

    Otherwise there would be tokens without logits, or logits without a token. llama.cpp refuses such files too.
    """
    tokens = file.metadata.get(_VOCABULARY)
    if file.architecture == "eagle3":  # a draft head, which uses its model's vocabulary
        return 0
    rows = rows_of(file, _EMBEDDING_TENSOR, required=True)
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


def _epsilon(file: ModelFile) -> float:
    """The epsilon of norms: a file states one of two keys, for RMSNorm or for LayerNorm."""
    metadata, prefix = file.metadata, f"{file.architecture}.attention.layer_norm"
    alone = f"{prefix}_rms_epsilon" not in metadata and f"{prefix}_epsilon" in metadata
    return metadata.get_float(f"{prefix}_epsilon" if alone else f"{prefix}_rms_epsilon", minimum=0.0, maximum=1.0)
