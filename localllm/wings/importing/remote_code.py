"""Families that transformers lacks and whose repositories bring their own code: keys and tensors.

Sources: llama.cpp, conversion/exaone.py, minicpm.py, internlm.py, bailingmoe.py and smallthinker.py.
"""

import math
from collections.abc import Callable

import numpy as np

from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.family import Change, TensorRule
from localllm.wings.importing.family_keys import grouped_experts
from localllm.wings.importing.matrices import CheckpointMatrix, Numbers, chosen_rows
from localllm.wings.importing.rotation import Keys

_LAYER = r"model\.layers\.(\d+)\."
_SIGMOID, _SOFTMAX = 2, 1  # expert_gating_func
_SMALLTHINKER_PERIOD, _SMALLTHINKER_WINDOW = 4, 4096


def exaone(config: Config) -> Keys:
    return {"attention.layer_norm_rms_epsilon": config.number("layer_norm_eps")}


def minicpm(config: Config) -> Keys:
    base = config.number("dim_model_base", 1.0)
    if base <= 0:
        raise CheckpointError(f"{config.where}: dim_model_base is {base:g}. Download the folder again.")
    return {
        "embedding_scale": config.number("scale_emb", 1.0),
        "residual_scale": config.number("scale_depth", 1.0) / math.sqrt(max(config.layers, 1)),
        "logit_scale": config.whole("hidden_size") / base,
    }


def bailing_moe(config: Config) -> Keys:
    """Ling 1 and 1.5."""
    return {
        "expert_count": config.whole("num_experts"),
        "expert_used_count": config.whole("num_experts_per_tok"),
        "expert_feed_forward_length": config.whole("moe_intermediate_size"),
        "expert_shared_count": config.whole("num_shared_experts", 0),
        "expert_weights_norm": config.flag("norm_topk_prob"),
        "leading_dense_block_count": config.whole("first_k_dense_replace", 0),
    }


def bailing_moe2(config: Config) -> Keys:
    """Ling 2: GLM 4.5's experts under names of its own."""
    shared, width = config.whole("num_shared_experts", 0), config.whole("moe_intermediate_size")
    named = {"n_routed_experts": config.whole("num_experts"), "n_shared_experts": shared}
    return {
        **grouped_experts(Config({**config.values, **named}, config.where)),
        "expert_shared_feed_forward_length": config.whole("moe_shared_expert_intermediate_size", width * shared),
    }


def smallthinker(config: Config) -> Keys:
    """Every fourth layer has full attention without RoPE and the others have windows, or no layer has a window."""
    width = config.whole("moe_ffn_hidden_size")
    keys: Keys = {
        "feed_forward_length": width,
        "expert_feed_forward_length": width,
        "expert_count": config.whole("moe_num_primary_experts"),
        "expert_used_count": config.whole("moe_num_active_primary_experts"),
        "expert_gating_func": _SOFTMAX if config.flag("moe_primary_router_apply_softmax") else _SIGMOID,
    }
    config.expect("moe_enable_secondary_experts", False)
    windows = [bool(flag) for flag in config.values.get("sliding_window_layout") or [0] * config.layers]
    turns = [bool(flag) for flag in config.values.get("rope_layout") or [1] * config.layers]
    slides = [layer % _SMALLTHINKER_PERIOD != 0 for layer in range(config.layers)]
    if (windows, turns) == (slides, slides):
        config.expect("sliding_window_size", _SMALLTHINKER_WINDOW)
        return {**keys, "attention.sliding_window": _SMALLTHINKER_WINDOW}
    if any(windows) or not all(turns):
        raise CheckpointError(
            f"{config.where}: every fourth layer from the first, or every layer, must have full attention without RoPE."
        )
    return keys


def _of_groups(choose: Callable[[Numbers], Numbers]) -> Change:
    """Some heads of each group. A group has the queries that share a key, the key, and the value."""

    def change(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
        keys = config.whole("num_key_value_heads", config.whole("num_attention_heads"))
        heads = config.whole("num_attention_heads") // max(keys, 1) + 2
        if not keys or matrix.shape[0] != keys * heads * config.head_size:
            raise CheckpointError(f"{config.where}: wqkv has {matrix.shape[0]} rows; heads are of another size.")
        return chosen_rows(matrix, lambda rows: choose(rows.reshape(keys, heads, -1)))

    return change


INTERNLM2 = tuple(
    TensorRule(
        _LAYER + r"attention\.wqkv\.weight", rf"model.layers.\1.self_attn.{part}_proj.weight", _of_groups(choose)
    )
    for part, choose in (
        ("q", lambda rows: rows[:, :-2]),
        ("k", lambda rows: rows[:, -2]),
        ("v", lambda rows: rows[:, -1]),
    )
)


def _of_all_heads(part: int) -> Change:
    """Rows of the queries, the keys or the values, which are stored in this order."""

    def change(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
        heads = config.whole("num_attention_heads")
        keys, size = config.whole("num_key_value_heads", heads), config.head_size
        first, second, third = heads * size, (heads + keys) * size, (heads + 2 * keys) * size
        if matrix.shape[0] != third:
            raise CheckpointError(
                f"{config.where}: query_key_value has {matrix.shape[0]} rows; heads are of another size."
            )
        return chosen_rows(matrix, lambda rows: np.split(rows, (first, second))[part])

    return change


BAILING_MOE = tuple(
    TensorRule(_LAYER + r"attention\.query_key_value\.weight", rf"model.layers.\1.self_attn.{part}_proj.weight",
         _of_all_heads(index))
    for index, part in enumerate("qkv")
)  # fmt: skip
