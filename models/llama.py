"""Llama 1 to 3, Mistral, TinyLlama, SmolLM, and Mixtral, which differs by having experts."""

from models.architecture import Architecture, RopePairs

ARCHITECTURE = Architecture(name="llama", rope_pairs=RopePairs.NEIGHBOURS)
