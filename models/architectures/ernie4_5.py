"""ERNIE 4.5 without experts: Llama under another name."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="ernie4_5", rotation=Rotation(RopePairs.NEIGHBOURS))
