"""Rules for each family of models: what its configuration and its tensors become in GGUF.

Names of tensors are gguf's own table (gguf.tensor_mapping). A family says what that table does not: the architecture,
how heads turn, and the keys that only it has. Keys and their meaning: llama.cpp's gguf-py/gguf/constants.py and
convert_hf_to_gguf.py. What a rule does not know is refused, since a model that is nearly right is wrong.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.importing.errors import CheckpointError
from localllm.text import shortened

Keys = dict[str, Any]
_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")


class Config:
    """A configuration, of which every value is checked when it is read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number. Raises CheckpointError."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.where}: {name} should be a number and is {shortened(repr(value))}.")
        return float(value)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number that is not negative. Raises CheckpointError."""
        value = self.number(name, default)
        if value != int(value) or not 0 <= value < 1 << 32:
            raise CheckpointError(f"{self.where}: {name} should be a whole number and is {value:g}.")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A truth value; null is the default. Raises CheckpointError."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} should be true or false and is {shortened(repr(value))}.")
        return value

    def table(self, name: str) -> "Config":
        """An object, empty where there is none. Raises CheckpointError."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name} should be an object and is {shortened(repr(value))}.")
        return Config(value, f"{self.where}: {name}")

    def numbers(self, name: str) -> list[float]:
        """A list of finite numbers. Raises CheckpointError."""
        value = self.values.get(name)
        if not isinstance(value, list):
            raise CheckpointError(f"{self.where}: {name} should be a list and is {shortened(repr(value))}.")
        return [Config({name: each}, self.where).number(name) for each in value]

    def texts(self, name: str) -> list[str]:
        """A list of texts. Raises CheckpointError."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise CheckpointError(f"{self.where}: {name} should be a list of texts and is {shortened(repr(value))}.")
        return value

    def expect(self, name: str, *values: Any) -> None:
        """Raise CheckpointError unless a value is missing or one of these: the engine computes no others."""
        if (value := self.values.get(name)) is not None and value not in values:
            known = " or ".join(map(str, values))
            raise CheckpointError(f"{self.where}: {name} is {shortened(repr(value))}; only {known} can be imported.")

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.whole("head_dim", self.whole("hidden_size") // max(self.whole("num_attention_heads"), 1))

    @property
    def layers(self) -> int:
        """Layers."""
        return self.whole("num_hidden_layers")

    def rope(self, kind: str | None = None) -> "Config":
        """How heads turn, wherever it is stated. kind: of which layers, where they differ."""
        stated = self.table("rope_parameters")
        if kind in stated.values:
            stated = stated.table(str(kind))
        old = self.table("rope_scaling")
        base = {"rope_theta": self.values["rope_theta"]} if "rope_theta" in self.values else {}
        return Config({**base, **old.values, **stated.values}, f"{self.where}: rope_parameters")


@dataclass(frozen=True)
class Family:
    """architecture: by GGUF's name. keys: those of the family alone, without the architecture's prefix.

    permuted: heads turn in halves and are stored to turn in neighbours. shifted_norms: norms lack the one that is added
    to them. activations: what the engine computes for this architecture. renamed: patterns of names that gguf's table
    has otherwise, and what they become. rope: of which kind of layers the usual base is. rotary: the share of a head
    that turns, where the configuration does not say. window_is_context: every layer has the window that is stated.
    """

    architecture: str
    keys: Callable[[Config], Keys] = lambda _config: {}
    permuted: bool = False
    shifted_norms: bool = False
    activations: tuple[str, ...] = _SILU
    renamed: tuple[tuple[str, str], ...] = ()
    rope: str | None = None
    rotary: float = 1.0
    window_is_context: bool = False


def _experts(config: Config) -> Keys:
    count = config.whole("num_experts", config.whole("num_local_experts", 0))
    keys: Keys = {"expert_count": count, "expert_used_count": config.whole("num_experts_per_tok")}
    if "moe_intermediate_size" in config.values:
        keys["expert_feed_forward_length"] = config.whole("moe_intermediate_size")
    return keys


def _qwen3_moe(config: Config) -> Keys:
    config.expect("norm_topk_prob", True)
    config.expect("decoder_sparse_step", 1)
    config.expect("mlp_only_layers", [])
    return _experts(config)


def _qwen2_moe(config: Config) -> Keys:
    config.expect("norm_topk_prob", False)
    config.expect("decoder_sparse_step", 1)
    config.expect("mlp_only_layers", [])
    shared = config.whole("shared_expert_intermediate_size")
    return {**_experts(config), "expert_shared_feed_forward_length": shared}


def _olmoe(config: Config) -> Keys:
    config.expect("norm_topk_prob", False)
    config.expect("clip_qkv")
    return _experts(config)


def _gemma2(config: Config) -> Keys:
    return {
        "attn_logit_softcapping": config.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": config.number("final_logit_softcapping", 30.0),
        "attention.sliding_window": config.whole("sliding_window", 4096),
        **_gemma_scale(config),
    }


def _gemma3(config: Config) -> Keys:
    config.expect("attn_logit_softcapping")
    config.expect("final_logit_softcapping")
    kinds = config.texts("layer_types") if config.values.get("layer_types") else []
    pattern = config.whole("sliding_window_pattern", 6)
    windowed = [kind == "sliding_attention" for kind in kinds] or [(i + 1) % pattern > 0 for i in range(config.layers)]
    if windowed != [(i + 1) % 6 > 0 for i in range(config.layers)]:
        raise CheckpointError(f"{config.where}: only every sixth layer may see everything.")
    local = config.rope("sliding_attention").number("rope_theta", 10_000.0)
    base = config.number("rope_local_base_freq", local)
    return {"attention.sliding_window": config.whole("sliding_window"), "rope.freq_base_swa": base,
            **_gemma_scale(config)}  # fmt: skip


def _gemma_scale(config: Config) -> Keys:
    """Scores are scaled by the size of a head, but for the largest models."""
    usual = config.head_size
    if (config.values.get("model_type"), config.layers) in (("gemma2", 46), ("gemma3_text", 62)):
        usual = config.whole("hidden_size") // config.whole("num_attention_heads")
    config.expect("query_pre_attn_scalar", usual)
    config.expect("use_bidirectional_attention", False)
    return {}


def _granite(config: Config) -> Keys:
    return {
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "attention.scale": config.number("attention_multiplier", 1.0),
        "logit_scale": config.number("logits_scaling", 1.0),
    }


def _olmo2(config: Config) -> Keys:
    config.expect("clip_qkv")
    return {}


def _smollm3(config: Config) -> Keys:
    config.expect("use_sliding_window", False)
    layers = config.values.get("no_rope_layers")
    if layers is not None and layers != [int((i + 1) % 4 != 0) for i in range(config.layers)]:
        raise CheckpointError(f"{config.where}: no_rope_layers: only every fourth layer may go without rotation.")
    return {}


def _no_windows(config: Config) -> Keys:
    config.expect("use_sliding_window", False)
    return {}


def _lfm2(config: Config) -> Keys:
    kinds = config.texts("layer_types")
    heads = config.whole("num_key_value_heads")
    width = config.whole("intermediate_size", config.whole("block_ff_dim", 0))
    if config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.whole("block_multiple_of", 256)
        width = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = multiple * -(-width // max(multiple, 1))
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds],
        "shortconv.l_cache": config.whole("conv_L_cache"),
        "attention.layer_norm_rms_epsilon": config.number("norm_eps", 1e-5),
        "feed_forward_length": width,
    }


def _cohere2(config: Config) -> Keys:
    kinds = config.texts("layer_types") if config.values.get("layer_types") else []
    if kinds and [kind == "sliding_attention" for kind in kinds] != [(i + 1) % 4 > 0 for i in range(config.layers)]:
        raise CheckpointError(f"{config.where}: layer_types: only every fourth layer may see everything.")
    return {
        "attention.sliding_window": config.whole("sliding_window"),
        "logit_scale": config.number("logit_scale", 1.0),
        "attention.layer_norm_epsilon": config.number("layer_norm_eps", 1e-5),
    }


_MIXTRAL = ((r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.", r"layers.\1.feed_forward.experts."),)

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", permuted=True),
    "mistral": Family("llama", permuted=True, window_is_context=True),
    "mixtral": Family("llama", _experts, permuted=True, renamed=_MIXTRAL, window_is_context=True),
    "qwen2": Family("qwen2", _no_windows),
    "qwen3": Family("qwen3", _no_windows),
    "qwen2_moe": Family("qwen2moe", _qwen2_moe),
    "qwen3_moe": Family("qwen3moe", _qwen3_moe),
    "olmoe": Family("olmoe", _olmoe),
    "gemma": Family("gemma", shifted_norms=True, activations=_GELU),
    "gemma2": Family("gemma2", _gemma2, shifted_norms=True, activations=_GELU),
    "gemma3_text": Family("gemma3", _gemma3, shifted_norms=True, activations=_GELU, rope="full_attention"),
    "phi3": Family("phi3", window_is_context=True),
    "lfm2": Family("lfm2", _lfm2),
    "glm4": Family("glm4", rotary=0.5),
    "granite": Family("granite", _granite, permuted=True),
    "olmo2": Family("olmo2", _olmo2),
    "smollm3": Family("smollm3", _smollm3, permuted=True),
    "cohere2": Family("cohere2", _cohere2),
    "seed_oss": Family("seed_oss"),
    "ernie4_5": Family("ernie4_5"),
}


def find_family(model_type: str, where: str) -> Family:
    """The rules of a family. Raises CheckpointError naming those that there are."""
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{where}: models of the family {shortened(model_type)!r} cannot be imported. There are rules for "
            f"{', '.join(sorted(FAMILIES))}. Get the model as GGUF instead."
        )
    return FAMILIES[model_type]


def model_keys(family: Family, config: Config) -> tuple[Keys, dict[str, NDArray[np.float32]]]:
    """The metadata of a model, keys without the architecture's prefix, and the tensors of its rotation's factors.

    Raises CheckpointError for what is missing or not computed.
    """
    for name in ("hidden_act", "hidden_activation"):
        config.expect(name, *family.activations)
    heads, size = config.whole("num_attention_heads"), config.head_size
    turning = int(size * config.rope().number("partial_rotary_factor", config.number("partial_rotary_factor",
                                                                                     family.rotary)))  # fmt: skip
    context = config.whole("max_position_embeddings")
    if family.window_is_context and config.values.get("sliding_window") is not None:
        context = min(context, config.whole("sliding_window"))  # up to there, a window hides nothing
    keys: Keys = {
        "block_count": config.layers,
        "context_length": context,
        "embedding_length": config.whole("hidden_size"),
        "feed_forward_length": config.whole("intermediate_size", 0),
        "attention.head_count": heads,
        "attention.head_count_kv": config.whole("num_key_value_heads", heads),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": turning,
        "rope.freq_base": config.rope(family.rope).number("rope_theta", 10_000.0),
        "vocab_size": config.whole("vocab_size"),
    }
    if "rms_norm_eps" in config.values:
        keys["attention.layer_norm_rms_epsilon"] = config.number("rms_norm_eps")
    scaling, factors = _scaling(config.rope(family.rope), keys)
    return {**keys, **scaling, **family.keys(config)}, factors


def _scaling(rope: Config, keys: Keys) -> tuple[Keys, dict[str, NDArray[np.float32]]]:
    """What stretches the rotation: keys, and tensors of factors."""
    kind = rope.values.get("rope_type", rope.values.get("type")) or "default"
    context, size = keys["context_length"], keys["rope.dimension_count"]
    if kind == "default":
        return {}, {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.number("factor")}, {}
    original = rope.whole("original_max_position_embeddings", context)
    if kind == "yarn":
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            rope.expect(name)
        rope.expect("truncate", True)
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.number("factor"),
            "rope.scaling.original_context_length": original,
            "rope.scaling.yarn_beta_fast": rope.number("beta_fast", 32.0),
            "rope.scaling.yarn_beta_slow": rope.number("beta_slow", 1.0),
        }, {}
    if kind == "llama3":
        return {}, {"rope_freqs.weight": _llama3_factors(rope, keys["rope.freq_base"], size, original)}
    if kind == "longrope":
        scale = context / original
        spread = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        tensors = {f"rope_factors_{name}.weight": np.array(rope.numbers(f"{name}_factor"), np.float32)
                   for name in ("long", "short")}  # fmt: skip
        return {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": rope.number("attention_factor", spread),
        }, tensors
    raise CheckpointError(f"{rope.where}: a rotation of the type {shortened(str(kind))!r} cannot be imported.")


def _llama3_factors(rope: Config, base: float, size: int, original: int) -> NDArray[np.float32]:
    """Slow turns are divided by the factor, fast ones are left, with a ramp between (Llama 3.1)."""
    factor = rope.number("factor", 8.0)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    turns = original * base ** (-np.arange(0, size, 2) / size) / (2 * math.pi)
    smooth = np.clip((turns - low) / max(high - low, 1e-9), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)
