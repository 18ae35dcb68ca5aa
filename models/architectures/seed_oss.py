"""Seed-OSS: Llama with biases on queries, keys and values, and another name for the second norm."""

from models.architecture import Architecture, Norms, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="seed_oss",
    rotation=Rotation(RopePairs.HALVES),
    norms=Norms(feed_forward="post_attention_norm"),
)
