"""How a model rotates heads and scales queries by position: read from the metadata and checked."""

import math
from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError, shortened
from models.errors import SECTIONS, UnsupportedModelError, integers
from models.sizes.reading import MAX_CONTEXT, MAX_HEAD_SIZE, stated_number

_MAX_BASE = 1e12


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
    """Queries are multiplied by 1 + scale * log(1 + floor((position + offset) / length)).

    In models that do not rotate heads in all layers, only those of the other layers are.
    """

    scale: float
    length: int
    offset: int = 0


# Of architectures whose files do not state it.
_GROWTH = {"llama4": QueryGrowth(scale=0.1, length=8192, offset=1)}


@dataclass(frozen=True)
class RopeSizes:
    """What a file states about rotation."""

    base: float
    scaling: RopeScaling
    # Whether Granite's heads are rotated at all.
    finetuned: bool
    # The base of layers with a window, if the file states it.
    window_base: float | None
    query_growth: QueryGrowth | None
    # How many rotated pairs follow each component of an image's positions (M-RoPE), empty if positions are numbers.
    sections: tuple[int, ...]


def read(file: ModelFile, context: int, head_size: int) -> RopeSizes:
    """Read what the file states. Raises ModelFileError for unusable values, UnsupportedModelError for unknown kinds."""
    scaling, name = _scaling(file, context), file.architecture
    window_base = stated_number(file, "rope.freq_base_swa", _MAX_BASE)
    if window_base is not None:
        _check_base(file, f"{name}.rope.freq_base_swa", window_base, scaling)
    return RopeSizes(
        base=_base(file, head_size, scaling),
        scaling=scaling,
        finetuned=file.metadata.get_bool(f"{name}.rope.scaling.finetuned", True),
        window_base=window_base,
        query_growth=_query_growth(file, scaling.original_context),
        sections=_sections(file),
    )


def _sections(file: ModelFile) -> tuple[int, ...]:
    """The sections of M-RoPE, for time, rows and columns. Raises ModelFileError for impossible ones."""
    sections = tuple(integers(file, SECTIONS)[:3])
    if sections and not 0 <= min(sections) <= max(sections) <= MAX_HEAD_SIZE:
        raise ModelFileError(
            f"{file.path}: {file.architecture}.{SECTIONS} is {list(sections)}. Use another version of the model."
        )
    return sections if any(sections) else ()


def _base(file: ModelFile, head_size: int, scaling: RopeScaling) -> float:
    """The base of the rotation; Hunyuan's files raise it by an NTK-aware `alpha`."""
    metadata, key = file.metadata, f"{file.architecture}.rope.freq_base"
    base = metadata.get_float(key, 10_000.0, minimum=1.0, maximum=_MAX_BASE)
    alpha = metadata.get_float(f"{file.architecture}.rope.scaling.alpha", 0.0, minimum=0.0, maximum=1e6)
    if alpha:
        base = base * alpha ** (head_size / (head_size - 2)) if head_size > 2 else math.inf
    _check_base(file, key, base, scaling)
    return base


def _check_base(file: ModelFile, key: str, base: float, scaling: RopeScaling) -> None:
    """Raise ModelFileError for a base that is not usable: YaRN divides by its logarithm."""
    if not math.isfinite(base) or base < 1.0 or (base == 1.0 and scaling.kind == "yarn"):
        raise ModelFileError(
            f"{file.path}: {key}: the RoPE base is {base:g}, which is not usable. Use another version of the model."
        )


def _query_growth(file: ModelFile, length: int) -> QueryGrowth | None:
    """How queries grow with the position, None if the file does not state it."""
    if file.architecture in _GROWTH:
        return _GROWTH[file.architecture]
    scale = stated_number(file, "attention.temperature_scale")
    return QueryGrowth(scale, length) if scale else None


def _scaling(file: ModelFile, context: int) -> RopeScaling:
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
