"""PEFT's LoRA adapters as GGUF: the same logits as the imported model whose weights have the change merged in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.errors import LocalLLMError
from gguf_io.lora import Adapter
from localllm.cli.main import main
from localllm.library.lookup import find
from localllm.settings import load_settings
from localllm.wings.importing.adapters import CONFIG, convert_adapter
from localllm.wings.importing.checkpoint import Checkpoint
from localllm.wings.importing.convert import import_folder
from models.native_runner import NativeRunner
from tests.localllm.wings.importing.conftest import GOLDENS, quiet
from tests.localllm.wings.importing.tiny_models import TOKENS, values_of, write_safetensors
from tests.systems import use_own_places

RANK, ALPHA = 6, 9.0
Folder = Callable[..., Path]
Stored = dict[str, tuple[str, np.ndarray]]


def is_changed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the adapters of these tests change a weight: linear layers, embeddings and the output."""
    return len(shape) == 2 and name.endswith(".weight") and "norm" not in name


def factors(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a weight, from its name; of embeddings, which are stored as rows, those of the transposed weight."""
    shape = shape[::-1] if "embed" in name else shape
    return 0.3 * values_of(f"A of {name}", (RANK, shape[1])), 0.3 * values_of(f"B of {name}", (shape[0], RANK))


def write_adapter(model: Path, made: Path, factor: float = ALPHA / RANK, **stated: Any) -> Path:
    """Write an adapter for a folder's model as PEFT does, and merge it into the folder's weights."""
    made.mkdir()
    found, merged, adapter = Checkpoint(model).tensors, Stored(), Stored()
    for name, tensor in found.items():
        values = tensor.floats(tensor.raw()).reshape(tensor.shape)
        if is_changed(name, tensor.shape):
            a, b = factors(name, tensor.shape)
            values = values + factor * ((b @ a).T if "embed" in name else b @ a)
            module, kind = f"base_model.model.{name.removesuffix('.weight')}", "embedding_" * ("embed" in name)
            suffix = "" if kind else ".weight"
            adapter[f"{module}.lora_{kind}A{suffix}"] = "F32", a.astype(np.float32)
            adapter[f"{module}.lora_{kind}B{suffix}"] = "F32", b.astype(np.float32)
        merged[name] = "F32", values.astype(np.float32)
    write_safetensors(made / "adapter_model.safetensors", adapter)
    usual = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}
    (made / CONFIG).write_text(json.dumps({**usual, **stated}))
    write_safetensors(model / "model.safetensors", merged)
    return made


def logits(path: Path, *adapters: Path) -> np.ndarray:
    """The logits of the last of TOKENS, computed with all adapters."""
    with open_model(path) as file:
        loaded = [Adapter(open_model(adapter), file) for adapter in adapters]
        runner = NativeRunner(file, kv_bytes=8 << 20, threads=1, adapters=loaded)
    for adapter in loaded:
        adapter.file.close()
    try:
        sequence = runner.create_sequence(tuple((number, 1.0) for number in range(len(adapters))))
        last = len(TOKENS) - 1
        return runner.run(TOKENS, range(len(TOKENS)), [sequence] * len(TOKENS), [last])[0].copy()
    finally:
        runner.close()


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "qwen2_moe", "deepseek_v2", "deepseek_v3"])
def test_logits_are_those_of_merged_weights(name: str, folder: Folder, tmp_path: Path) -> None:
    model = folder(name)
    base, merged, converted = tmp_path / "base.gguf", tmp_path / "merged.gguf", tmp_path / "adapter.gguf"
    import_folder(model, base, None, quiet, quiet)
    adapter = write_adapter(model, tmp_path / "adapter")
    import_folder(model, merged, None, quiet, quiet)
    with open_model(base) as file:
        convert_adapter(adapter, converted, file)
    plain, expected, found = logits(base), logits(merged), logits(base, converted)
    assert np.sqrt(((plain - expected) ** 2).mean()) > 0.1 * expected.std()
    assert np.sqrt(((found - expected) ** 2).mean()) < 0.002 * expected.std()


@pytest.mark.parametrize(
    ("stated", "factor"),
    [({"use_rslora": True}, ALPHA / RANK**0.5), ({"alpha_pattern": {"layers.0.self_attn.q_proj": 3.0}}, None)],
)
def test_the_factor_of_a_product(stated: dict[str, Any], factor: float | None, folder: Folder, tmp_path: Path) -> None:
    model = folder("qwen3")
    import_folder(model, tmp_path / "base.gguf", None, quiet, quiet)
    adapter = write_adapter(model, tmp_path / "adapter", **stated)
    with open_model(tmp_path / "base.gguf") as file:
        convert_adapter(adapter, tmp_path / "a.gguf", file)
    with open_model(tmp_path / "a.gguf") as file:
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.q_proj.weight"
            a, b = factors(name, tuple(GOLDENS["qwen3"]["shapes"][name]))
            meant = factor or (3.0 if layer == 0 else ALPHA) / RANK
            found = [file.dequantize(f"blk.{layer}.attn_q.weight.lora_{part}") for part in "ab"]
            np.testing.assert_allclose(found[1] @ found[0], meant * (b @ a), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA can be imported"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "only names of modules can be converted"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    stated: dict[str, Any], problem: str, folder: Folder, tmp_path: Path
) -> None:
    model = folder("qwen3")
    import_folder(model, tmp_path / "base.gguf", None, quiet, quiet)
    adapter = write_adapter(model, tmp_path / "adapter", **stated)
    with open_model(tmp_path / "base.gguf") as file, pytest.raises(LocalLLMError, match=problem):
        convert_adapter(adapter, tmp_path / "a.gguf", file)


def test_tensors_without_a_place_are_refused(folder: Folder, tmp_path: Path) -> None:
    import_folder(folder("qwen3"), tmp_path / "base.gguf", None, quiet, quiet)
    made = tmp_path / "adapter"
    made.mkdir()
    (made / CONFIG).write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 1}))
    ones = "F32", np.ones((4, 4), np.float32)
    module = "base_model.model.model.layers.0.self_attn"
    for tensors, problem in (
        ({f"{module}.r_proj.lora_A.weight": ones, f"{module}.r_proj.lora_B.weight": ones}, "has no place for"),
        ({f"{module}.q_proj.weight": ones}, "has no place for"),
        ({f"{module}.q_proj.lora_A.weight": ones}, "has only one of lora_A and lora_B"),
        (
            {f"{module}.q_proj.lora_A.weight": ones, f"{module}.q_proj.lora_B.weight": ("F32", ones[1][:, :3])},
            "different ranks",
        ),
    ):
        write_safetensors(made / "adapter_model.safetensors", tensors)
        with open_model(tmp_path / "base.gguf") as file, pytest.raises(LocalLLMError, match=problem):
            convert_adapter(made, tmp_path / "a.gguf", file)


def test_create_adds_an_adapter(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_MODEL_STORE", str(tmp_path / "store"))
    use_own_places(tmp_path, monkeypatch)
    model = folder("qwen3")
    import_folder(model, tmp_path / "base.gguf", None, quiet, quiet)
    adapter = write_adapter(model, tmp_path / "adapter")
    arguments = ["create", "changed", "--from", str(tmp_path / "base.gguf"), "--adapter", str(adapter)]
    monkeypatch.setattr("sys.argv", ["localllm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    (stored,) = find("changed", load_settings({})).defaults().adapters
    with open_model(stored) as file, open_model(tmp_path / "base.gguf") as base:
        assert len(Adapter(file, base).pairs) == sum(
            is_changed(name, tuple(shape)) for name, shape in GOLDENS["qwen3"]["shapes"].items()
        )
