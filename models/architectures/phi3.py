"""Phi 3 and 3.5: fused tensors, and rotation factors that depend on how long the context may become."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="phi3", rotation=Rotation(RopePairs.HALVES))
