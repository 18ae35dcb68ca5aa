"""MiniCPM 1 and 2: Llama with Granite's factors, which the first files did not yet state.

Their defaults are llama.cpp's.
"""

import math

from models.architecture import Architecture, RopePairs, Rotation, Scales
from models.config import ModelConfig

_EMBEDDING = 12.0
_RESIDUAL = 1.4
_BASE_WIDTH = 256


def _embedding(config: ModelConfig) -> float:
    return _EMBEDDING if config.factors.embedding is None else config.factors.embedding or 1.0


def _residual(config: ModelConfig) -> float:
    return _RESIDUAL / math.sqrt(config.layers) if config.factors.residual is None else config.factors.residual or 1.0


def _logits(config: ModelConfig) -> float:
    return 1.0 / (config.factors.logits or _BASE_WIDTH / config.embedding)


ARCHITECTURE = Architecture(
    name="minicpm",
    rotation=Rotation(RopePairs.NEIGHBOURS),
    scales=Scales(_embedding, _residual, logits=_logits),
)
