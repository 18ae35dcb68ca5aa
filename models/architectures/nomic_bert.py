"""Nomic BERT: BERT with rotated heads and a gated feed-forward network."""

from models.architecture import Architecture, Norms, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="nomic-bert",
    rotation=Rotation(RopePairs.HALVES),
    norms=Norms(layer_norm=True, before=False, sums=True),
    causal=False,
)
