"""What tells one decoder architecture from another. The known ones are in models.architectures."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from models.config import ModelConfig
from models.errors import UnsupportedModelError
from models.layer_sizes import slides_in_period
from models.rope_config import RopeScaling

Factor = Callable[[ModelConfig], float]
Value = TypeVar("Value")


class RopePairs(Enum):
    """Which values of a head turn together."""

    NEIGHBOURS = "neighbours"
    HALVES = "halves"


class Activation(Enum):
    """The feed-forward network between its products: SILU, GELU and RELU of the gate, times up.

    CLAMPED is gpt-oss's: a clamped, steeper SiLU, times 1 + a clamped up. GELU_ALONE, SQUARED_RELU_ALONE, XIELU_ALONE:
    there is no gate, but GELU of up, the square of RELU of up, or xIELU of up with factors of the layer's own.
    """

    SILU = "silu"
    GELU = "gelu"
    CLAMPED = "clamped"
    GELU_ALONE = "gelu alone"
    RELU = "relu"
    SQUARED_RELU_ALONE = "squared relu alone"
    XIELU_ALONE = "xielu alone"

    @property
    def gated(self) -> bool:
        """Whether the network has a gate beside up."""
        return self not in (Activation.GELU_ALONE, Activation.SQUARED_RELU_ALONE, Activation.XIELU_ALONE)


class Gating(Enum):
    """What makes weights of experts' scores, numbered as files do: a softmax over all of them, or a sigmoid of each."""

    SOFTMAX = 1
    SIGMOID = 2


def one(config: ModelConfig) -> float:
    """No factor."""
    return 1.0


def inverse_root(config: ModelConfig) -> float:
    """The usual scale of scores, by the size of a head."""
    return 1.0 / math.sqrt(config.head_size)


def root_of_width(config: ModelConfig) -> float:
    """Gemma's factor of embeddings."""
    return math.sqrt(config.embedding)


def full_width_scale(layers: int) -> Factor:
    """An attention scale by the width that heads would have if they filled the embedding, for the model of `layers`.

    Gemma's largest models are scaled like that; all others by the size of a head.
    """

    def scale(config: ModelConfig) -> float:
        if config.layers == layers:
            return 1.0 / math.sqrt(config.embedding / config.heads)
        return inverse_root(config)

    return scale


def stated(config: ModelConfig, key: str, value: Value | None) -> Value:
    """A value of the metadata that an architecture cannot do without.

    Raises UnsupportedModelError where the file lacks it.
    """
    if value is None:
        raise UnsupportedModelError(
            f"The file lacks {config.architecture}.{key}, which models of this architecture need. "
            f"Convert the model again or get another edition of it."
        )
    return value


def stated_gating(config: ModelConfig) -> Gating:
    """The gating that the file states. Raises UnsupportedModelError where it states none, or an unknown one."""
    number = stated(config, "expert_gating_func", config.gating)
    known = {gating.value: gating for gating in Gating}
    if number not in known:
        raise UnsupportedModelError(
            f"{config.architecture}.expert_gating_func is {number}, which the native engine does not compute. "
            f"The llama.cpp backend may: use --backend llama."
        )
    return known[number]


def stated_expert_scale(config: ModelConfig) -> float:
    """The factor of experts' weights that the file states, if any."""
    return config.expert_scale or 1.0


def _sees_all(config: ModelConfig, layer: int) -> int:
    return 0


def windows(period: int, default: int = 0, *, all_first: bool = False) -> Callable[[ModelConfig, int], int]:
    """Windows on all layers but every `period`-th, unless the file says which; as wide as the file says, or `default`.

    A period of 0 gives every layer a window. all_first: of each period the first layer has none, instead of the last.
    """

    def window(config: ModelConfig, layer: int) -> int:
        pattern = period if config.window_pattern is None else config.window_pattern
        slides = pattern[layer] if isinstance(pattern, tuple) else slides_in_period(pattern, layer, all_first)
        return (default if config.window is None else config.window) if slides else 0

    return window


def stated_windows(period: int) -> Callable[[ModelConfig, int], int]:
    """As `windows`, for files that must say how wide they are."""
    of_layer = windows(period)

    def window(config: ModelConfig, layer: int) -> int:
        stated(config, "attention.sliding_window", config.window)
        return of_layer(config, layer)

    return window


def unscaled(scaling: RopeScaling) -> RopeScaling:
    """Rotation of the same base without scaling, which layers with a window have."""
    return replace(scaling, kind="none")


def unstretched(scaling: RopeScaling) -> RopeScaling:
    """The same without the factor of what is rotated either."""
    return replace(scaling, kind="none", attention_factor=1.0)


def _softmax(config: ModelConfig) -> Gating:
    return Gating.SOFTMAX


