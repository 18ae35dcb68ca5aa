"""Selective scans (Mamba-2), alone and in hybrids: their keys, and the shapes that their tensors have in GGUF.

Sources: llama.cpp, conversion/mamba.py, granite.py, falcon_h1.py and nemotron.py.
"""

from collections.abc import Callable

import numpy as np

from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.family import Change, TensorRule
from localllm.wings.importing.family_keys import experts, granite
from localllm.wings.importing.matrices import CheckpointMatrix, Folded, Mapped, ScaledRows, row_count
from localllm.wings.importing.rotation import Keys

_SCAN, _SCAN_NAME = r"model\.layers\.(\d+)\.mamba\.", r"model.layers.\1.mamba."
_MIXER, _MIXER_NAME = r"backbone\.layers\.(\d+)\.mixer\.", r"backbone.layers.\1.mixer."
_ATTENDING = ("attention", "full_attention")  # by the older name, and the newer one
_NEMOTRON_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MOST_TOKENS = 1 << 20  # scans have no context limit of their own
_Z, _X, _B, _C, _DT = range(5)  # parts of in_proj, in the order of ssm_multipliers


def _sizes(config: Config, kernel: str, state: str, groups: str, heads: str, size: str) -> Keys:
    """The sizes of scans, from these names in the configuration."""
    _check_times(config)
    return {
        "ssm.conv_kernel": config.whole(kernel),
        "ssm.state_size": config.whole(state),
        "ssm.group_count": config.whole(groups),
        "ssm.time_step_rank": config.whole(heads),
        "ssm.inner_size": config.whole(heads) * config.whole(size),
    }


def _scan(config: Config) -> Keys:
    """The sizes of Granite's and Falcon's scans."""
    config.expect("mamba_proj_bias", False)
    return _sizes(config, "mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")


def granite_hybrid(config: Config) -> Keys:
    """Keys of a model in which most layers have a scan in place of attention, with experts or without."""
    config.expect("position_embedding_type", "nope", "rope")
    heads = config.whole("num_key_value_heads")
    keys: Keys = {
        **granite(config),
        **_scan(config),
        "attention.head_count_kv": [heads if kind in _ATTENDING else 0 for kind in config.texts("layer_types")],
        "rope.scaling.finetuned": config.values.get("position_embedding_type") == "rope",
    }
    shared = config.whole("shared_intermediate_size")
    if not config.whole("num_local_experts", 0):
        return {**keys, "feed_forward_length": shared}
    return {**keys, **experts(config), "expert_shared_feed_forward_length": shared}


def mamba2(config: Config) -> Keys:
    """Keys of a model with scans only."""
    usual = Config({"conv_kernel": 4, "state_size": 128, "n_groups": 1, "head_dim": 64, **config.values}, config.where)
    return {
        "context_length": config.whole("max_position_embeddings", _MOST_TOKENS),
        "attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon", 1e-5),
        **_sizes(usual, "conv_kernel", "state_size", "n_groups", "num_heads", "head_dim"),
    }


def falcon_h1(config: Config) -> Keys:
    """Keys of a model in which each layer has a scan beside attention."""
    if config.flag("mamba_rms_norm"):
        config.expect("mamba_norm_before_gate", False)
    return _scan(config)


def nemotron_h(config: Config) -> Keys:
    """Keys of a model whose layers are a scan, attention, or a feed-forward network; with experts or without."""
    kinds = nemotron_layers(config)
    width = config.whole("moe_intermediate_size" if "moe" in kinds else "intermediate_size")
    keys: Keys = {
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.head_count_kv": [config.whole("num_key_value_heads") if kind in _ATTENDING else 0 for kind in kinds],
        "attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon", 1e-5),
        **_sizes(config, "conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim"),
    }
    if "moe" not in kinds:
        return keys
    if "mlp" in kinds:
        raise CheckpointError(
            f"{config.where}: layers with experts and layers without them cannot be imported together."
        )
    config.expect("n_group", 1)
    if config.values.get("moe_latent_size") is not None:
        keys["moe_latent_size"] = config.whole("moe_latent_size")
    return {
        **keys,
        "expert_count": config.whole("n_routed_experts"),
        "expert_used_count": config.whole("num_experts_per_tok"),
        "expert_feed_forward_length": width,
        "expert_shared_count": config.whole("n_shared_experts", 0),
        "expert_shared_feed_forward_length": config.whole("moe_shared_expert_intermediate_size"),
        "expert_weights_norm": config.flag("norm_topk_prob", True),
        "expert_weights_scale": config.number("routed_scaling_factor", 1.0),
    }


