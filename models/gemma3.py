"""Gemma 3: norms of heads, five layers with a window and their own rotation base to one that sees everything."""

import math

from models.architecture import Architecture, Gate, RopePairs
from models.config import ModelConfig

_PERIOD = 6
_LAYERS_27B = 62


def _slides(config: ModelConfig, layer: int) -> bool:
    return layer % _PERIOD < _PERIOD - 1


def _attention_scale(config: ModelConfig) -> float:
    """The 27B model scales by the width a head would have if heads filled the embedding."""
    size = config.embedding / config.heads if config.layers == _LAYERS_27B else config.head_size
    return 1.0 / math.sqrt(size)


ARCHITECTURE = Architecture(
    name="gemma3",
    rope_pairs=RopePairs.HALVES,
    gate=Gate.GELU,
    scale_embeddings=True,
    slides=_slides,
    attention_scale=_attention_scale,
    local_rope_base=10_000.0,
)