def _every_layer(config: ModelConfig, layer: int) -> bool:
    return True


def _unchanged(scaling: RopeScaling) -> RopeScaling:
    return scaling


@dataclass(frozen=True)
class Rotation:
    """RoPE settings.

    turns(config, layer): whether a layer's heads are rotated at all. scaling: what the magnitude of what is rotated
    makes of the file's scaling. window_base: base of layers with a window where
    the file states none (rope.freq_base_swa); None is the base of the other layers. window_scaling: what those layers
    make of the file's scaling. before_norms: the heads' norms come after the rotation.
    """

    pairs: RopePairs
    turns: Callable[[ModelConfig, int], bool] = field(default=_every_layer)
    scaling: Callable[[RopeScaling], RopeScaling] = field(default=_unchanged)
    window_base: float | None = None
    window_scaling: Callable[[RopeScaling], RopeScaling] = field(default=_unchanged)
    before_norms: bool = False


NEIGHBOURS, HALVES = Rotation(RopePairs.NEIGHBOURS), Rotation(RopePairs.HALVES)
"""The same for all layers, as the file scales it."""


@dataclass(frozen=True)
class Norms:
    """Where a layer normalises its rows of embeddings.

    layer_norm: by mean and variance, with biases where the file has them; else by the root mean square. before, after:
    what goes into a sub-layer, and what comes out of it. first: whether the first layer's attention must have one
    before it. sums: the rows themselves, once what a sub-layer found was added to them. feed_forward, output: the
    tensors before the feed-forward network and before logits; attention_sum, feed_forward_sum: those of sums. scans:
    whether what a selective scan gives must be normalised; else it is where the file has that norm.
    """

    layer_norm: bool = False
    before: bool = True
    first: bool = True
    after: bool = False
    sums: bool = False
    feed_forward: str = "ffn_norm"
    output: str = "output_norm"
    attention_sum: str = "attn_output_norm"
    feed_forward_sum: str = "layer_output_norm"
    scans: bool = True


@dataclass(frozen=True)
class Scales:
    """Constant factors of embeddings, of what a sub-layer adds to the residual stream, of scores, and of logits."""

    embedding: Factor = one
    residual: Factor = one
    attention: Factor = inverse_root
    logits: Factor = one


@dataclass(frozen=True)
class Experts:
    """How the weights of a row's experts come about.

    normalise: whether they add up to one, None for what the file states. scale: their factor after that. beside: a
    dense network works on the same rows, each of the two has norms of its own, and the router has one of its own too.
    early: they are chosen by what goes into a layer's attention, before its norm.
    """

    gating: Callable[[ModelConfig], Gating] = field(default=_softmax)
    normalise: bool | None = True
    scale: Factor = one
    beside: bool = False
    early: bool = False


@dataclass(frozen=True)
class Architecture:
    """A transformer with grouped-query attention and a feed-forward network, in each layer one after the other.

    Layers that the file gives no key-value heads have a short convolution in place of attention, a gated delta network
    or a selective scan; in some architectures layers have attention beside a scan, or only one of mixer and network.
    Where the file states the size of a latent, attention is on latents. gated_attention: queries come with a gate of
    what attention gives. softplus_gates: what attention reads also makes gates, one a head or one a value, by whose
    softplus what attention gives is multiplied. value_heads_together: value heads of a delta network that share a key
    head follow each other, instead of taking turns.

    Biases, norms of heads (of each, or of all together), attention sinks, tied embeddings, fused tensors, experts and
    shared experts are recognised by their tensors. stated_activations: those that files may name instead. parallel: the
    feed-forward network reads what attention reads, instead of what it gave. window(config, layer): tokens that a row
    of the layer sees, its own included; 0 for all. attention_cap, logit_cap: soft caps where the file states none.
    value_norms: heads of values are normalised, as those of queries and keys, but without weights; a layer without a
    tensor for values makes them of its keys'. causal: a row sees only rows before it, unless the file says otherwise;
    where it sees all of its text, a window lies half before and half behind it. alibi: scores fall with the distance of
    two tokens (ALiBi, Press et al., 2022), by so many powers of two from the first head to the last; 0 for not at all.
    drafts: how layers behind the last one predict further tokens is known (models/prediction_layer.py).
    """

    name: str
    rotation: Rotation
    norms: Norms = Norms()
    scales: Scales = Scales()
    activation: Activation = Activation.SILU
    stated_activations: Mapping[str, Activation] = field(default_factory=dict)
    experts: Experts = Experts()
    parallel: bool = False
    window: Callable[[ModelConfig, int], int] = field(default=_sees_all)
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    value_norms: bool = False
    causal: bool = True
    alibi: float = 0.0
    gated_attention: bool = False
    softplus_gates: bool = False
    value_heads_together: bool = False
    drafts: bool = False
