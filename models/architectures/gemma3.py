"""Gemma 3: norms of heads, and five layers with a window and a rotation base of their own to one that sees all."""

from dataclasses import replace

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
from models.config import RopeScaling

_LAYERS_27B = 62


def _window_scaling(scaling: RopeScaling) -> RopeScaling:
    return replace(scaling, kind="none")


ARCHITECTURE = Architecture(
    name="gemma3",
    rotation=Rotation(RopePairs.HALVES, window_base=10_000.0, window_scaling=_window_scaling),
    norms=Norms(after=True),
    scales=Scales(embedding=root_of_width, attention=full_width_scale(_LAYERS_27B)),
    activation=Activation.GELU,
    window=windows(6),
)
