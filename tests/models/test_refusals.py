"""Files that need more than the native engine supports are refused, instead of giving wrong results."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gguf_io import open_model
from gguf_io.errors import LocalLLMError, ModelFileError
from gpu_offload.errors import LlamaCppError
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from models.errors import UnsupportedModelError
from models.native_runner import NativeRunner
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, write
from tests.oracle import llama_oracle

SMALL = Synthetic("llama", embedding=64, feed_forward=64, heads=2, kv_heads=1, head=32, vocabulary=64)


def load(model: Synthetic, path: Path) -> None:
    with open_model(write(model, path)) as file:
        NativeRunner(file, kv_bytes=1 << 20, threads=1).close()


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        (
            {"added": {"attn_gate.weight": "width, width", "attn_out_norm.bias": "width"}},
            r"blk\.0\.attn_gate\S* and 3 more",
        ),
        ({"added": {"ffn_norm.bias": "width"}}, r"blk\.0\.ffn_norm\.bias and 1 more"),
        ({"beside": {"position_embd.weight": "vocabulary, width"}}, r"position_embd\.weight"),
    ],
)
def test_tensors_that_would_not_be_used(changes: dict[str, Any], tensor: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"the tensor {tensor} would not be used.*--backend llama"):
        load(replace(SMALL, **changes), tmp_path / "model.gguf")


def test_factors_are_of_matrices_in_nvfp4_and_those_of_activations_are_not_used(tmp_path: Path) -> None:
    load(replace(SMALL, added={"attn_q.input_scale": "1"}), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=r"the tensor blk\.0\.attn_q\.scale"):
        load(replace(SMALL, added={"attn_q.scale": "1"}), tmp_path / "other.gguf")


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    with open_model(write(replace(SMALL, extra={"nextn_predict_layers": 1}), tmp_path / "model.gguf")) as file:
        runner = NativeRunner(file, kv_bytes=1 << 20, threads=1)
    assert runner.info.kv_bytes_per_token == 1 * 2 * (32 * 2 + 4)
    runner.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("interleave_moe_layer_step", 2),
        ("attention.key_length_swa", 64),
        ("rope.dimension_sections", [8, 4, 4, 0]),
        ("deepstack_mapping", [-1, 0]),
    ],
)
def test_metadata_that_changes_what_is_computed(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{key}.* does not support"):
        load(replace(SMALL, extra={key: value}), tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("shared", "problem"),
    [
        ({}, r"xielu\.alpha_n: is missing"),
        ({**MODELS["apertus"].shared, "xielu.eps": [-1e-6]}, r"xielu\.eps: must have 2 items, not 1"),
        (
            {**MODELS["apertus"].shared, "xielu.alpha_p": [0.5, math.inf]},
            r"xielu\.alpha_p has a value that is not a number",
        ),
    ],
)
def test_factors_of_an_activation(shared: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=problem):
        load(replace(MODELS["apertus"], shared=shared), tmp_path / "model.gguf")


def test_an_odd_number_of_rotated_values(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"llama\.rope\.dimension_count is 31, which must be even"):
        load(replace(SMALL, extra={"rope.dimension_count": 31}), tmp_path / "model.gguf")


def test_a_second_embedding_that_is_too_wide(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="embedding_length_per_layer_input: is 1048577, outside"):
        load(replace(SMALL, beside={"per_layer_proj_norm.weight": "1048577"}), tmp_path / "model.gguf")


def test_llama_4_without_chunks(tmp_path: Path) -> None:
    extra = {**MODELS["llama4"].extra, "attention.sliding_window": 0}
    with pytest.raises(
        UnsupportedModelError, match=r"llama4\.attention\.sliding_window is 0: attention without chunks"
    ):
        load(replace(MODELS["llama4"], extra=extra), tmp_path / "model.gguf")


def test_factors_of_experts_whose_inputs_are_weighted(tmp_path: Path) -> None:
    model = MODELS["llama4"]
    added = {**model.added, "ffn_down_exps.scale": "experts"}
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_down_exps\.scale: .*factors of experts"):
        load(replace(model, added=added), tmp_path / "model.gguf")


@pytest.mark.parametrize("shape", ["inner, width", ""])
def test_gates_of_another_number(shape: str, tmp_path: Path) -> None:
    model = MODELS["laguna"]
    added = {name: text for name, text in model.added.items() if not name.startswith("attn_gate")}
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_gate\.weight"):
        load(replace(model, added=added | ({"attn_gate.weight": shape} if shape else {})), tmp_path / "model.gguf")


def test_a_fourth_part_of_positions(tmp_path: Path) -> None:
    model = replace(MODELS["qwen3vl"], extra={"rope.dimension_sections": [20, 20, 20, 4]})
    with pytest.raises(
        UnsupportedModelError, match=r"qwen3vl\.rope\.dimension_sections uses multi-dimensional positions"
    ):
        load(model, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"expert_group_count": 5}, "16 experts, 3 of them used, cannot be grouped"),
        ({"expert_group_count": 16}, "16 experts, 3 of them used, cannot be grouped"),
        ({"expert_used_count": 9}, "9 of them used, cannot be grouped"),
        ({"expert_group_used_count": 5}, "expert_group_used_count"),
        (
            {"rope.dimension_count": 96},
            r"rope\.dimension_count is 96, which must be an even number below the head size, 96",
        ),
        (
            {"rope.dimension_count": 31},
            r"rope\.dimension_count is 31, which must be an even number below the head size, 96",
        ),
        ({"attention.temperature_scale": 0.1}, "does not support .* growing queries"),
    ],
    ids=str,
)
def test_latents_and_groups_that_do_not_fit(extra: dict[str, Any], problem: str, tmp_path: Path) -> None:
    model = MODELS["deepseek2-groups"]
    with pytest.raises(LocalLLMError, match=problem):
        load(replace(model, extra={**model.extra, **extra}), tmp_path / "model.gguf")


def test_layers_that_draft_behind_latents_are_left_out(tmp_path: Path) -> None:
    model = MODELS["deepseek2"]
    changed = replace(model, layers=4, extra={**model.extra, "nextn_predict_layers": 1})
    load(replace(changed, beside={"blk.3.nextn.eh_proj.weight": "width, width"}), tmp_path / "model.gguf")


@pytest.mark.parametrize("missing", ["attn_q_norm", "attn_k_norm"])
def test_norms_that_a_rotation_before_them_needs(missing: str, tmp_path: Path) -> None:
    model = replace(MODELS["hunyuan-dense"], dropped=(f"{missing}.weight",))
    with pytest.raises(UnsupportedModelError, match=rf"the tensor blk\.0\.{missing}\.weight is missing"):
        load(model, tmp_path / "model.gguf")


@pytest.mark.parametrize("tokens", [63, 65])
def test_a_vocabulary_of_another_size_than_the_embedding(tokens: int, tmp_path: Path) -> None:
    names = [f"t{index}" for index in range(tokens)]
    path = write(SMALL, tmp_path / "model.gguf", tokens=names)
    with open_model(path) as file, pytest.raises(ModelFileError, match=rf"64 rows and \S+ has {tokens} tokens"):
        NativeRunner(file, kv_bytes=1 << 20, threads=1)


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("tokens", [63, 64, 65])
def test_llama_cpp_refuses_the_same_vocabularies(tokens: int, tmp_path: Path) -> None:
    path = write(SMALL, tmp_path / "model.gguf", tokens=[f"t{index}" for index in range(tokens)])
    with open_model(path) as file:
        if tokens == 64:
            LlamaCppRunner(file, LlamaOptions(gpu_layers=0, context_tokens=256)).close()
        else:
            with pytest.raises(LlamaCppError):
                LlamaCppRunner(file, LlamaOptions(gpu_layers=0, context_tokens=256))


@pytest.mark.parametrize(
    "extra",
    [
        {"rope.freq_base": 1.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"rope.scaling.alpha": 1e-30},
        {"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": 0.0},
        {"rope.scaling.type": "x" * 100_000},
        {"rope.freq_base_swa": 0.5},
    ],
    ids=str,
)
def test_rotations_that_cannot_be_computed(extra: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(LocalLLMError, match=r"llama\.rope\.") as error:
        load(replace(SMALL, head=4, extra=extra), tmp_path / "model.gguf")
    assert len(str(error.value)) < 1000 + len(str(tmp_path))


def test_a_head_of_two_values_cannot_take_an_alpha(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"rope\.freq_base"):
        load(replace(SMALL, head=2, extra={"rope.scaling.alpha": 2.0}), tmp_path / "model.gguf")


@pytest.mark.parametrize("key", ["embedding_scale", "residual_scale", "attention.scale", "logit_scale"])
def test_factors_that_would_overflow_where_they_divide(key: str, tmp_path: Path) -> None:
    model = MODELS["granite"]
    with pytest.raises(ModelFileError, match=rf"granite\.{re.escape(key)}: is 1\.0000.*e-30, outside"):
        load(replace(model, extra={**model.extra, key: 1e-30}), tmp_path / "model.gguf")


def test_factors_that_are_zero(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="RoPE factors"):
        load(replace(SMALL, factors={"rope_freqs.weight": 0.0}), tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["cohere2", "exaone4"])
def test_experts_where_no_known_model_has_them(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    with pytest.raises(UnsupportedModelError, match=f"does not support experts in models of the architecture {name}"):
        load(replace(model, experts=4, extra={**model.extra, "expert_used_count": 2}), tmp_path / "model.gguf")


@pytest.mark.parametrize(("name", "key"), [("cohere2", "attention.sliding_window"), ("granite", "logit_scale")])
def test_a_file_without_what_its_architecture_needs(name: str, key: str, tmp_path: Path) -> None:
    extra = {other: value for other, value in MODELS[name].extra.items() if other != key}
    with pytest.raises(UnsupportedModelError, match=rf"lacks {name}\.{key}"):
        load(replace(MODELS[name], extra=extra), tmp_path / "model.gguf")
