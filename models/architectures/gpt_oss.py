"""gpt-oss: attention sinks, a window on every other layer, experts with biases and a clamped gate.

The chosen experts' weights are a softmax over the chosen ones, which is the softmax over all of them normalised.
"""

from models.architecture import Activation, Architecture, Norms, RopePairs, Rotation, stated_windows

ARCHITECTURE = Architecture(
    name="gpt-oss",
    rotation=Rotation(RopePairs.HALVES),
    norms=Norms(feed_forward="post_attention_norm"),
    activation=Activation.CLAMPED,
    window=stated_windows(2),
)
