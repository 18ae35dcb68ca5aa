"""The properties in which architectures differ. models.architectures declares the known architectures."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from models.config import ModelConfig
from models.errors import UnsupportedModelError
from models.sizes.attention import slides_in_period
from models.sizes.rope import RopeScaling

Factor = Callable[[ModelConfig], float]
Value = TypeVar("Value")


class RopePairs(Enum):
    """Which values of a head are rotated as a pair: 2i and 2i + 1, or i and i + half of the rotated values."""

    NEIGHBOURS = "neighbours"
    HALVES = "halves"


class Activation(Enum):
    """The feed-forward activation. SILU, GELU, RELU: that function of the gate, times up.

    CLAMPED (gpt-oss): a clamped, steeper SiLU of the gate, times 1 + the clamped up. GELU_ALONE, SQUARED_RELU_ALONE,
    XIELU_ALONE have no gate: GELU of up, squared RELU of up, or xIELU of up with per-layer factors.
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
        """Whether the network has a gate in addition to up."""
        return self not in (Activation.GELU_ALONE, Activation.SQUARED_RELU_ALONE, Activation.XIELU_ALONE)


class Gating(Enum):
    """How router scores become weights, numbered as in files: a softmax over all scores, or a sigmoid of each."""

    SOFTMAX = 1
    SIGMOID = 2


def one(config: ModelConfig) -> float:
    """No factor."""
    return 1.0


def inverse_root(config: ModelConfig) -> float:
    """The usual attention scale, 1 / sqrt(head size)."""
    return 1.0 / math.sqrt(config.attention.usual.size)


def root_of_width(config: ModelConfig) -> float:
    """Gemma's embedding factor, sqrt(width)."""
    return math.sqrt(config.embedding)


def full_width_scale(layers: int) -> Factor:
    """An attention scale of 1 / sqrt(embedding / heads) for the model with `layers` layers, else 1 / sqrt(head size).

    Gemma's largest models use the former.
    """

    def scale(config: ModelConfig) -> float:
        if config.layers == layers:
            return 1.0 / math.sqrt(config.embedding / config.attention.usual.queries)
        return inverse_root(config)

    return scale


def stated(config: ModelConfig, key: str, value: Value | None) -> Value:
    """A metadata value that the architecture requires. Raises UnsupportedModelError if the file lacks it."""
    if value is None:
        raise UnsupportedModelError(
            f"The file lacks {config.architecture}.{key}, which models of this architecture need. "
            f"Convert the model again or use another version of it."
        )
    return value


def stated_gating(config: ModelConfig) -> Gating:
    """The gating that the file states. Raises UnsupportedModelError if it states none, or an unknown one."""
    number = stated(config, "expert_gating_func", config.experts and config.experts.gating)
    known = {gating.value: gating for gating in Gating}
    if number not in known:
        raise UnsupportedModelError(
            f"{config.architecture}.expert_gating_func is {number}, which the native engine does not compute.",
            remedy="llama.cpp may: use --backend llama.",
        )
    return known[number]


def stated_expert_scale(config: ModelConfig) -> float:
    """The factor of expert weights that the file states, else 1."""
    return (config.experts and config.experts.scale) or 1.0


def _sees_all(config: ModelConfig, layer: int) -> int:
    return 0


def windows(period: int, default: int = 0) -> Callable[[ModelConfig, int], int]:
    """Sliding windows, as wide as the file states, or `default`, on the layers that have one.

    If the file does not say which, all but every `period`-th; with a period of 0, all.
    """

    def window(config: ModelConfig, layer: int) -> int:
        sizes = config.attention
        slides = slides_in_period(period, layer) if sizes.windowed is None else sizes.windowed[layer]
        return (default if sizes.window is None else sizes.window) if slides else 0

    return window


def stated_windows(period: int) -> Callable[[ModelConfig, int], int]:
    """Like `windows`, but the file must state the width."""
    of_layer = windows(period)

    def window(config: ModelConfig, layer: int) -> int:
        stated(config, "attention.sliding_window", config.attention.window)
        return of_layer(config, layer)

    return window


def unscaled(scaling: RopeScaling) -> RopeScaling:
    """The same rotation without frequency scaling, for sliding-window layers."""
    return replace(scaling, kind="none")


def unstretched(scaling: RopeScaling) -> RopeScaling:
    """The same rotation without frequency scaling and without an attention factor."""
    return replace(scaling, kind="none", attention_factor=1.0)


def _softmax(config: ModelConfig) -> Gating:
    return Gating.SOFTMAX


def _no_layer(config: ModelConfig, layer: int) -> bool:
    return False


def _every_layer(config: ModelConfig, layer: int) -> bool:
    return True


def _unchanged(scaling: RopeScaling) -> RopeScaling:
    return scaling


