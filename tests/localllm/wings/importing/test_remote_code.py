"""Families that transformers lacks: logits compared with an equivalent model's in transformers, or with llama.cpp's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import open_model
from localllm.wings.importing.convert import import_folder
from localllm.wings.importing.errors import CheckpointError
from tests.localllm.wings.importing.conftest import GOLDENS, TOLERANCE, assert_alike, computed_logits, quiet
from tests.localllm.wings.importing.remote_models import REMOTE, weights_of
from tests.localllm.wings.importing.tiny_models import HEADS, TOKENS, bfloat16, values_of, write_safetensors
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


KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    **dict.fromkeys(("max_position_embeddings", "rope_parameters", "head_dim")),
    "model_max_length": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
        "head_dim": 32,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 48,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
}


def kimi(folder: Folder, conv: tuple[int, ...] = (64, 1, 4), **changes: Any) -> Path:
    made = folder("llama", **{**KIMI, **changes})
    width = 64
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{name}.weight": (320, width) for name in ("model.embed_tokens", "lm_head")},
        "model.norm.weight": (width,),
    }
    net = {f"{part}_proj.weight": (64, width) for part in "qkv"} | {f"{part}_conv1d.weight": conv for part in "qkv"}
    net |= {f"{part}_a_proj.weight": (32, width) for part in "fg"}
    net |= {f"{part}_b_proj.weight": (64, 32) for part in "fg"}
    net |= {"b_proj.weight": (2, width), "A_log": (1, 1, 2, 1), "dt_bias": (64,), "o_norm.weight": (32,)}
    latents = {"q_proj.weight": (64, width), "kv_a_proj_with_mqa.weight": (48, width), "kv_a_layernorm.weight": (32,)}
    latents |= {"kv_b_proj.weight": (80, 32)}
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in (latents if layer % 2 else net).items()}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (width, 48 if layer % 2 else 64)
        networks = {"mlp": 96} if layer == 0 else {"block_sparse_moe.shared_experts": 48}
        for name, inner in networks.items():
            shapes |= {f"{prefix}{name}.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
            shapes[f"{prefix}{name}.down_proj.weight"] = (width, inner)
        if layer:
            experts = f"{prefix}block_sparse_moe."
            shapes |= {f"{experts}gate.weight": (4, width), f"{experts}gate.e_score_correction_bias": (4,)}
            for expert in range(4):
                for part, shape in (("w1", (48, width)), ("w2", (width, 48)), ("w3", (48, width))):
                    shapes[f"{experts}experts.{expert}.{part}.weight"] = shape
    stored = {name: ("F32", values_of(name, shape)) for name, shape in shapes.items()}
    write_safetensors(made / "model.safetensors", stored)
    return made


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("conv", [(64, 1, 4), (64, 4)])
def test_kimi_linear_beside_llama_cpp(conv: tuple[int, ...], folder: Folder, tmp_path: Path) -> None:
    import_folder(kimi(folder, conv), tmp_path / "made.gguf", None, quiet, quiet)
    expected = llama_oracle.prefill_logits(tmp_path / "made.gguf", TOKENS)[-1]
    assert_alike(computed_logits(tmp_path / "made.gguf"), expected.tolist(), 2 * TOLERANCE)
    with open_model(tmp_path / "made.gguf") as file:
        name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
        assert np.array_equal(file.dequantize("blk.2.ffn_down_exps.weight")[3], values_of(name, (64, 48)))
        assert file.metadata.get_int("kimi-linear.context_length") == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is"),
        ({"linear_attn_config": {**KIMI["linear_attn_config"], "num_heads": 4}}, "num_heads is 4"),
    ],
)
def test_other_kimis_are_refused(changes: dict[str, Any], message: str, folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_folder(kimi(folder, **changes), tmp_path / "made.gguf", None, quiet, quiet)


def test_other_sizes_of_fused_heads_are_refused(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="wqkv has 128 rows"):
        import_folder(written(folder, "internlm2", num_attention_heads=8), tmp_path / "made.gguf", None, quiet, quiet)
