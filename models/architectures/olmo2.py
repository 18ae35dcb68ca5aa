"""OLMo 2 and 3: norms after sub-layers and none before, and over all queries and all keys together.

OLMo 3 gives three of four layers a window, whose rotation is not scaled.
"""

from dataclasses import replace

from models.architecture import Architecture, Norms, RopePairs, Rotation, windows
from models.rope_config import RopeScaling


def _window_scaling(scaling: RopeScaling) -> RopeScaling:
    return replace(scaling, kind="none", attention_factor=1.0)


ARCHITECTURE = Architecture(
    name="olmo2",
    rotation=Rotation(RopePairs.HALVES, window_scaling=_window_scaling),
    norms=Norms(before=False, after=True),
    window=windows(4),
)
