"""EmbeddingGemma: Gemma 3 whose rows see all of their text, or a window around them."""

from dataclasses import replace

from models.architecture import inverse_root
from models.architectures.gemma3 import ARCHITECTURE as GEMMA3

ARCHITECTURE = replace(
    GEMMA3, name="gemma-embedding", scales=replace(GEMMA3.scales, attention=inverse_root), causal=False
)
