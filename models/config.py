"""The sizes and constants of a decoder, read from a GGUF's metadata and checked before anything is allocated."""

from dataclasses import dataclass

from gguf_io import ModelFile
from models.errors import UnsupportedModelError

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_SIZE = 512
MAX_EXPERTS = 1024
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 24
_EMBEDDING_TENSOR = "token_embd.weight"


@dataclass(frozen=True)
class RopeScaling:
    """How rotation is stretched beyond the trained context. kind: none, linear, yarn or longrope (factor tensors)."""

    kind: str
    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in values, contexts in tokens. rope_size: values of a head that turn. window: 0 where nothing slides."""

    architecture: str
    layers: int
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    epsilon: float
    rope_size: int
    rope_base: float
    rope_scaling: RopeScaling
    window: int
    experts: int
    experts_used: int
    attention_cap: float | None
    logit_cap: float | None

    @property
    def padded_head(self) -> int:
        """A head's values rounded up so that each half fills whole vectors."""
        return -(-self.head_size // 32) * 32

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads


def read_config(file: ModelFile) -> ModelConfig:
    """Read and check a decoder's configuration.

    Raises ModelFileError for a missing or absurd key, UnsupportedModelError for sizes that differ from layer to layer.
    """
    metadata, name = file.metadata, file.architecture
    heads = _same_in_all_layers(file, f"{name}.attention.head_count", MAX_HEADS)
    kv_key = f"{name}.attention.head_count_kv"
    kv_heads = _same_in_all_layers(file, kv_key, MAX_HEADS) if kv_key in metadata else heads
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
    context = metadata.get_int(f"{name}.context_length", minimum=1, maximum=MAX_CONTEXT)
    rope_size = metadata.get_int(f"{name}.rope.dimension_count", head_size, minimum=2, maximum=head_size)
    experts = metadata.get_int(f"{name}.expert_count", 0, maximum=MAX_EXPERTS)
    feed_forward = _same_in_all_layers(file, f"{name}.feed_forward_length", MAX_WIDTH)
    if experts:
        feed_forward = metadata.get_int(
            f"{name}.expert_feed_forward_length", feed_forward, minimum=1, maximum=MAX_WIDTH
        )
    return ModelConfig(
        architecture=name,
        layers=metadata.get_int(f"{name}.block_count", minimum=1, maximum=MAX_LAYERS),
        embedding=embedding,
        feed_forward=feed_forward,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary=_vocabulary(file),
        context=context,
        epsilon=metadata.get_float(f"{name}.attention.layer_norm_rms_epsilon", minimum=0.0, maximum=1.0),
        rope_size=rope_size,
        rope_base=metadata.get_float(f"{name}.rope.freq_base", 10_000.0, minimum=1.0, maximum=1e12),
        rope_scaling=_rope_scaling(file, context),
        window=metadata.get_int(f"{name}.attention.sliding_window", 0, maximum=MAX_CONTEXT),
        experts=experts,
        experts_used=metadata.get_int(f"{name}.expert_used_count", 1 if experts else 0, maximum=max(experts, 0)),
        attention_cap=_optional(file, f"{name}.attn_logit_softcapping"),
        logit_cap=_optional(file, f"{name}.final_logit_softcapping"),
    )


def _same_in_all_layers(file: ModelFile, key: str, maximum: int) -> int:
    value = file.metadata.get(key)
    if not isinstance(value, int | None):
        values = set(file.metadata.get_list(key, int))
        if len(values) != 1:
            raise UnsupportedModelError(
                f"{file.path}: {key} differs from layer to layer, which the native engine does not compute. "
                f"Use --backend llama."
            )
        if not 1 <= (only := values.pop()) <= maximum:
            raise UnsupportedModelError(f"{file.path}: {key} is {only}, outside 1..{maximum}.")
        return only
    return file.metadata.get_int(key, minimum=1, maximum=maximum)


def _vocabulary(file: ModelFile) -> int:
    tensor = file.tensors.get(_EMBEDDING_TENSOR)
    if tensor is None or len(tensor.shape) != 2 or not 1 <= tensor.shape[0] <= MAX_VOCABULARY:
        raise UnsupportedModelError(f"{file.path}: {_EMBEDDING_TENSOR} is missing or has no sensible shape.")
    return tensor.shape[0]


def _rope_scaling(file: ModelFile, context: int) -> RopeScaling:
    metadata, prefix = file.metadata, f"{file.architecture}.rope.scaling"
    kind = metadata.get_str(f"{prefix}.type", "none")
    factor = metadata.get_float(f"{prefix}.factor", 1.0, minimum=0.0, maximum=1e6)
    if f"{prefix}.type" not in metadata and factor not in (0.0, 1.0):
        kind = "linear"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(f"{file.path}: {prefix}.type is '{kind}', which the native engine does not know.")
    return RopeScaling(
        kind=kind,
        factor=factor or 1.0,
        original_context=metadata.get_int(f"{prefix}.original_context_length", context, minimum=1, maximum=MAX_CONTEXT),
        attention_factor=metadata.get_float(f"{prefix}.attn_factor", 1.0, minimum=0.0, maximum=100.0),
        beta_fast=metadata.get_float(f"{prefix}.yarn_beta_fast", 32.0, minimum=0.0, maximum=1e6),
        beta_slow=metadata.get_float(f"{prefix}.yarn_beta_slow", 1.0, minimum=0.0, maximum=1e6),
    )


def _optional(file: ModelFile, key: str) -> float | None:
    return file.metadata.get_float(key, minimum=0.0, maximum=1e6) if key in file.metadata else None
