"""Families that transformers lacks: logits compared with an equivalent model's in transformers, or with llama.cpp's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import open_model
from localllm.importing.convert import import_folder
from localllm.importing.errors import CheckpointError
from tests.localllm.importing.conftest import GOLDENS, TOLERANCE, assert_alike, computed_logits, quiet
from tests.localllm.importing.remote_models import REMOTE, weights_of
from tests.localllm.importing.tiny_models import HEADS, TOKENS, bfloat16, values_of, write_safetensors
from tests.oracle import llama_oracle

Folder = Callable[..., Path]
_DROPPED = ("rope_parameters", "hidden_act", "head_dim", "num_hidden_layers", "rms_norm_eps")


def written(folder: Folder, name: str, **changes: Any) -> Path:
    """A folder with the family's configuration, and the weights of its equivalent."""
    remote = REMOTE[name]
    usual = {key: GOLDENS["llama"]["config"][key] for key in ("num_hidden_layers", "rms_norm_eps", "hidden_act")}
    usual = {} if "num_layers" in remote.config else usual
    made = folder(remote.equal, **{**dict.fromkeys(_DROPPED), **usual, **remote.config, **changes})
    stored = remote.stored(weights_of(GOLDENS[remote.equal]["shapes"]))
    write_safetensors(made / "model.safetensors", {key: ("BF16", bfloat16(values)) for key, values in stored})
    return made


@pytest.mark.parametrize("name", REMOTE)
def test_logits_equal_those_of_the_equal_model(name: str, folder: Folder, tmp_path: Path) -> None:
    import_folder(written(folder, name), tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        assert file.architecture == {"bailing_moe": "bailingmoe", "bailing_moe_v2": "bailingmoe2"}.get(name, name)
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS[REMOTE[name].equal]["logits"])


SMALLTHINKER = {
    "model_type": "smallthinker",
    **HEADS,
    "num_hidden_layers": 5,
    "moe_num_primary_experts": 4,
    "moe_num_active_primary_experts": 2,
    "moe_ffn_hidden_size": 48,
    "moe_primary_router_apply_softmax": False,
    "norm_topk_prob": True,
    "rope_theta": 10_000.0,
    "intermediate_size": None,
    "hidden_act": None,
    "rope_parameters": None,
}


def smallthinker(folder: Folder, **changes: Any) -> Path:
    made = folder("llama", **{**SMALLTHINKER, **changes})
    shapes = {"model.embed_tokens.weight": (320, 64), "lm_head.weight": (320, 64), "model.norm.weight": (64,)}
    for layer in range(5):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}input_layernorm.weight": (64,), f"{prefix}post_attention_layernorm.weight": (64,)}
        shapes |= {f"{prefix}block_sparse_moe.primary_router.weight": (4, 64)}
        for part, shape in (("q", (128, 64)), ("k", (64, 64)), ("v", (64, 64)), ("o", (64, 128))):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = shape
        for expert in range(4):
            for part, shape in (("gate", (48, 64)), ("up", (48, 64)), ("down", (64, 48))):
                shapes[f"{prefix}block_sparse_moe.experts.{expert}.{part}.weight"] = shape
    stored = {name: ("BF16", bfloat16(values_of(name, shape))) for name, shape in shapes.items()}
    write_safetensors(made / "model.safetensors", stored)
    return made


WINDOWED = {
    "sliding_window_size": 4096,
    "sliding_window_layout": [0, 1, 1, 1, 0],
    "rope_layout": [0, 1, 1, 1, 0],
}


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("changes", [{}, WINDOWED, {"moe_primary_router_apply_softmax": True}])
def test_smallthinker_beside_llama_cpp(changes: dict[str, Any], folder: Folder, tmp_path: Path) -> None:
    import_folder(smallthinker(folder, **changes), tmp_path / "made.gguf", None, quiet, quiet)
    expected = llama_oracle.prefill_logits(tmp_path / "made.gguf", TOKENS)[-1]
    assert_alike(computed_logits(tmp_path / "made.gguf"), expected.tolist(), 2 * TOLERANCE)
    with open_model(tmp_path / "made.gguf") as file:
        name = "model.layers.3.block_sparse_moe.experts.2.down.weight"
        assert np.array_equal(file.dequantize("blk.3.ffn_down_exps.weight")[2], values_of(name, (64, 48)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window_size": 512}, "sliding_window_size is 512"),
        ({"rope_layout": [1, 1, 1, 1, 1]}, "every fourth layer"),
        ({"moe_enable_secondary_experts": True}, "moe_enable_secondary_experts is True"),
    ],
)
def test_other_smallthinkers_are_refused(changes: dict[str, Any], message: str, folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_folder(smallthinker(folder, **WINDOWED | changes), tmp_path / "made.gguf", None, quiet, quiet)


def test_other_sizes_of_fused_heads_are_refused(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="wqkv has 128 rows"):
        import_folder(written(folder, "internlm2", num_attention_heads=8), tmp_path / "made.gguf", None, quiet, quiet)
