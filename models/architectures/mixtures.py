"""Mixtures of experts that do not weight experts by a plain softmax over all of them."""

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
    stated,
    stated_expert_scale,
    stated_gating,
    stated_windows,
    unstretched,
    windows,
)
from models.config import ModelConfig
from models.layers.rope import magnitude
from models.sizes.attention import ALL_FIRST, slides_in_period
from models.sizes.rope import RopeScaling

# Layers and vocabulary of GLM 4.7 Flash, to recognise its early files, which state no gating.
_GLM_FLASH_LAYERS, _GLM_FLASH_VOCABULARY = (47, 48), 154_880
_SMALLTHINKER_WINDOW = 4096


def _deepseek2_gating(config: ModelConfig) -> Gating:
    if config.experts and config.experts.gating:
        return stated_gating(config)
    is_glm = config.layers in _GLM_FLASH_LAYERS and config.vocabulary == _GLM_FLASH_VOCABULARY
    return Gating.SIGMOID if is_glm else Gating.SOFTMAX


def _unsharpened(scaling: RopeScaling) -> RopeScaling:
    """Rotation without YaRN's magnitude if the file states a multiplier; the attention scale includes it instead."""
    return replace(scaling, log_multiplier=1.0 if scaling.log_multiplier else 0.0)


def _deepseek2_attention(config: ModelConfig) -> float:
    """1 / sqrt(head size), of heads as they are made from latents, times YaRN's sharpening squared.

    Files state a tenth of the sharpening's multiplier. Raises UnsupportedModelError for a file without latents.
    """
    latents = stated(config, "attention.kv_lora_rank", config.attention.latents)
    scaling = config.rope.scaling
    stretch = math.log(scaling.factor) if scaling.kind != "none" else 0.0
    sharpening = magnitude(_unsharpened(scaling)) * (1.0 + scaling.log_multiplier * stretch)
    return sharpening**2 / math.sqrt(latents.plain + latents.turned)


def _glm4_gating(config: ModelConfig) -> Gating:
    return stated_gating(config) if config.experts and config.experts.gating else Gating.SIGMOID


def _sigmoid(config: ModelConfig) -> Gating:
    return Gating.SIGMOID


_LLAMA4_PERIOD, _EXPERTS_OF_MAVERICK = 4, 128


def _llama4_turns(config: ModelConfig, layer: int) -> bool:
    return slides_in_period(_LLAMA4_PERIOD, layer)


def _llama4_norms(config: ModelConfig, layer: int) -> bool:
    """Heads are normalised where they are rotated, except in the model with 128 experts."""
    maverick = config.experts is not None and config.experts.count == _EXPERTS_OF_MAVERICK
    return not maverick and _llama4_turns(config, layer)


_window_of_file = windows(ALL_FIRST["smallthinker"])


def _smallthinker_window(config: ModelConfig, layer: int) -> int:
    """The window of all layers but the first of each four, unless the file lists them; the width is llama.cpp's."""
    return _SMALLTHINKER_WINDOW if _window_of_file(config, layer) else 0


def _smallthinker_turns(config: ModelConfig, layer: int) -> bool:
    return not config.attention.window or slides_in_period(ALL_FIRST["smallthinker"], layer, all_first=True)


ARCHITECTURES = (
    # DeepSeek 2 and 3, Moonlight, GLM 4.7 Flash: attention on latents, experts in groups, and a shared expert.
    Architecture(
        "deepseek2",
        replace(NEIGHBOURS, scaling=_unsharpened),
        scales=Scales(attention=_deepseek2_attention),
        experts=Experts(_deepseek2_gating, normalise=None, scale=stated_expert_scale),
        drafts=True,
    ),
    # GLM 4.5 and 4.6: after the first layers, experts chosen with a bias, and a shared one.
    Architecture(
        "glm4moe",
        HALVES,
        Norms(feed_forward="post_attention_norm"),
        experts=Experts(_glm4_gating, normalise=None, scale=stated_expert_scale),
        drafts=True,
    ),
    # Ling 1 and 1.5: experts and a shared one.
    Architecture("bailingmoe", NEIGHBOURS, experts=Experts(normalise=None, scale=stated_expert_scale)),
    # Ling 2: GLM 4.5's experts with one tensor for queries, keys and values.
    Architecture("bailingmoe2", HALVES, experts=Experts(stated_gating, normalise=None, scale=stated_expert_scale)),
    # Laguna: GLM 4.5's experts, and gates of attention's output. Three of four layers have a window, another number of
    # heads, and their own rotation.
    Architecture(
        "laguna",
        replace(HALVES, window_scaling=unstretched),
        experts=Experts(_glm4_gating, normalise=None, scale=stated_expert_scale),
        attention=SelfAttention(windows(ALL_FIRST["laguna"]), softplus_gates=True),
    ),
    # gpt-oss: attention sinks, a window in every other layer, experts with biases and a clamped gate. Weights are a
    # softmax over the chosen experts, which equals the normalised softmax over all of them.
    Architecture(
        "gpt-oss",
        HALVES,
        Norms(feed_forward="post_attention_norm"),
        activation=Activation.CLAMPED,
        attention=SelfAttention(stated_windows(2)),
    ),
    # Llama 4: three of four layers see a chunk of 8,192 tokens and normalise rotated heads; the others see all tokens,
    # without rotation, with queries that grow with the position. One expert and a shared one, whose weight multiplies
    # the input, in all layers or every other.
    Architecture(
        "llama4",
        replace(NEIGHBOURS, turns=_llama4_turns, scaling=unstretched),
        experts=Experts(_sigmoid, normalise=False, of_inputs=True),
        attention=SelfAttention(windows(_LLAMA4_PERIOD), chunked=True, plain_head_norms=_llama4_norms),
    ),
    # SmallThinker: experts with ReLU, chosen before attention; every fourth layer has no window and no rotation.
    Architecture(
        "smallthinker",
        replace(HALVES, turns=_smallthinker_turns),
        activation=Activation.RELU,
        experts=Experts(stated_gating, scale=stated_expert_scale, early=True),
        attention=SelfAttention(_smallthinker_window),
    ),
)
