"""Phi 3 and 3.5: fused tensors, and rotation factors that depend on how long the context may become."""

from models.architecture import Architecture, RopePairs

ARCHITECTURE = Architecture(name="phi3", rope_pairs=RopePairs.HALVES, fused=True)
