"""Gemma 3: norms of heads, five layers with a window and their own rotation base to one that sees everything."""

from models.architecture import Architecture, Gate, RopePairs, full_width_scale
from models.config import ModelConfig

_PERIOD = 6
_LAYERS_27B = 62


def _slides(config: ModelConfig, layer: int) -> bool:
    return layer % _PERIOD < _PERIOD - 1


ARCHITECTURE = Architecture(
    name="gemma3",
    rope_pairs=RopePairs.HALVES,
    gate=Gate.GELU,
    scale_embeddings=True,
    slides=_slides,
    attention_scale=full_width_scale(_LAYERS_27B),
    local_rope_base=10_000.0,
)
