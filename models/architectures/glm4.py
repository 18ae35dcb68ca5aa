"""GLM 4 (0414): norms before and after each sub-layer, gate and up in one tensor, half of a head turns."""

from models.architecture import Architecture, Norms, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="glm4",
    rotation=Rotation(RopePairs.NEIGHBOURS),
    norms=Norms(after=True),
)
