"""Qwen 3: RMSNorm on each head's queries and keys before they turn."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="qwen3", rotation=Rotation(RopePairs.HALVES))
