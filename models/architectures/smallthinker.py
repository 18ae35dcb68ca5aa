"""SmallThinker: experts with ReLU, chosen before attention; every fourth layer sees all and is not rotated."""

from models.architecture import (
    Activation,
    Architecture,
    Experts,
    RopePairs,
    Rotation,
    stated_expert_scale,
    stated_gating,
)
from models.config import ModelConfig

_WINDOW, _PERIOD = 4096, 4


def _window(config: ModelConfig, layer: int) -> int:
    """Of all layers but the first of four, unless the file says which; llama.cpp knows one width."""
    if not config.window:
        return 0
    pattern = _PERIOD if config.window_pattern is None else config.window_pattern
    slides = pattern[layer] if isinstance(pattern, tuple) else pattern == 0 or layer % pattern != 0
    return _WINDOW if slides else 0


def _turns(config: ModelConfig, layer: int) -> bool:
    return not config.window or layer % _PERIOD != 0


ARCHITECTURE = Architecture(
    name="smallthinker",
    rotation=Rotation(RopePairs.HALVES, turns=_turns),
    activation=Activation.RELU,
    experts=Experts(stated_gating, scale=stated_expert_scale, early=True),
    window=_window,
)
