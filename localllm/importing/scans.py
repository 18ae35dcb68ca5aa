"""Selective scans (Mamba-2) of Granite 4 H: their keys, and the shapes that their tensors have in GGUF.

Source: llama.cpp, conversion/mamba.py and conversion/granite.py.
"""

import numpy as np

from localllm.importing.config import Config
from localllm.importing.errors import CheckpointError
from localllm.importing.family import Rule
from localllm.importing.family_keys import experts, granite
from localllm.importing.matrices import Folded, Mapped, Matrix
from localllm.importing.rotation import Keys

_SCAN = r"model\.layers\.(\d+)\.mamba\."
_NAME = r"model.layers.\1.mamba."
_ATTENDING = ("attention", "full_attention")  # by the older name, and the newer one


def granite_hybrid(config: Config) -> Keys:
    """Keys of a model in which most layers have a scan in place of attention, with experts or without."""
    config.expect("mamba_proj_bias", False)
    config.expect("position_embedding_type", "nope", "rope")
    heads = config.whole("num_key_value_heads")
    keys: Keys = {
        **granite(config),
        "attention.head_count_kv": [heads if kind in _ATTENDING else 0 for kind in config.texts("layer_types")],
        "rope.scaling.finetuned": config.values.get("position_embedding_type") == "rope",
        "ssm.conv_kernel": config.whole("mamba_d_conv"),
        "ssm.state_size": config.whole("mamba_d_state"),
        "ssm.group_count": config.whole("mamba_n_groups"),
        "ssm.time_step_rank": config.whole("mamba_n_heads"),
        "ssm.inner_size": config.whole("mamba_n_heads") * config.whole("mamba_d_head"),
    }
    shared = config.whole("shared_intermediate_size")
    if not config.whole("num_local_experts", 0):
        return {**keys, "feed_forward_length": shared}
    return {**keys, **experts(config), "expert_shared_feed_forward_length": shared}


def _column(matrix: Matrix, _config: Config) -> Matrix:
    return Folded(matrix, (matrix.shape[0], 1))


def _groups(matrix: Matrix, config: Config) -> Matrix:
    groups, values = config.whole("mamba_n_groups"), matrix.shape[0]
    if not groups or values % groups:
        raise CheckpointError(f"{config.where}: a norm of {values} values is not one of {groups} groups.")
    return Folded(matrix, (groups, values // groups))


GRANITE_HYBRID = (
    Rule(
        _SCAN + "A_log", _NAME + "A_log", lambda matrix, config: Mapped(_column(matrix, config), lambda x: -np.exp(x))
    ),
    Rule(_SCAN + "D", _NAME + "D", _column),
    Rule(_SCAN + "dt_bias", _NAME + "dt_proj.bias"),
    Rule(_SCAN + r"norm\.weight", _NAME + "norm.weight", _groups),
)
