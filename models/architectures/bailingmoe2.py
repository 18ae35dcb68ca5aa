"""Ling 2: GLM 4.5's experts with one tensor for queries, keys and values."""

from models.architecture import (
    Architecture,
    Experts,
    RopePairs,
    Rotation,
    stated_expert_scale,
    stated_gating,
)

ARCHITECTURE = Architecture(
    name="bailingmoe2",
    rotation=Rotation(RopePairs.HALVES),
    experts=Experts(stated_gating, normalise=None, scale=stated_expert_scale),
)
