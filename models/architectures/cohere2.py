"""Command R7B and A: parallel sub-layers, layer norm, windows on three of four layers, and rotation only on those."""

from models.architecture import Architecture, Norms, RopePairs, Rotation, Scales, stated, stated_windows
from models.config import ModelConfig

_PERIOD = 4
_window = stated_windows(_PERIOD)


def _turns(config: ModelConfig, layer: int) -> bool:
    return _window(config, layer) > 0


def _logits(config: ModelConfig) -> float:
    return stated(config, "logit_scale", config.factors.logits) or 1.0


ARCHITECTURE = Architecture(
    name="cohere2",
    rotation=Rotation(RopePairs.NEIGHBOURS, turns=_turns),
    norms=Norms(layer_norm=True, feed_forward="attn_norm"),
    scales=Scales(logits=_logits),
    parallel=True,
    window=_window,
)
