"""Phi 1 and 2: parallel sub-layers, layer norm, biases everywhere, no gate, a part of each head turns."""

from models.architecture import Activation, Architecture, Norms, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="phi2",
    rotation=Rotation(RopePairs.HALVES),
    norms=Norms(layer_norm=True, feed_forward="attn_norm"),
    activation=Activation.GELU_ALONE,
    parallel=True,
)
