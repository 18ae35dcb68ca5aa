"""Qwen 2 and 2.5: biases on queries, keys and values."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="qwen2", rotation=Rotation(RopePairs.HALVES))
