"""Models with states in slots: selective scans (Mamba-2) and gated delta networks, most with attention too."""

import math
from dataclasses import replace

from models.architecture import (
    HALVES,
    NEIGHBOURS,
    Activation,
    Architecture,
    Experts,
    Gating,
    Norms,
    Scales,
    SelfAttention,
    inverse_root,
    stated,
    stated_expert_scale,
    stated_gating,
)
from models.architectures.llama import GRANITE, MROPE, OTHER_SECOND_NORM
from models.config import ModelConfig


def _granite_logits(config: ModelConfig) -> float:
    return 1.0 / (config.factors.logits or 1.0)


def _nemotron_attention(config: ModelConfig) -> float:
    return config.factors.attention or inverse_root(config)


def _kimi_attention(config: ModelConfig) -> float:
    """1 / sqrt(head size), of heads as they are made from latents."""
    latents = stated(config, "attention.kv_lora_rank", config.attention.latents)
    return 1.0 / math.sqrt(latents.plain + latents.turned)


def _never(config: ModelConfig, layer: int) -> bool:
    return False


_QWEN35 = Architecture("qwen35", MROPE, OTHER_SECOND_NORM, attention=SelfAttention(gated=True), drafts=True)
_NEMOTRON_H = Architecture(
    "nemotron_h",
    replace(NEIGHBOURS, turns=_never),
    Norms(feed_forward="attn_norm"),
    Scales(attention=_nemotron_attention),
    activation=Activation.SQUARED_RELU_ALONE,
)

ARCHITECTURES = (
    Architecture("mamba2", HALVES),
    # Granite 4 H: like Granite, with scans in place of attention in most layers, with and without experts.
    replace(GRANITE, name="granitehybrid", scales=replace(GRANITE.scales, logits=_granite_logits)),
    # Falcon-H1: each layer has a scan beside attention, followed by a feed-forward network.
    Architecture("falcon-h1", HALVES, Norms(scans=False)),
    # Nemotron-H: each layer is a scan, attention without positions, or a network with squared ReLU; the second one has
    # experts and a shared one in place of these networks.
    _NEMOTRON_H,
    replace(
        _NEMOTRON_H,
        name="nemotron_h_moe",
        experts=Experts(gating=lambda config: Gating.SIGMOID, normalise=None, scale=stated_expert_scale),
        drafts=True,
    ),
    # Qwen 3.5, for text only: gated delta networks in most layers, and gated attention. With experts, the shared one
    # has its own gate. In Qwen3-Next value heads that share a key head are adjacent.
    _QWEN35,
    replace(_QWEN35, name="qwen35moe"),
    replace(_QWEN35, name="qwen3next", value_heads_together=True),
    # Kimi Linear: Kimi delta attention, in every fourth layer attention on latents without positions, and after the
    # first layer experts chosen with a bias, and a shared one.
    Architecture(
        "kimi-linear",
        replace(NEIGHBOURS, turns=_never),
        scales=Scales(attention=_kimi_attention),
        experts=Experts(stated_gating, scale=stated_expert_scale),
    ),
)
