"""ERNIE 4.5 with experts behind the first layers, some beside a shared one; a bias takes part in their choice."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="ernie4_5-moe", rotation=Rotation(RopePairs.NEIGHBOURS))
