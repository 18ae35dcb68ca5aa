"""What tells one decoder architecture from another. Each known one is a file of this package named after it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.config import ModelConfig


class RopePairs(Enum):
    """Which values of a head turn together."""

    NEIGHBOURS = "neighbours"
    HALVES = "halves"


class Gate(Enum):
    """The activation in the gated feed-forward network."""

    SILU = "silu"
    GELU = "gelu"


def _every_layer(config: "ModelConfig", layer: int) -> bool:
    return False


def _inverse_root(config: "ModelConfig") -> float:
    return 1.0 / math.sqrt(config.head_size)


def full_width_scale(layers: int) -> Callable[["ModelConfig"], float]:
    """An attention scale by the width that heads would have if they filled the embedding, for the model of `layers`.

    Gemma's largest models are scaled like that; all others by the size of a head.
    """

    def scale(config: "ModelConfig") -> float:
        if config.layers == layers:
            return 1.0 / math.sqrt(config.embedding / config.heads)
        return _inverse_root(config)

    return scale


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder with grouped-query attention and a gated feed-forward network, and its variations.

    Biases, norms of heads, norms after a sub-layer, tied embeddings and experts are recognised by the presence of
    their tensors. slides(config, layer): whether a layer attends to the sliding window only. attention_scale(config):
    factor of the scores. local_rope_base: base of the sliding layers' rotation where it differs. fused: the file
    stores q, k, v in one tensor, and gate, up in another. normalise_experts: chosen experts' weights add up to one.
    """

    name: str
    rope_pairs: RopePairs
    gate: Gate = Gate.SILU
    scale_embeddings: bool = False
    slides: Callable[["ModelConfig", int], bool] = field(default=_every_layer)
    attention_scale: Callable[["ModelConfig"], float] = field(default=_inverse_root)
    local_rope_base: float | None = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    fused: bool = False
    normalise_experts: bool = True
