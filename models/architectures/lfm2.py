"""LFM2: short convolutions in most layers, attention with norms of heads in the others."""

from models.architecture import Architecture, Norms, RopePairs, Rotation, windows

ROTATION = Rotation(RopePairs.HALVES)
NORMS = Norms(output="token_embd_norm")
ARCHITECTURE = Architecture(name="lfm2", rotation=ROTATION, norms=NORMS, window=windows(0))
