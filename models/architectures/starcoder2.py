"""StarCoder 2: layer norms and products with biases, and a feed-forward network without a gate."""

from models.architecture import Activation, Architecture, Norms, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="starcoder2",
    rotation=Rotation(RopePairs.HALVES),
    norms=Norms(layer_norm=True),
    activation=Activation.GELU_ALONE,
)
