"""Gated delta networks of Qwen3-Next, Qwen 3.5 and Kimi Linear: their keys, and the order of their heads.

In a checkpoint, the value heads that share a key head are adjacent. GGUF files of Qwen3-Next keep this order, but split
the tensor that holds each key head's query, key, values and gates together. In files of Qwen 3.5, value heads are
interleaved: the first of each key head, then the second of each (llama.cpp: conversion/qwen.py).
"""

import numpy as np

from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.family import Change, TensorRule
from localllm.wings.importing.family_keys import latents
from localllm.wings.importing.matrices import CheckpointMatrix, Mapped, MatrixRows, Numbers, row_count
from localllm.wings.importing.rotation import Keys

_NET = r"model\.layers\.(\d+)\.linear_attn\."
_NAME = r"model.layers.\1.linear_attn."
_SECTIONS = [11.0, 11.0, 10.0]


def delta_net(config: Config) -> Keys:
    """Keys of the networks, and which layers have them."""
    keys, values = config.whole("linear_num_key_heads"), config.whole("linear_num_value_heads")
    size = config.whole("linear_key_head_dim")
    config.expect("linear_value_head_dim", size)
    if not keys or values % keys:
        raise CheckpointError(f"{config.where}: {values} value heads cannot share {keys} key heads.")
    return {
        "ssm.conv_kernel": config.whole("linear_conv_kernel_dim"),
        "ssm.state_size": size,
        "ssm.group_count": keys,
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * size,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.texts("layer_types")],
    }


def qwen35(config: Config) -> Keys:
    sections = config.rope().numbers("mrope_section", _SECTIONS)
    return {**delta_net(config), "rope.dimension_sections": [*map(int, sections), 0]}


def kimi_linear(config: Config) -> Keys:
    """DeepSeek V3's attention and experts under other names; layers with attention are counted from 1."""
    net = config.table("linear_attn_config")
    net.expect("num_heads", config.whole("num_attention_heads"))
    attending = net.numbers("full_attn_layers")
    named = {
        "n_routed_experts": config.whole("num_experts"),
        "num_experts_per_tok": config.whole("num_experts_per_token"),
        "n_shared_experts": config.whole("num_shared_experts", 0),
    }
    return {
        **latents(Config({**config.values, **named}, config.where)),
        "attention.head_count_kv": [int(layer in attending) for layer in range(1, config.layers + 1)],
        "ssm.conv_kernel": net.whole("short_conv_kernel_size"),
        "kda.head_dim": net.whole("head_dim"),
    }


def _decay(matrix: CheckpointMatrix, _config: Config) -> CheckpointMatrix:
    return Mapped(matrix, lambda values: -np.exp(values))


def _sizes(config: Config) -> tuple[int, int, int]:
    """The number of key heads, of value heads for each, and the size of a head."""
    keys = config.whole("linear_num_key_heads")
    return keys, config.whole("linear_num_value_heads") // max(keys, 1), config.whole("linear_key_head_dim")


def _checked(matrix: CheckpointMatrix, order: Numbers, config: Config) -> CheckpointMatrix:
    if matrix.shape[0] <= order.max(initial=0):
        raise CheckpointError(
            f"{config.where}: a delta network's tensor has {matrix.shape[0]} rows, which are too few."
        )
    return MatrixRows(matrix, order, (len(order), *matrix.shape[1:]))


def _parts(first: int, last: int) -> Change:
    """Parts first to last - 1 of all heads, where each key head's query, key, values and gates are stored together."""

    def change(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
        keys, shared, size = _sizes(config)
        borders = np.cumsum([0, size, size, shared * size, shared * size])
        rows = np.arange(keys * borders[-1]).reshape(keys, -1)
        chosen = [rows[:, borders[i] : borders[i + 1]].reshape(-1) for i in range(first, last)]
        return _checked(matrix, np.concatenate(chosen), config)

    return change


def _turns(config: Config, size: int, before: int = 0) -> Numbers:
    """The order that interleaves value heads of `size` rows. The first `before` rows stay in place."""
    keys, shared, _ = _sizes(config)
    heads = before + np.arange(keys * shared * size).reshape(keys, shared, size).swapaxes(0, 1)
    return np.concatenate([np.arange(before), heads.reshape(-1)])


def _in_turn(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
    return _checked(matrix, _turns(config, _sizes(config)[2]), config)


def _numbers_in_turn(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
    return _checked(matrix, _turns(config, 1), config)


def _behind_keys_in_turn(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
    keys, _, size = _sizes(config)
    return _checked(matrix, _turns(config, size, before=2 * keys * size), config)


def _columns_in_turn(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
    order = _turns(config, _sizes(config)[2])
    if matrix.shape[-1] != len(order):
        raise CheckpointError(f"{config.where}: out_proj has {matrix.shape[-1]} columns, not {len(order)}.")
    return Mapped(matrix, lambda values: values[:, order])


def _of_three_dimensions(matrix: CheckpointMatrix, _config: Config) -> CheckpointMatrix:
    """A convolution as llama.cpp reads it, however it is stored: values x 1 x reach."""
    return MatrixRows(matrix, np.arange(row_count(matrix.shape)), (matrix.shape[0], 1, matrix.shape[-1]))


QWEN3_NEXT = (
    TensorRule(_NET + "A_log", _NAME + "A_log", _decay),
    TensorRule(_NET + "dt_bias", _NAME + "dt_proj.bias"),
    TensorRule(_NET + r"in_proj_qkvz\.weight", _NAME + "in_proj_qkv.weight", _parts(0, 3)),
    TensorRule(_NET + r"in_proj_qkvz\.weight", _NAME + "in_proj_z.weight", _parts(3, 4)),
)
QWEN35 = (
    TensorRule(
        _NET + "A_log", _NAME + "A_log", lambda matrix, config: _decay(_numbers_in_turn(matrix, config), config)
    ),
    TensorRule(_NET + "dt_bias", _NAME + "dt_proj.bias", _numbers_in_turn),
    TensorRule(_NET + r"in_proj_([ab])\.weight", _NAME + r"in_proj_\2.weight", _numbers_in_turn),
    TensorRule(_NET + r"(in_proj_qkv|conv1d)\.weight", _NAME + r"\2.weight", _behind_keys_in_turn),
    TensorRule(_NET + r"in_proj_z\.weight", _NAME + "in_proj_z.weight", _in_turn),
    TensorRule(_NET + r"out_proj\.weight", _NAME + "out_proj.weight", _columns_in_turn),
)
_ATTENTION = r"(model\.layers\.\d+\.self_attn)\."
KIMI = (
    TensorRule(_ATTENTION + r"([qkv])_conv1d\.weight", r"\1.\2_conv1d.weight", _of_three_dimensions),
    TensorRule(_ATTENTION + "A_log", r"\1.A_log", _decay),
    TensorRule(_ATTENTION + "dt_bias", r"\1.dt_proj.bias"),
)
KIMI_EXPECTS = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
}
