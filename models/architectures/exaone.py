"""EXAONE 3 and 3.5: Llama whose heads turn by halves."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="exaone", rotation=Rotation(RopePairs.HALVES))
