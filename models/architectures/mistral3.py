"""Ministral 3 and Mistral 3: Llama with YaRN, and queries that grow with the logarithm of their position."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="mistral3", rotation=Rotation(RopePairs.NEIGHBOURS))
