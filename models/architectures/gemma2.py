"""Gemma 2: norms after each sub-layer, capped scores and logits, every other layer sees a window only."""

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

_LAYERS_27B = 46
_WINDOW = 4096

ARCHITECTURE = Architecture(
    name="gemma2",
    rotation=Rotation(RopePairs.HALVES),
    norms=Norms(after=True),
    scales=Scales(embedding=root_of_width, attention=full_width_scale(_LAYERS_27B)),
    activation=Activation.GELU,
    window=windows(2, _WINDOW),
    attention_cap=50.0,
    logit_cap=30.0,
)
