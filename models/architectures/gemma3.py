"""Gemma 3: norms of heads, and five layers with a window and a rotation base of their own to one that sees all."""

from models.architecture import (
    Activation,
    Architecture,
    Norms,
    RopePairs,
    Rotation,
    Scales,
    full_width_scale,
    root_of_width,
    unscaled,
    windows,
)

_LAYERS_27B = 62


ARCHITECTURE = Architecture(
    name="gemma3",
    rotation=Rotation(RopePairs.HALVES, window_base=10_000.0, window_scaling=unscaled),
    norms=Norms(after=True),
    scales=Scales(embedding=root_of_width, attention=full_width_scale(_LAYERS_27B)),
    activation=Activation.GELU,
    window=windows(6),
)
