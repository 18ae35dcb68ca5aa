"""Qwen 3.5, for text: gated delta networks in most layers, attention whose output is gated in the others."""

from models.architecture import Architecture, Norms, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="qwen35",
    rotation=Rotation(RopePairs.HALVES),
    norms=Norms(feed_forward="post_attention_norm"),
    gated_attention=True,
)
