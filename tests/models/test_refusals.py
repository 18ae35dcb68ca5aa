"""What a file holds beyond what the native engine computes is refused, before the results would be others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gguf_io import open_model
from models import NativeRunner
from models.errors import UnsupportedModelError
from tests.models.synthetic import MODELS, Synthetic, write

SMALL = Synthetic("llama", embedding=64, feed_forward=64, heads=2, kv_heads=1, head=32, vocabulary=64)


def load(model: Synthetic, path: Path) -> None:
    with open_model(write(model, path)) as file:
        NativeRunner(file, kv_bytes=1 << 20, threads=1).close()


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        (
            {"added": {"attn_gate.weight": "width, width", "attn_out_norm.bias": "width"}},
            r"blk\.0\.attn_gate\S* and 1 more",
        ),
        ({"added": {"ffn_norm.bias": "width"}}, r"blk\.0\.ffn_norm\.bias"),
        ({"beside": {"position_embd.weight": "vocabulary, width"}}, r"position_embd\.weight"),
    ],
)
def test_tensors_that_would_not_be_used(changes: dict[str, Any], tensor: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"the tensor {tensor} would not be used.*--backend llama"):
        load(replace(SMALL, **changes), tmp_path / "model.gguf")


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    with open_model(write(replace(SMALL, extra={"nextn_predict_layers": 1}), tmp_path / "model.gguf")) as file:
        runner = NativeRunner(file, kv_bytes=1 << 20, threads=1)
    assert runner.kv_bytes_per_token == 1 * 2 * 32 * 2
    runner.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("expert_group_count", 4),
        ("attention.key_length_swa", 64),
        ("rope.dimension_sections", [8, 4, 4, 0]),
        ("deepstack_mapping", [-1, 0]),
    ],
)
def test_metadata_that_changes_what_is_computed(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{key}.* does not compute that"):
        load(replace(SMALL, extra={key: value}), tmp_path / "model.gguf")


def test_a_rotation_of_windows_that_the_architecture_does_not_have(tmp_path: Path) -> None:
    model = MODELS["gpt-oss"]
    with pytest.raises(UnsupportedModelError, match=r"rope\.freq_base_swa"):
        load(replace(model, extra={**model.extra, "rope.freq_base_swa": 500.0}), tmp_path / "model.gguf")


@pytest.mark.parametrize(("name", "key"), [("cohere2", "attention.sliding_window"), ("granite", "logit_scale")])
def test_a_file_without_what_its_architecture_needs(name: str, key: str, tmp_path: Path) -> None:
    extra = {other: value for other, value in MODELS[name].extra.items() if other != key}
    with pytest.raises(UnsupportedModelError, match=rf"lacks {name}\.{key}"):
        load(replace(MODELS[name], extra=extra), tmp_path / "model.gguf")
