"""SmolLM 3: Llama without rotation on every fourth layer."""

from models.architecture import Architecture, RopePairs, Rotation
from models.config import ModelConfig

_PERIOD = 4


def _turns(config: ModelConfig, layer: int) -> bool:
    return (layer + 1) % _PERIOD != 0


ARCHITECTURE = Architecture(name="smollm3", rotation=Rotation(RopePairs.NEIGHBOURS, turns=_turns))
