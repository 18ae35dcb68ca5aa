"""OLMo 2 and 3: norms after sub-layers and none before, and over all queries and all keys together.

OLMo 3 gives three of four layers a window, whose rotation is not stretched.
"""

from models.architecture import Architecture, Norms, RopePairs, Rotation, windows
from models.config import ModelConfig


def _local_base(config: ModelConfig) -> float:
    return config.rope_base


ARCHITECTURE = Architecture(
    name="olmo2",
    rotation=Rotation(RopePairs.HALVES, local_base=_local_base),
    norms=Norms(before=False, after=True),
    window=windows(4),
)
