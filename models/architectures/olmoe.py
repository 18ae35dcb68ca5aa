"""OLMoE: norms over all queries and all keys together, and experts whose weights need not add up to one."""

from models.architecture import Architecture, Experts, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="olmoe",
    rotation=Rotation(RopePairs.HALVES),
    experts=Experts(normalise=False),
)
