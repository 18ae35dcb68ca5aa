"""Gemma 2: norms after each sub-layer, capped scores and logits, every other layer sees a window only."""

from models.architecture import Architecture, Gate, RopePairs, full_width_scale
from models.config import ModelConfig

_LAYERS_27B = 46


def _slides(config: ModelConfig, layer: int) -> bool:
    return layer % 2 == 0


ARCHITECTURE = Architecture(
    name="gemma2",
    rope_pairs=RopePairs.HALVES,
    gate=Gate.GELU,
    scale_embeddings=True,
    slides=_slides,
    attention_scale=full_width_scale(_LAYERS_27B),
    attention_cap=50.0,
    logit_cap=30.0,
)
