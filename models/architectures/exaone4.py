"""EXAONE 4: norms after sub-layers and none before.

The 32B gives three of four layers a window, and turns the heads of those alone.
"""

from models.architecture import Architecture, Norms, RopePairs, Rotation, windows
from models.config import ModelConfig

_LAYERS_32B = 64
_WINDOW = 4096
_of_32b = windows(4, _WINDOW)


def _window(config: ModelConfig, layer: int) -> int:
    return _of_32b(config, layer) if config.layers == _LAYERS_32B else 0


def _turns(config: ModelConfig, layer: int) -> bool:
    return config.layers != _LAYERS_32B or _window(config, layer) > 0


ARCHITECTURE = Architecture(
    name="exaone4",
    rotation=Rotation(RopePairs.HALVES, turns=_turns),
    norms=Norms(before=False, after=True),
    window=_window,
)
