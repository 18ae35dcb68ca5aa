"""GLM 4.5 and 4.6: experts behind the first layers beside a shared one, scored by a sigmoid and chosen with a bias."""

from models.architecture import (
    Architecture,
    Experts,
    Gating,
    Norms,
    RopePairs,
    Rotation,
    stated_expert_scale,
    stated_gating,
)
from models.config import ModelConfig


def _gating(config: ModelConfig) -> Gating:
    return stated_gating(config) if config.gating else Gating.SIGMOID


ARCHITECTURE = Architecture(
    name="glm4moe",
    rotation=Rotation(RopePairs.HALVES),
    norms=Norms(feed_forward="post_attention_norm"),
    experts=Experts(_gating, normalise=None, scale=stated_expert_scale),
)
