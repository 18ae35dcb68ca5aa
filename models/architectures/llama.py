"""Llama 1 to 3, Mistral, TinyLlama, SmolLM, and Mixtral, which differs by having experts."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="llama", rotation=Rotation(RopePairs.NEIGHBOURS))
