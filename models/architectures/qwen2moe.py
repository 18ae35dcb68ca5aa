"""Qwen 1.5 and 2 with experts: weights that need not add up to one, and a shared expert behind a gate of its own."""

from models.architecture import Architecture, Experts, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="qwen2moe",
    rotation=Rotation(RopePairs.HALVES),
    experts=Experts(normalise=False),
)
