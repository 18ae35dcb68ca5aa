"""Qwen 3.5, for text: gated delta networks in most layers, attention whose output is gated in the others."""

from models.architecture import Architecture, Norms, RopePairs, Rotation

ROTATION = Rotation(RopePairs.HALVES)
NORMS = Norms(feed_forward="post_attention_norm")
ARCHITECTURE = Architecture(name="qwen35", rotation=ROTATION, norms=NORMS, gated_attention=True)
