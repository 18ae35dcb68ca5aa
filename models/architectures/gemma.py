"""Gemma 1: Llama with GELU and embeddings scaled by the root of their width."""

from models.architecture import (
    Activation,
    Architecture,
    RopePairs,
    Rotation,
    Scales,
    root_of_width,
)

ARCHITECTURE = Architecture(
    name="gemma",
    rotation=Rotation(RopePairs.HALVES),
    scales=Scales(embedding=root_of_width),
    activation=Activation.GELU,
)
