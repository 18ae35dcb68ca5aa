"""OLMoE: norms over all queries and all keys together, and experts whose weights need not add up to one."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="olmoe",
    rotation=Rotation(RopePairs.HALVES),
    normalise_experts=False,
)
