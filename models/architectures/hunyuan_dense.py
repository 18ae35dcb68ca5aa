"""Hunyuan without experts: norms of heads after they have turned."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="hunyuan-dense",
    rotation=Rotation(RopePairs.HALVES, before_norms=True),
)