def nemotron_layers(config: Config) -> list[str]:
    """Each layer's kind, from a list or from a letter per layer. Raises CheckpointError for unknown kinds."""
    pattern = config.values.get("hybrid_override_pattern")
    if config.values.get("layers_block_type") is None and isinstance(pattern, str):
        kinds = [_NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    else:
        named = {"mamba": "linear_attention", "attention": "full_attention"}
        kinds = [named.get(kind, kind) for kind in config.texts("layers_block_type")]
    if unknown := set(kinds) - set(_NEMOTRON_LETTERS.values()):
        raise CheckpointError(f"{config.where}: layers are {sorted(unknown)}, which are not known.")
    return kinds


def _check_times(config: Config) -> None:
    """Raise CheckpointError if time steps are clamped."""
    limit = config.values.get("time_step_limit")
    if isinstance(limit, list) and (
        limit[:1] != [0.0] or limit[1:] not in ([float("inf")], [{"__float__": "Infinity"}])
    ):
        raise CheckpointError(
            f"{config.where}: time_step_limit is {limit}; only time steps without one can be imported."
        )


def _column(matrix: CheckpointMatrix, _config: Config) -> CheckpointMatrix:
    return Folded(matrix, (matrix.shape[0], 1))


def _decay(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
    return Mapped(_column(matrix, config), lambda values: -np.exp(values))


def _groups(key: str) -> Change:
    def change(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
        groups, values = config.whole(key, 1), matrix.shape[0]
        if not groups or values % groups:
            raise CheckpointError(f"{config.where}: a norm of {values} values is not one of {groups} groups.")
        return Folded(matrix, (groups, values // groups))

    return change


def _rules(stored: str, name: str, groups: str) -> tuple[TensorRule, ...]:
    return (
        TensorRule(stored + "A_log", name + "A_log", _decay),
        TensorRule(stored + "D", name + "D", _column),
        TensorRule(stored + "dt_bias", name + "dt_proj.bias"),
        TensorRule(stored + r"norm\.weight", name + "norm.weight", _groups(groups)),
    )


def _times(factor: Callable[[Config], float]) -> Change:
    """Multiply rows by a factor from the configuration."""
    return lambda matrix, config: ScaledRows(matrix, np.full(row_count(matrix.shape), factor(config), np.float32))


def _stated(*names: str) -> Callable[[Config], float]:
    return lambda config: float(np.prod([config.number(name, 1.0) for name in names]))


def _of_list(name: str, index: int) -> Callable[[Config], float]:
    return lambda config: config.numbers(name)[index] if config.values.get(name) else 1.0


def _in_parts(matrix: CheckpointMatrix, config: Config) -> CheckpointMatrix:
    """Multiply each part of a scan's input projection by its factor: gate, x, b, c and dt."""
    inner = config.whole("mamba_n_heads") * config.whole("mamba_d_head")
    state = config.whole("mamba_n_groups") * config.whole("mamba_d_state")
    sizes = {_Z: inner, _X: inner, _B: state, _C: state, _DT: config.whole("mamba_n_heads")}
    whole = _stated("ssm_in_multiplier")(config)
    factors = [np.full(size, _of_list("ssm_multipliers", part)(config) * whole) for part, size in sizes.items()]
    return ScaledRows(matrix, np.concatenate(factors).astype(np.float32))


def _multiplied(name: str, factor: Callable[[Config], float]) -> TensorRule:
    return TensorRule(rf"(model\.layers\.\d+\.{name}\.weight)", r"\1", _times(factor))


_LOGITS = _times(_stated("lm_head_multiplier"))

GRANITE_HYBRID = _rules(_SCAN, _SCAN_NAME, "mamba_n_groups")
MIXERS = _rules(_MIXER, _MIXER_NAME, "n_groups")
NEMOTRON_EXPERTS = (
    *MIXERS,
    TensorRule(_MIXER + r"experts\.(up|down)_proj\.weight", r"model.layers.\1.mlp.experts.\2_proj.weight"),
)
FALCON_H1 = (
    *GRANITE_HYBRID,
    _multiplied(r"feed_forward\.gate_proj", _of_list("mlp_multipliers", 0)),
    _multiplied(r"feed_forward\.down_proj", _of_list("mlp_multipliers", 1)),
    _multiplied(r"self_attn\.k_proj", _stated("key_multiplier", "attention_in_multiplier")),
    _multiplied(r"self_attn\.[qv]_proj", _stated("attention_in_multiplier")),
    _multiplied(r"self_attn\.o_proj", _stated("attention_out_multiplier")),
    _multiplied(r"mamba\.out_proj", _stated("ssm_out_multiplier")),
    TensorRule(_SCAN + r"in_proj\.weight", _SCAN_NAME + "in_proj.weight", _in_parts),
    TensorRule(r"(model\.embed_tokens\.weight)", r"\1", _times(_stated("embedding_multiplier"))),
    TensorRule(r"(lm_head\.weight)", r"\1", _LOGITS),
)
# The factors of embeddings and logits differ, so logits get a matrix of their own.
FALCON_H1_TIED = (*FALCON_H1, TensorRule(r"model\.embed_tokens\.weight", "lm_head.weight", _LOGITS))
