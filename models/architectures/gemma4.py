"""Gemma 4: Gemma 3 with a second embedding for each layer, heads of two sizes, and layers that share keys and values.

Values are normalised. Rotation of layers that see everything turns few values of a head, by factors that the file has.
The mixture has a dense network beside its experts.
"""

from models.architecture import (
    Activation,
    Architecture,
    Experts,
    Norms,
    RopePairs,
    Rotation,
    Scales,
    one,
    root_of_width,
    stated_windows,
    unscaled,
)

_PERIOD = 6

ARCHITECTURE = Architecture(
    name="gemma4",
    rotation=Rotation(RopePairs.HALVES, window_base=10_000.0, window_scaling=unscaled),
    norms=Norms(after=True),
    scales=Scales(embedding=root_of_width, attention=one),
    activation=Activation.GELU,
    experts=Experts(beside=True),
    window=stated_windows(_PERIOD),
    value_norms=True,
)
