"""Gemma 3n and 4: per-layer embeddings, parallel streams, shared keys and values, and heads of two sizes.

Source: llama.cpp, conversion/gemma.py.
"""

import math
from statistics import NormalDist

from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.family import TensorRule
from localllm.wings.importing.family_keys import windows
from localllm.wings.importing.rotation import Keys

_LAYER = r"(model\.layers\.\d+\.)"
_FULL_HEAD = 512  # head size of layers with full attention, if the configuration does not say


def _later(config: Config) -> Keys:
    """Keys that both have."""
    keys: Keys = {
        "embedding_length_per_layer_input": config.whole("hidden_size_per_layer_input", 0),
        "attention.shared_kv_layers": config.whole("num_kv_shared_layers", 0),
        **windows(config),
        "rope.freq_base_swa": config.rope("sliding_attention").number("rope_theta", 10_000.0),
    }
    if config.values.get("final_logit_softcapping") is not None:
        keys["final_logit_softcapping"] = config.number("final_logit_softcapping")
    return keys


def gemma3n(config: Config) -> Keys:
    shares = config.numbers("activation_sparsity_pattern")
    if not all(0 <= share < 1 for share in shares):
        raise CheckpointError(f"{config.where}: activation_sparsity_pattern: shares from 0 to 1 are needed.")
    # GGUF's scale is for the sample standard deviation, while the model was trained with the population's.
    width = max(config.alike("intermediate_size"), 2)
    sample = math.sqrt((width - 1) / width)
    keys = _later(config)
    return {
        **keys,
        "rope.freq_base": config.rope("full_attention").number("rope_theta", 1e6),
        "rope.freq_base_swa": config.number("rope_local_base_freq", keys["rope.freq_base_swa"]),
        "altup.active_idx": config.whole("altup_active_idx"),
        "altup.num_inputs": config.whole("altup_num_inputs"),
        # Gates count from this many standard deviations above the mean.
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(share) * sample if share else float("-inf") for share in shares
        ],
    }


def gemma4(config: Config) -> Keys:
    size, full = config.head_size, _of_full_layers(config, "head_dim", _FULL_HEAD)
    heads, shared = config.whole("num_key_value_heads"), config.whole("num_kv_shared_layers", 0)
    keys: Keys = {
        **_later(config),
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": size,
    }
    if config.flag("attention_k_eq_v"):
        fewer = _of_full_layers(config, "num_key_value_heads", heads)
        windowed = keys["attention.sliding_window_pattern"]
        keys["attention.head_count_kv"] = [heads if slides else fewer for slides in windowed]
    if config.flag("use_double_wide_mlp"):
        width, first = config.whole("intermediate_size"), config.layers - shared
        keys["feed_forward_length"] = [width * (1 + (layer >= first)) for layer in range(config.layers)]
    if config.flag("enable_moe_block"):
        keys |= {
            "expert_count": config.whole("num_experts"),
            "expert_used_count": config.whole("top_k_experts"),
            "expert_feed_forward_length": config.whole("moe_intermediate_size"),
        }
    return keys


def _of_full_layers(config: Config, name: str, default: int) -> int:
    """A value of layers with full attention, by either of its two names. Raises CheckpointError."""
    layers = config.table("per_layer_config").values
    stated = [layer[name] for layer in layers.values() if isinstance(layer, dict) and name in layer]
    if any(one != stated[0] for one in stated):
        raise CheckpointError(f"{config.where}: per_layer_config: layers differ in {name}.")
    return config.whole(f"num_global_{name[4:]}" if name.startswith("num_") else f"global_{name}",
                        stated[0] if stated else default)  # fmt: skip


GEMMA3N = (TensorRule(_LAYER + r"altup\.correct_output_scale", r"\1altup.correct_output_scale.weight"),)
GEMMA4 = (
    TensorRule(_LAYER + "layer_scalar", r"\1layer_scalar.weight"),
    TensorRule(_LAYER + r"router\.scale", r"\1router.proj.scale"),
    TensorRule(_LAYER + r"router\.per_expert_scale", r"\1experts.down_proj.scale"),
    TensorRule(_LAYER + r"experts\.((?:gate_up|down)_proj)", r"\1experts.\2.weight"),
)
