"""Decoders like Llama: they differ in how heads are rotated, and in norms, windows, factors and activations.

Biases, norms of heads, experts and layers without attention are recognised by a file's tensors, so many of these
entries differ only in name.
"""

import math
from dataclasses import replace

from models.architecture import (
    HALVES,
    NEIGHBOURS,
    Activation,
    Architecture,
    Experts,
    Norms,
    Scales,
    SelfAttention,
    inverse_root,
    stated,
    stated_gating,
    stated_windows,
    unstretched,
    windows,
)
from models.config import ModelConfig

_AFTER_ALONE = Norms(before=False, after=True)
OTHER_SECOND_NORM = Norms(feed_forward="post_attention_norm")
_LFM2_NORMS = Norms(output="token_embd_norm")
_ANY_SUM = Experts(normalise=False)  # weights that need not add up to one

_SMOLLM3_PERIOD = 4
_EXAONE_32B_LAYERS, _EXAONE_WINDOW = 64, 4096
_MINICPM_EMBEDDING, _MINICPM_RESIDUAL, _MINICPM_WIDTH = 12.0, 1.4, 256


def _smollm3_turns(config: ModelConfig, layer: int) -> bool:
    return (layer + 1) % _SMOLLM3_PERIOD != 0


_window_of_32b = windows(4, _EXAONE_WINDOW)


def _exaone4_window(config: ModelConfig, layer: int) -> int:
    return _window_of_32b(config, layer) if config.layers == _EXAONE_32B_LAYERS else 0


def _exaone4_turns(config: ModelConfig, layer: int) -> bool:
    return config.layers != _EXAONE_32B_LAYERS or _exaone4_window(config, layer) > 0


_cohere2_window = stated_windows(4)


def _cohere2_turns(config: ModelConfig, layer: int) -> bool:
    return _cohere2_window(config, layer) > 0


def _cohere2_logits(config: ModelConfig) -> float:
    return stated(config, "logit_scale", config.factors.logits) or 1.0


def _granite_embedding(config: ModelConfig) -> float:
    return config.factors.embedding or 1.0


def _granite_residual(config: ModelConfig) -> float:
    return config.factors.residual or 1.0


def _granite_attention(config: ModelConfig) -> float:
    return config.factors.attention or inverse_root(config)


def _granite_logits(config: ModelConfig) -> float:
    return 1.0 / stated(config, "logit_scale", config.factors.logits or None)


def _granite_turns(config: ModelConfig, layer: int) -> bool:
    return config.rope.finetuned


def _minicpm_embedding(config: ModelConfig) -> float:
    return _MINICPM_EMBEDDING if config.factors.embedding is None else config.factors.embedding or 1.0


def _minicpm_residual(config: ModelConfig) -> float:
    if config.factors.residual is None:
        return _MINICPM_RESIDUAL / math.sqrt(config.layers)
    return config.factors.residual or 1.0


def _minicpm_logits(config: ModelConfig) -> float:
    return 1.0 / (config.factors.logits or _MINICPM_WIDTH / config.embedding)


GRANITE = Architecture(
    "granite",
    replace(NEIGHBOURS, turns=_granite_turns),
    scales=Scales(_granite_embedding, _granite_residual, _granite_attention, _granite_logits),
)
MROPE = replace(HALVES, interleaved=True)

