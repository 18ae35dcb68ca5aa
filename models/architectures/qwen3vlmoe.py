"""The language model of Qwen 3 VL with experts, for text: there all parts of a position are the same."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="qwen3vlmoe", rotation=Rotation(RopePairs.HALVES))