@dataclass(frozen=True)
class Rotation:
    """RoPE settings.

    turns(config, layer): whether a layer's heads are rotated at all. scaling: changes the file's scaling before the
    magnitude of rotated values is computed from it. window_base: base of sliding-window layers if the file states none
    (rope.freq_base_swa); None for the base of the other layers. window_scaling: changes the file's scaling for
    sliding-window layers. before_norms: heads are rotated before they are normalised. interleaved: pairs take the
    components of an image's positions in turn, not section after section.
    """

    pairs: RopePairs
    turns: Callable[[ModelConfig, int], bool] = field(default=_every_layer)
    scaling: Callable[[RopeScaling], RopeScaling] = field(default=_unchanged)
    window_base: float | None = None
    window_scaling: Callable[[RopeScaling], RopeScaling] = field(default=_unchanged)
    before_norms: bool = False
    interleaved: bool = False

    def components(self, sections: Sequence[int], pairs: int) -> NDArray[np.int64]:
        """Which component of a position (0 time, 1 row, 2 column) rotates each pair: int64[pairs].

        sections: pairs of each component, of a model with M-RoPE (Qwen2-VL, Wang et al., 2024), else empty.
        """
        number = np.arange(pairs) % max(sum(sections), 1)
        if not self.interleaved or not sections:
            return np.searchsorted(np.cumsum(sections[:2]), number, side="right") if sections else np.zeros_like(number)
        turn = number % len(sections[:3])
        return np.where(number < 3 * np.array(sections[:3])[turn], turn, 0)


NEIGHBOURS, HALVES = Rotation(RopePairs.NEIGHBOURS), Rotation(RopePairs.HALVES)
"""The same rotation in all layers, with the file's scaling."""


@dataclass(frozen=True)
class Norms:
    """Which norms a layer has, and the names of their tensors.

    layer_norm: LayerNorm, with biases if the file has them, instead of RMSNorm. before, after: norms of a sub-layer's
    input, and of its output. first: whether the first layer's attention requires a norm of its input. sums: norms of
    the residual stream after a sub-layer's output was added. feed_forward, output: tensors of the norms before the
    feed-forward network and before logits; attention_sum, feed_forward_sum: those of sums. scans: whether a selective
    scan's output must be normalised; if False, it is normalised only if the file has that norm.
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
    """Constant factors of embeddings, of sub-layer outputs, of attention scores, and of logits."""

    embedding: Factor = one
    residual: Factor = one
    attention: Factor = inverse_root
    logits: Factor = one


@dataclass(frozen=True)
class Experts:
    """How a row's experts are chosen and weighted.

    normalise: whether weights are scaled to add up to one; None for what the file states. scale: their factor after
    that. beside: a dense network works on the same rows; it, the experts and the router each have norms of their own.
    early: the router reads the input of the layer's attention, before its norm. of_inputs: weights multiply the inputs
    of experts instead of their outputs.
    """

    gating: Callable[[ModelConfig], Gating] = field(default=_softmax)
    normalise: bool | None = True
    scale: Factor = one
    beside: bool = False
    early: bool = False
    of_inputs: bool = False


@dataclass(frozen=True)
class SelfAttention:
    """What a row attends to, and how."""

    # Tokens that a row of the layer sees, its own included; 0 for all.
    window: Callable[[ModelConfig, int], int] = field(default=_sees_all)
    # A window is a chunk: a text is divided into chunks of that size, and a row sees those tokens of its own.
    chunked: bool = False
    # A row sees only itself and rows before it, unless the file says otherwise; if not causal, half of a window is
    # before the row and half behind it.
    causal: bool = True
    # Rows of an image that see each other do so in layers with a window only.
    images_in_windows: bool = False
    # The soft cap of scores if the file states none.
    cap: float = 0.0
    # Scores decrease with token distance (ALiBi, Press et al., 2022), with slopes down to 2^-alibi; 0 for none.
    alibi: float = 0.0
    # Whether a layer's query and key heads are normalised without weights.
    plain_head_norms: Callable[[ModelConfig, int], bool] = field(default=_no_layer)
    # Value heads are normalised like query and key heads, but without weights; a layer without a value tensor uses its
    # key tensor for both.
    value_norms: bool = False
    # The query projection also computes gates of attention's output.
    gated: bool = False
    # A projection of attention's input gives gates, one per head or per value; attention's output is multiplied by
    # their softplus.
    softplus_gates: bool = False


@dataclass(frozen=True)
class Architecture:
    """A transformer with grouped-query attention and a feed-forward network, in each layer one after the other.

    Layers without key-value heads in the file have a short convolution, a gated delta network or a selective scan in
    place of attention; some architectures have layers with attention beside a scan, or with only a mixer or only a
    network. If the file states the size of a latent, attention works on latents.

    Biases, norms of heads (of each, or of all together), attention sinks, tied embeddings, fused tensors, experts and
    shared experts are recognised by their tensors.
    """

    name: str
    rotation: Rotation
    norms: Norms = Norms()
    scales: Scales = Scales()
    attention: SelfAttention = SelfAttention()
    activation: Activation = Activation.SILU
    # Activations by the names that files may state.
    stated_activations: Mapping[str, Activation] = field(default_factory=dict)
    experts: Experts = Experts()
    # The feed-forward network reads attention's input instead of its output.
    parallel: bool = False
    # The soft cap of logits if the file states none.
    logit_cap: float = 0.0
    # Value heads of a delta network that share a key head are adjacent instead of interleaved.
    value_heads_together: bool = False
    # The layers for multi-token prediction, behind the last one, are supported (models/prediction_layer.py).
    drafts: bool = False
