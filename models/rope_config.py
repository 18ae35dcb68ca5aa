"""How a model rotates heads and scales queries by position: read from the metadata and checked."""

import math
from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError, shortened
from models.errors import UnsupportedModelError

MAX_CONTEXT = 1 << 24
MAX_ROPE_BASE = 1e12


@dataclass(frozen=True)
class RopeScaling:
    """How rotation is stretched beyond the trained context. kind: none, linear, yarn or longrope (factor tensors).

    log_multiplier: share of YaRN's attention sharpening that is divided out again, 0 for none.
    """

    kind: str
    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    log_multiplier: float


@dataclass(frozen=True)
class QueryGrowth:
    """Queries are multiplied by 1 + scale * log(1 + floor(position / length))."""

    scale: float
    length: int


def rope_base(file: ModelFile, head_size: int, scaling: RopeScaling) -> float:
    """The base of the rotation; Hunyuan's files raise it by an NTK-aware `alpha`."""
    metadata, key = file.metadata, f"{file.architecture}.rope.freq_base"
    base = metadata.get_float(key, 10_000.0, minimum=1.0, maximum=MAX_ROPE_BASE)
    alpha = metadata.get_float(f"{file.architecture}.rope.scaling.alpha", 0.0, minimum=0.0, maximum=1e6)
    if alpha:
        base = base * alpha ** (head_size / (head_size - 2)) if head_size > 2 else math.inf
    return _checked_base(file, key, base, scaling)


def window_rope_base(file: ModelFile, scaling: RopeScaling) -> float | None:
    """The base of sliding-window layers, if the file states it."""
    base = stated_number(file, "rope.freq_base_swa", MAX_ROPE_BASE)
    return None if base is None else _checked_base(file, f"{file.architecture}.rope.freq_base_swa", base, scaling)


def _checked_base(file: ModelFile, key: str, base: float, scaling: RopeScaling) -> float:
    """The base, if it is usable: YaRN divides by its logarithm. Raises ModelFileError otherwise."""
    if not math.isfinite(base) or base < 1.0 or (base == 1.0 and scaling.kind == "yarn"):
        raise ModelFileError(
            f"{file.path}: {key}: the RoPE base is {base:g}, which is not usable. Use another version of the model."
        )
    return base


def query_growth(file: ModelFile, length: int) -> QueryGrowth | None:
    """How queries grow with the position, None if the file does not state it."""
    scale = stated_number(file, "attention.temperature_scale")
    return QueryGrowth(scale, length) if scale else None


def rope_scaling(file: ModelFile, context: int) -> RopeScaling:
    """The scaling that the file states. Raises UnsupportedModelError for an unknown kind."""
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


def stated_number(file: ModelFile, key: str, maximum: float = 1e6, least: float = 0.0) -> float | None:
    """A non-negative number that the file states, else None. Raises ModelFileError if it is out of range.

    least: the smallest value accepted other than 0, since dividing by a smaller one would overflow.
    """
    key = f"{file.architecture}.{key}"
    if key not in file.metadata:
        return None
    stated = file.metadata.get_float(key, minimum=0.0, maximum=maximum)
    return file.metadata.get_float(key, minimum=least, maximum=maximum) if stated else stated