ARCHITECTURES = (
    # Llama 1 to 3, Mistral, TinyLlama, SmolLM, and Mixtral, which has experts.
    Architecture("llama", NEIGHBOURS),
    # Ministral 3 and Mistral 3: YaRN, and queries that grow with the logarithm of their position.
    Architecture("mistral3", NEIGHBOURS),
    # InternLM 2 and 2.5.
    Architecture("internlm2", NEIGHBOURS),
    # ERNIE 4.5: dense, and with experts after the first layers, which are chosen with a bias.
    Architecture("ernie4_5", NEIGHBOURS),
    Architecture("ernie4_5-moe", NEIGHBOURS),
    # GLM 4 (0414): norms before and after each sub-layer, gate and up in one tensor, half of a head rotated.
    Architecture("glm4", NEIGHBOURS, Norms(after=True)),
    # SmolLM 3: no rotation on every fourth layer.
    Architecture("smollm3", replace(NEIGHBOURS, turns=_smollm3_turns)),
    # Qwen 2 and 2.5: biases on queries, keys and values. With experts, the shared one has its own gate.
    Architecture("qwen2", HALVES),
    Architecture("qwen2moe", HALVES, experts=_ANY_SUM),
    # Qwen 3: RMSNorm of each head's queries and keys before rotation.
    Architecture("qwen3", HALVES),
    Architecture("qwen3moe", HALVES),
    # The language models of Qwen 2 VL, 2.5 VL and 3 VL: positions of images have three components (M-RoPE).
    Architecture("qwen2vl", HALVES),
    Architecture("qwen3vl", MROPE),
    Architecture("qwen3vlmoe", MROPE),
    # Phi 3 and 3.5: fused tensors, and rotation factors that depend on the context length.
    Architecture("phi3", HALVES),
    # Seed-OSS: biases on queries, keys and values, and another name for the second norm.
    Architecture("seed_oss", HALVES, OTHER_SECOND_NORM),
    # Hunyuan, and A13B with experts and a shared one: norms of heads after rotation.
    Architecture("hunyuan-dense", replace(HALVES, before_norms=True)),
    Architecture("hunyuan-moe", replace(HALVES, before_norms=True)),
    # OLMoE: norms over all queries and all keys together.
    Architecture("olmoe", HALVES, experts=_ANY_SUM),
    # OLMo 2 and 3: OLMoE's norms, and norms after sub-layers. In OLMo 3 three of four layers have a window and unscaled
    # rotation.
    Architecture(
        "olmo2", replace(HALVES, window_scaling=unstretched), _AFTER_ALONE, attention=SelfAttention(windows(4))
    ),
    # EXAONE 3 and 3.5; EXAONE 4, whose 32B model has a window, and rotation, in three of four layers only.
    Architecture("exaone", HALVES),
    Architecture(
        "exaone4", replace(HALVES, turns=_exaone4_turns), _AFTER_ALONE, attention=SelfAttention(_exaone4_window)
    ),
    # Granite 3 and 4 without states: the file states factors of embeddings, residuals, scores and logits, and whether
    # heads are rotated, which llama.cpp up to build 0.3.36 of its Python package heeds only for dense models.
    GRANITE,
    replace(GRANITE, name="granitemoe"),
    # MiniCPM 1 and 2: Granite's factors. Early files do not state them; the defaults are llama.cpp's.
    Architecture("minicpm", NEIGHBOURS, scales=Scales(_minicpm_embedding, _minicpm_residual, logits=_minicpm_logits)),
    # StarCoder 2: layer norms and products with biases, and a feed-forward network without a gate.
    Architecture("starcoder2", HALVES, Norms(layer_norm=True), activation=Activation.GELU_ALONE),
    # Phi 1 and 2: like StarCoder 2, with parallel sub-layers and partly rotated heads.
    Architecture(
        "phi2",
        HALVES,
        Norms(layer_norm=True, feed_forward="attn_norm"),
        activation=Activation.GELU_ALONE,
        parallel=True,
    ),
    # Apertus: norms of heads, and xIELU with per-layer factors.
    Architecture("apertus", HALVES, activation=Activation.XIELU_ALONE),
    # Command R7B and A: parallel sub-layers, layer norm, windows on three of four layers, and rotation only on those.
    Architecture(
        "cohere2",
        replace(NEIGHBOURS, turns=_cohere2_turns),
        Norms(layer_norm=True, feed_forward="attn_norm"),
        Scales(logits=_cohere2_logits),
        parallel=True,
        attention=SelfAttention(_cohere2_window),
    ),
    # LFM2: short convolutions in most layers, and norms of heads in attention layers. Experts, after the first layers,
    # are chosen with a bias that does not affect their weights.
    Architecture("lfm2", HALVES, _LFM2_NORMS, attention=SelfAttention(windows(0))),
    Architecture("lfm2moe", HALVES, _LFM2_NORMS, experts=Experts(stated_gating)),
)
