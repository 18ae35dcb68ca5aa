"""Checkpoints in fewer bits: logits compared with transformers' on weights unpacked by the formats' own libraries."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import open_model
from localllm.wings.importing.convert import import_folder
from localllm.wings.importing.errors import CheckpointError
from models.native_runner import NativeRunner
from tests.localllm.wings.importing.conftest import GOLDENS, TOLERANCE, assert_alike, computed_logits, quiet
from tests.localllm.wings.importing.packed_models import NVFP4, PACKINGS, packed, stored_tensors
from tests.localllm.wings.importing.tiny_models import (
    TOKENS,
    bfloat16,
    mxfp4_weights,
    values_of,
    write_safetensors,
    write_weights,
)
from tests.oracle import llama_oracle

LLAMA, GPT_OSS = GOLDENS["llama"], GOLDENS["gpt_oss"]
Folder = Callable[..., Path]


def write(folder: Folder, packing: dict[str, Any]) -> Path:
    made = folder("llama", quantization_config=packing)
    write_safetensors(made / "model.safetensors", stored_tensors(packing, LLAMA["shapes"]))
    return made


@pytest.mark.parametrize("name", PACKINGS)
def test_logits_equal_those_of_the_unpacked_weights(name: str, folder: Folder, tmp_path: Path) -> None:
    import_folder(
        write(folder, PACKINGS[name]), tmp_path / "made.gguf", "BF16" if "pack" in name else None, quiet, quiet
    )
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS["packed"][name])
    with open_model(tmp_path / "made.gguf") as file:
        assert file.tensors["blk.0.ffn_up.weight"].type.name == ("BF16" if "pack" in name else "F16")


def test_packed_weights_are_quantised_on_the_way(folder: Folder, tmp_path: Path) -> None:
    made = write(folder, PACKINGS["awq"])
    import_folder(made, tmp_path / "exact.gguf", None, quiet, quiet)
    import_folder(made, tmp_path / "made.gguf", "Q8_0", quiet, quiet)
    with open_model(tmp_path / "exact.gguf") as exact, open_model(tmp_path / "made.gguf") as file:
        values, found = (each.dequantize("blk.1.ffn_down.weight") for each in (exact, file))
        assert file.tensors["blk.1.ffn_down.weight"].type.name == "Q8_0"
    steps = np.abs(values).reshape(-1, 32).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(found - values).reshape(-1, 32) < 0.51 * steps + 1e-3 * np.abs(values).reshape(-1, 32))


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4_values(parts: dict[str, tuple[str, np.ndarray]]) -> np.ndarray:
    """The values of a matrix's pairs and scales, without its factor (OCP's E2M1 and E4M3)."""
    pairs = (parts.get("weight") or parts["weight_packed"])[1]
    codes = parts["weight_scale"][1].astype(int)
    scales = (1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3) - 7)
    values = _E2M1[np.stack([pairs & 15, pairs >> 4], axis=-1)].reshape(len(pairs), -1)
    return values * np.repeat(scales, 16, axis=1)


@pytest.mark.parametrize("kind", [None, "Q8_0"])
@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_is_kept_without_a_loss(name: str, kind: str | None, folder: Folder, tmp_path: Path) -> None:
    import_folder(write(folder, NVFP4[name]), tmp_path / "made.gguf", kind, quiet, quiet)
    matrix = "model.layers.1.self_attn.v_proj.weight"
    parts = packed(NVFP4[name], matrix, *LLAMA["shapes"][matrix])
    factor = parts["weight_scale_2"][1] if "weight_scale_2" in parts else 1 / parts["weight_global_scale"][1][0]
    with open_model(tmp_path / "made.gguf") as file:
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items()}
        assert np.array_equal(file.dequantize("blk.1.attn_v.weight"), nvfp4_values(parts))
        assert file.dequantize("blk.1.attn_v.scale") == pytest.approx([factor], rel=1e-7)
    assert {kinds[f"blk.0.{part}.weight"] for part in ("attn_q", "attn_k", "attn_output", "ffn_up")} == {"NVFP4"}
    assert kinds["blk.0.ffn_down.weight"] == (kind or "F16")  # 96 values are not a whole number of blocks
    if kind is None:
        # Products in few bits round activations to bytes.
        assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS["packed"][name], 4 * TOLERANCE)
        with pytest.raises(CheckpointError, match="weights are NVFP4 already"):
            import_folder(tmp_path / "llama", tmp_path / "again.gguf", "Q4_K_M", quiet, quiet)


def experts(folder: Folder) -> Path:
    made = folder("nvfp4-experts", quantization_config=NVFP4["nvfp4"])
    write_safetensors(made / "model.safetensors", stored_tensors(NVFP4["nvfp4"], GOLDENS["nvfp4-experts"]["shapes"]))
    return made


def test_experts_of_nvfp4_have_factors_of_their_own(folder: Folder, tmp_path: Path) -> None:
    import_folder(experts(folder), tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        assert {file.tensors[f"blk.1.ffn_{part}_exps.weight"].type.name for part in ("gate", "up", "down")} == {"NVFP4"}
        assert file.tensors["blk.1.ffn_gate_exps.scale"].shape == (4,)
    together = computed_logits(tmp_path / "made.gguf")
    assert_alike(together, GOLDENS["nvfp4-experts"]["logits"], 4 * TOLERANCE)
    with open_model(tmp_path / "made.gguf") as file, closing(NativeRunner(file, kv_bytes=8 << 20, threads=2)) as runner:
        sequence = runner.create_sequence()
        alone = [runner.run([token], [place], [sequence], [0])[0].copy() for place, token in enumerate(TOKENS)]
    np.testing.assert_array_equal(alone[-1], together)


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_llama_cpp_computes_the_same_of_the_file(folder: Folder, tmp_path: Path) -> None:
    import_folder(write(folder, NVFP4["nvfp4"]), tmp_path / "made.gguf", None, quiet, quiet)
    found = llama_oracle.prefill_logits(tmp_path / "made.gguf", TOKENS)[-1]
    assert_alike(found, GOLDENS["packed"]["nvfp4"], 4 * TOLERANCE)


@pytest.mark.parametrize(
    ("end", "part", "message"),
    [
        ("weight_scale_2", None, "has no usable"),
        ("weight_scale_2", ("F32", np.array(0.0, np.float32)), "has no usable"),
        ("weight_scale_2", ("F32", np.ones((2,), np.float32)), "has no usable"),
        ("weight_scale", ("F8_E4M3", np.ones((96, 5), np.uint8)), "do not fit together"),
        ("weight_scale", ("F8_E4M3", np.full((96, 4), 0x7F, np.uint8)), "negative or no number"),
        ("weight_scale", ("F8_E4M3", np.full((96, 4), 0x91, np.uint8)), "negative or no number"),
    ],
)
def test_damaged_nvfp4_is_refused(
    end: str, part: tuple[str, np.ndarray] | None, message: str, folder: Folder, tmp_path: Path
) -> None:
    made = write(folder, NVFP4["nvfp4"])
    stored = stored_tensors(NVFP4["nvfp4"], LLAMA["shapes"])
    del stored[NAME + end]
    write_safetensors(made / "model.safetensors", stored if part is None else {**stored, NAME + end: part})
    with pytest.raises(CheckpointError, match=message):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_mxfp4_experts_are_kept(kind: str | None, folder: Folder, tmp_path: Path) -> None:
    made = folder("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    experts = mxfp4_weights(GPT_OSS["shapes"])
    stored = {name: ("BF16", bfloat16(values_of(name, tuple(shape)))) for name, shape in GPT_OSS["shapes"].items()}
    for name, (blocks, scales) in experts.items():
        del stored[name]
        stored |= {f"{name}_blocks": ("U8", blocks), f"{name}_scales": ("U8", scales)}
    write_safetensors(made / "model.safetensors", stored)
    import_folder(made, tmp_path / "made.gguf", kind, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items()}
        exponents = np.asarray(file.data("blk.1.ffn_up_exps.weight")).reshape(4, 96, -1, 17)[..., 0]
    assert {kinds[name] for name in kinds if "_exps.weight" in name} == {"MXFP4"}
    assert kinds["blk.0.attn_q.weight"] == (kind or "BF16")
    assert np.array_equal(exponents, experts["model.layers.1.mlp.experts.gate_up_proj"][1][:, 1::2])
    if kind is None:
        # Products in few bits round activations to bytes.
        assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS["packed"]["mxfp4"], 4 * TOLERANCE)
        with pytest.raises(CheckpointError, match="weights are MXFP4 already"):
            import_folder(made, tmp_path / "again.gguf", "Q4_K_M", quiet, quiet)
        assert sorted(path.name for path in tmp_path.glob("*.gguf")) == ["made.gguf"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "gptq with bits 3 is not imported; only 4 or 8"),
        ({"bits": 2}, "bits 2"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format True"),
        ({"quant_method": "awq", "version": "gemv"}, "awq with version 'gemv'"),
        ({"quant_method": "awq", "version": "exllama"}, "version 'exllama'"),
        ({"quant_method": "awq", "version": "gemm", "zero_point": False}, "zero_point False"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ({"quant_method": "bitsandbytes"}, "packed by 'bitsandbytes' are not imported"),
        ({"quant_method": None}, "no quantization_config that says how"),
    ],
)
def test_other_packings_are_refused_before_anything_is_written(
    change: dict[str, Any], message: str, folder: Folder, tmp_path: Path
) -> None:
    made = write(folder, PACKINGS["gptq"])
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] |= change
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    assert not (tmp_path / "made.gguf").exists()


NAME = "model.layers.0.mlp.up_proj."
UNFIT = "do not fit together"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop(f"{NAME}qzeros"), "has no .*qzeros beside it"),
        (lambda tensors: tensors.pop(f"{NAME}scales"), "has no .*scales beside it"),
        (lambda tensors: tensors.update({f"{NAME}g_idx": ("I32", np.full(64, 9, np.int32))}), UNFIT),
        (lambda tensors: tensors.update({f"{NAME}g_idx": ("I32", np.full(64, -1, np.int32))}), UNFIT),
        (lambda tensors: tensors.update({f"{NAME}qzeros": ("I32", np.zeros((2, 9), np.int32))}), UNFIT),
        (lambda tensors: tensors.update({f"{NAME}scales": ("F16", np.ones((2, 7), np.float16))}), UNFIT),
        (lambda tensors: tensors.update({f"{NAME}qweight": ("I32", np.zeros((9, 96), np.int32))}), UNFIT),
        (lambda tensors: tensors.update({f"{NAME}qweight": ("F32", np.zeros((8, 96), np.float32))}), UNFIT),
    ],
)  # fmt: skip
def test_damaged_packings_are_refused(
    damage: Callable[[dict[str, Any]], object], message: str, folder: Folder, tmp_path: Path
) -> None:
    made = write(folder, PACKINGS["gptq"])
    stored = stored_tensors(PACKINGS["gptq"], LLAMA["shapes"])
    damage(stored)
    write_safetensors(made / "model.safetensors", stored)
    with pytest.raises(CheckpointError, match=message):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)


def test_biases_of_zeros_that_only_a_packing_has_are_left_out(folder: Folder, tmp_path: Path) -> None:
    made = write(folder, PACKINGS["gptq"])
    stored = stored_tensors(PACKINGS["gptq"], LLAMA["shapes"])
    stored[f"{NAME}bias"] = "F16", np.zeros(96, np.float16)
    write_safetensors(made / "model.safetensors", stored)
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS["packed"]["gptq"])


@pytest.mark.parametrize("size", [[97, 64], [96, 0], [96, 1 << 40], [-96, 64]])
def test_a_stated_shape_that_does_not_fit_is_refused(size: list[int], folder: Folder, tmp_path: Path) -> None:
    made = write(folder, PACKINGS["pack-quantized"])
    stored = stored_tensors(PACKINGS["pack-quantized"], LLAMA["shapes"])
    stored[f"{NAME}weight_shape"] = "I64", np.array(size)
    write_safetensors(made / "model.safetensors", stored)
    with pytest.raises(CheckpointError, match=f"{UNFIT}|has 0 bits"):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", (4,)),
        ("granitemoe", "model.layers.0.block_sparse_moe.input_linear.weight", (4, 191, 64)),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight", (190, 64)),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", (127, 32)),
        ("granitemoehybrid", "model.layers.0.mamba.norm.weight", (127,)),
    ],
)
def test_tensors_that_cannot_be_taken_apart_are_refused(
    name: str, tensor: str, shape: tuple[int, ...], folder: Folder, tmp_path: Path
) -> None:
    made = folder(name)
    shapes = {**GOLDENS[name]["shapes"], tensor: list(shape)}
    write_weights(made, shapes)
    with pytest.raises(CheckpointError, match=r"has the shape|rows|norm of 127 values"):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    assert not (tmp_path / "made.gguf").exists()
