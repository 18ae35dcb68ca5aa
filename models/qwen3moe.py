"""Qwen 3 with a mixture of experts in place of the feed-forward network."""

from models.architecture import Architecture, RopePairs

ARCHITECTURE = Architecture(name="qwen3moe", rope_pairs=RopePairs.HALVES)
