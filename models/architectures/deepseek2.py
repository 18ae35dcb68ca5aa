"""DeepSeek 2 and 3, Moonlight, GLM 4.7 Flash: attention on latents, and experts in groups beside a shared one."""

import math
from dataclasses import replace

from models.architecture import (
    Architecture,
    Experts,
    Gating,
    RopePairs,
    Rotation,
    Scales,
    stated,
    stated_expert_scale,
    stated_gating,
)
from models.config import ModelConfig
from models.rope_config import RopeScaling
from models.rope_tables import magnitude

# GLM 4.7 Flash, whose first files state no gating: its layers and its vocabulary.
_GLM_LAYERS, _GLM_VOCABULARY = (47, 48), 154_880


def _gating(config: ModelConfig) -> Gating:
    if config.gating:
        return stated_gating(config)
    is_glm = config.layers in _GLM_LAYERS and config.vocabulary == _GLM_VOCABULARY
    return Gating.SIGMOID if is_glm else Gating.SOFTMAX


def _unsharpened(scaling: RopeScaling) -> RopeScaling:
    """What is rotated keeps its size where the file states a multiplier: then scores are sharpened instead."""
    return replace(scaling, log_multiplier=1.0 if scaling.log_multiplier else 0.0)


def _attention_scale(config: ModelConfig) -> float:
    """By the size of a head before latents, and YaRN's sharpening; files state a tenth of its multiplier.

    Raises UnsupportedModelError for a file without latents.
    """
    latents = stated(config, "attention.kv_lora_rank", config.latents)
    scaling = config.rope_scaling
    stretch = math.log(scaling.factor) if scaling.kind != "none" else 0.0
    sharpening = magnitude(_unsharpened(scaling)) * (1.0 + scaling.log_multiplier * stretch)
    return sharpening**2 / math.sqrt(latents.plain + latents.turned)


ARCHITECTURE = Architecture(
    name="deepseek2",
    rotation=Rotation(RopePairs.NEIGHBOURS, scaling=_unsharpened),
    scales=Scales(attention=_attention_scale),
    experts=Experts(_gating, normalise=None, scale=stated_expert_scale),
)
