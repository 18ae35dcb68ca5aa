"""Folders that are damaged, hostile or of another kind: each is refused with a reason, before anything is written."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.errors import LocalLLMError
from localllm.library.own_store import OwnStore
from localllm.wings.importing.convert import import_folder, imported_model
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.families import FAMILIES
from tests.localllm.wings.importing.tiny_models import bfloat16, values_of, write_safetensors
from tests.systems import needs_links

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "goldens.json").read_text())["qwen3"]
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "added_tokens": [],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(GOLDEN["config"]))
    (made / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    write_safetensors(made / "model.safetensors", stored())
    return made


def stored() -> dict[str, tuple[str, np.ndarray]]:
    return {name: ("BF16", bfloat16(values_of(name, tuple(shape)))) for name, shape in GOLDEN["shapes"].items()}


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Rewrite the weights' header with a change."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        content = json.loads(data[8 : 8 + length])
        change(content)
        text = json.dumps(content).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return apply


def entry(**changes: Any) -> Callable[[Path], None]:
    return header(lambda content: content["model.norm.weight"].update(changes))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**GOLDEN["config"], **changes})) and None


def tokenizer(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "tokenizer.json").write_text(json.dumps({**TOKENIZER, **changes})) and None


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = stored()
        change(content)
        write_safetensors(folder / "model.safetensors", content)

    return apply


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    os.symlink(outside, folder / "model.safetensors")


def index(weight_map: Any) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map})) and None
    )


FIRST = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "there is no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "there is no tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: the file is missing"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff{}"), "not UTF-8"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "not a complete safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "not a complete safetensors file"),
        (entry(shape=[64, 1 << 60]), "does not fit the file"),
        (entry(shape=[-64]), "does not fit the file"),
        (entry(shape=[True] * 3), "does not fit the file"),
        (entry(data_offsets=[0, 1 << 62]), "does not fit the file"),
        (entry(data_offsets=[-128, 0]), "does not fit the file"),
        (entry(data_offsets="ab"), "does not fit the file|is damaged"),
        (entry(dtype="U9"), "has the type 'U9'"),
        (entry(dtype=["F32"]), r"has the type \['F32'\], not one of"),
        (header(lambda content: content.update({"model.norm.weight": 7})), "its entry is damaged"),
        (header(lambda content: content.clear()), "there are no tensors"),
        (index({"a": "../model.safetensors"}), "not a safetensors file beside it"),
        (index({"a": "/etc/passwd"}), "not a safetensors file beside it"),
        (index({"a": "other.safetensors"}), "other.safetensors: the file is missing"),
        (index(["a"]), "has no weight_map"),
        pytest.param(link_out, "leads out of the folder", marks=needs_links),
        (config(model_type="mamba9"), f"family 'mamba9' cannot be imported.*{sorted(FAMILIES)[0]}.*qwen3"),
        (config(model_type=None), "model_type is missing"),
        (config(hidden_act="relu"), "hidden_act is 'relu'; only silu"),
        (config(hidden_size="64"), "hidden_size must be a number"),
        (config(num_attention_heads=-4), "must be a whole number"),
        (config(hidden_size=10**400), "hidden_size must be a number"),
        (config(num_hidden_layers=1 << 31), "num_hidden_layers must be a whole number up to 1024"),
        (config(head_dim=1 << 31), "head_dim must be a whole number up to"),
        (config(rms_norm_eps=float("nan")), "rms_norm_eps must be a number"),
        (config(rope_parameters={"rope_type": "su", "rope_theta": 1e4}), "type 'su' cannot be imported"),
        (config(use_sliding_window=True), "use_sliding_window is True"),
        (weights(lambda tensors: tensors.update({"model.odd.weight": ("F32", np.ones(4, np.float32))})), "no rule for"),
        (weights(lambda tensors: tensors.update({FIRST: ("F8_E4M3", np.ones((96, 64), np.uint8))})), "without its"),
        (weights(lambda tensors: tensors.pop(FIRST)), "blk.0.ffn_up.weight"),
        (weights(lambda tensors: tensors.update({FIRST: ("F32", np.ones((9, 64), np.float32))})), "ffn_up.weight"),
        (weights(lambda tensors: tensors.update({FIRST: ("I32", np.ones((96, 64), np.int32))})), "whole numbers"),
        (tokenizer(model={"type": "WordLevel", "vocab": {}}), "kind 'WordLevel' is not imported"),
        (tokenizer(model={"type": "BPE", "vocab": {"a": 999}, "merges": []}), "has a token 999"),
        (tokenizer(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}), "token ids are unusable"),
        (tokenizer(model={"type": "BPE"}), "is damaged"),
        (tokenizer(model={**TOKENIZER["model"], "vocab": {"a\ud800": 0}, "merges": []}), "GGUF cannot hold"),
        (config(type_vocab_size=-1), "GGUF cannot hold"),
        (tokenizer(pre_tokenizer={"type": "Whitespace"}), "in a way that GGUF has no name for"),
        (tokenizer(pre_tokenizer={"type": "Nothing"}), "pre-tokenizer cannot be used"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_refused(
    damage: Callable[[Path], None], message: str, folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    store = OwnStore(tmp_path / "store")
    with pytest.raises(LocalLLMError, match=message):
        imported_model(store, folder, "Q8_0", lambda *_: None, lambda *_: None)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name != ".lock"]


def test_an_unknown_type_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no type Q9"):
        import_folder(folder, tmp_path / "made.gguf", "Q9", lambda *_: None, lambda *_: None)


@needs_links
def test_links_of_the_hugging_face_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "snapshots" / "abc"
    blobs = tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(folder.iterdir()):
        path.rename(blobs / str(number))
        os.symlink(blobs / str(number), snapshot / path.name)
    import_folder(snapshot, tmp_path / "made.gguf", None, lambda *_: None, lambda *_: None)
    assert (tmp_path / "made.gguf").stat().st_size > 0
