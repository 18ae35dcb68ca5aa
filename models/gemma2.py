"""Gemma 2: norms after each sub-layer, capped scores and logits, every other layer sees a window only."""

import math

from models.architecture import Architecture, Gate, RopePairs
from models.config import ModelConfig

_LAYERS_27B = 46


def _slides(config: ModelConfig, layer: int) -> bool:
    return layer % 2 == 0


def _attention_scale(config: ModelConfig) -> float:
    """The 27B model scales by the width a head would have if heads filled the embedding."""
    size = config.embedding / config.heads if config.layers == _LAYERS_27B else config.head_size
    return 1.0 / math.sqrt(size)


ARCHITECTURE = Architecture(
    name="gemma2",
    rope_pairs=RopePairs.HALVES,
    gate=Gate.GELU,
    scale_embeddings=True,
    slides=_slides,
    attention_scale=_attention_scale,
    attention_cap=50.0,
    logit_cap=30.0,
)
