"""ModernBERT: norms before sub-layers, gated GELU, and one layer that sees all to two with a window around each row."""

from models.architecture import Activation, Architecture, Norms, RopePairs, Rotation, unscaled
from models.config import ModelConfig

_PERIOD = 3


def _window(config: ModelConfig, layer: int) -> int:
    pattern = _PERIOD if config.window_pattern is None else config.window_pattern
    slides = pattern[layer] if isinstance(pattern, tuple) else pattern == 0 or layer % pattern > 0
    return (config.window or 0) if slides else 0


ARCHITECTURE = Architecture(
    name="modern-bert",
    rotation=Rotation(RopePairs.HALVES, window_base=10_000.0, window_scaling=unscaled),
    norms=Norms(layer_norm=True, first=False),
    activation=Activation.GELU,
    window=_window,
    causal=False,
)
