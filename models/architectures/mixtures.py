"""Mixtures of experts whose weights come about in another way than by a softmax over all."""

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
    stated,
    stated_expert_scale,
    stated_gating,
    stated_windows,
    unstretched,
    windows,
)
from models.config import ModelConfig
from models.layer_sizes import ALL_FIRST, slides_in_period
from models.rope_config import RopeScaling
from models.rope_tables import magnitude

# GLM 4.7 Flash, whose first files state no gating: its layers and its vocabulary.
_GLM_FLASH_LAYERS, _GLM_FLASH_VOCABULARY = (47, 48), 154_880
_SMALLTHINKER_WINDOW, _SMALLTHINKER_PERIOD = 4096, 4


def _deepseek2_gating(config: ModelConfig) -> Gating:
    if config.gating:
        return stated_gating(config)
    is_glm = config.layers in _GLM_FLASH_LAYERS and config.vocabulary == _GLM_FLASH_VOCABULARY
    return Gating.SIGMOID if is_glm else Gating.SOFTMAX


def _unsharpened(scaling: RopeScaling) -> RopeScaling:
    """What is rotated keeps its size where the file states a multiplier: then scores are sharpened instead."""
    return replace(scaling, log_multiplier=1.0 if scaling.log_multiplier else 0.0)


def _deepseek2_attention(config: ModelConfig) -> float:
    """By the size of a head before latents, and YaRN's sharpening; files state a tenth of its multiplier.

    Raises UnsupportedModelError for a file without latents.
    """
    latents = stated(config, "attention.kv_lora_rank", config.latents)
    scaling = config.rope_scaling
    stretch = math.log(scaling.factor) if scaling.kind != "none" else 0.0
    sharpening = magnitude(_unsharpened(scaling)) * (1.0 + scaling.log_multiplier * stretch)
    return sharpening**2 / math.sqrt(latents.plain + latents.turned)


def _glm4_gating(config: ModelConfig) -> Gating:
    return stated_gating(config) if config.gating else Gating.SIGMOID


def _smallthinker_window(config: ModelConfig, layer: int) -> int:
    """Of all layers but the first of four, unless the file says which; llama.cpp knows one width."""
    if not config.window:
        return 0
    pattern = _SMALLTHINKER_PERIOD if config.window_pattern is None else config.window_pattern
    slides = pattern[layer] if isinstance(pattern, tuple) else slides_in_period(pattern, layer, True)
    return _SMALLTHINKER_WINDOW if slides else 0


def _smallthinker_turns(config: ModelConfig, layer: int) -> bool:
    return not config.window or layer % _SMALLTHINKER_PERIOD != 0


ARCHITECTURES = (
    # DeepSeek 2 and 3, Moonlight, GLM 4.7 Flash: attention on latents, and experts in groups beside a shared one.
    Architecture(
        "deepseek2",
        replace(NEIGHBOURS, scaling=_unsharpened),
        scales=Scales(attention=_deepseek2_attention),
        experts=Experts(_deepseek2_gating, normalise=None, scale=stated_expert_scale),
        drafts=True,
    ),
    # GLM 4.5 and 4.6: experts behind the first layers beside a shared one, chosen with a bias.
    Architecture(
        "glm4moe",
        HALVES,
        Norms(feed_forward="post_attention_norm"),
        experts=Experts(_glm4_gating, normalise=None, scale=stated_expert_scale),
        drafts=True,
    ),
    # Ling 1 and 1.5: experts beside a shared one.
    Architecture("bailingmoe", NEIGHBOURS, experts=Experts(normalise=None, scale=stated_expert_scale)),
    # Ling 2: GLM 4.5's experts with one tensor for queries, keys and values.
    Architecture("bailingmoe2", HALVES, experts=Experts(stated_gating, normalise=None, scale=stated_expert_scale)),
    # Laguna: GLM 4.5's experts, and gates of what attention gives. Three of four layers have a window, other numbers of
    # heads, and a rotation of their own.
    Architecture(
        "laguna",
        replace(HALVES, window_scaling=unstretched),
        experts=Experts(_glm4_gating, normalise=None, scale=stated_expert_scale),
        window=windows(ALL_FIRST["laguna"], all_first=True),
        softplus_gates=True,
    ),
    # gpt-oss: attention sinks, a window on every other layer, experts with biases and a clamped gate. The chosen ones'
    # weights are a softmax over the chosen ones, which is the softmax over all of them normalised.
    Architecture(
        "gpt-oss",
        HALVES,
        Norms(feed_forward="post_attention_norm"),
        activation=Activation.CLAMPED,
        window=stated_windows(2),
    ),
    # SmallThinker: experts with ReLU, chosen before attention; every fourth layer sees all and is not rotated.
    Architecture(
        "smallthinker",
        replace(HALVES, turns=_smallthinker_turns),
        activation=Activation.RELU,
        experts=Experts(stated_gating, scale=stated_expert_scale, early=True),
        window=_smallthinker_window,
    ),
)
