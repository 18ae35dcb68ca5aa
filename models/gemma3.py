"""Gemma 3: norms of heads, five layers with a window and their own rotation base to one that sees everything."""

from models.architecture import (
    Activation,
    Architecture,
    Norms,
    RopePairs,
    Rotation,
    Scales,
    full_width_scale,
    root_of_width,
    windows,
)
from models.config import ModelConfig

_LAYERS_27B = 62
_LOCAL_BASE = 10_000.0


def _local_base(config: ModelConfig) -> float:
    return _LOCAL_BASE if config.local_rope_base is None else config.local_rope_base


ARCHITECTURE = Architecture(
    name="gemma3",
    rotation=Rotation(RopePairs.HALVES, local_base=_local_base),
    norms=Norms(after=True),
    scales=Scales(embedding=root_of_width, attention=full_width_scale(_LAYERS_27B)),
    activation=Activation.GELU,
    window=windows(6),
)
