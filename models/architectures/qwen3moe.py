"""Qwen 3 with a mixture of experts in place of the feed-forward network."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="qwen3moe", rotation=Rotation(RopePairs.HALVES))
