"""Nemotron-H: each layer is a selective scan, attention without positions, or a network of squared ReLU."""

from models.architecture import Activation, Architecture, Norms, RopePairs, Rotation, Scales, inverse_root
from models.config import ModelConfig


def _attention(config: ModelConfig) -> float:
    return config.factors.attention or inverse_root(config)


def _never(config: ModelConfig, layer: int) -> bool:
    return False


ARCHITECTURE = Architecture(
    name="nemotron_h",
    rotation=Rotation(RopePairs.NEIGHBOURS, turns=_never),
    norms=Norms(feed_forward="attn_norm"),
    scales=Scales(attention=_attention),
    activation=Activation.SQUARED_RELU_ALONE,
)
