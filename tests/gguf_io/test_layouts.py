"""Ollama's own layouts: a translated file equals the one it was made from, and unused parts are named."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from gguf_io import ModelFile, open_model
from gguf_io.errors import ModelFileError
from gguf_io.layouts import StandardFile
from gguf_io.layouts.ollama import RULES, LayoutRule
from gguf_io.metadata import Metadata, MetadataArray
from tests.gguf_files import copying, finish
from tests.layout_files import LAYOUTS, write_layout

_PRE = "tokenizer.ggml.pre"
SUFFIXES = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.kv_lora_rank",
    "context_length",
    "expert_count",
    "expert_feed_forward_length",
    "rope.dimension_count",
    "rope.dimension_sections",
    "rope.mrope_section",
    "rope.swa.dimension_count",
    "vision.deepstack_visual_indexes",
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_reads_as_what_it_was_made_from(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    standard = layout.base(tmp_path / "standard.gguf")
    with open_model(standard) as expected, open_model(write_layout(layout, standard, tmp_path / "own.gguf")) as file:
        assert expected.notes == ()
        assert file.architecture == expected.architecture
        assert set(file.tensors) == set(expected.tensors)
        assert file.parameter_count == expected.parameter_count
        assert file.weights_bytes == expected.weights_bytes
        for tensor in expected.tensors:
            np.testing.assert_array_equal(file.data(tensor), expected.data(tensor))
        found = _plain(file.metadata)
        assert {key: found[key] for key in expected.metadata} == _plain(expected.metadata)
        for beginning in ("v.", "mm.", "a.", "mtp."):
            there = any(tensor.startswith(beginning) for tensor in layout.added)
            assert there == any(f" {beginning}* of" in note for note in file.notes)
        if layout.architecture != expected.architecture:
            assert f"{layout.architecture} for {expected.architecture}" in file.notes[0]
            assert not any(key.startswith(f"{layout.architecture}.") for key in file.metadata)


@pytest.mark.parametrize("name", ["gptoss", "gemma3-4b", "qwen35"])
def test_the_standard_file_is_what_other_readers_read(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    path = write_layout(layout, layout.base(tmp_path / "standard.gguf"), tmp_path / "own.gguf")
    with open_model(path) as file:
        (tmp_path / "made.gguf").write_bytes(_bytes(file))
        reader = GGUFReader(tmp_path / "made.gguf")
        assert {tensor.name: tensor.data.tobytes() for tensor in reader.tensors} == {
            tensor: file.data(tensor).tobytes() for tensor in file.tensors
        }
        fields = {key: value.contents() for key, value in reader.fields.items() if not key.startswith("GGUF.")}
        assert fields == _plain(file.metadata)
    with open_model(tmp_path / "made.gguf") as made:
        assert made.notes == () or layout.architecture == made.architecture


def test_a_standard_file_is_read_from_anywhere(tmp_path: Path) -> None:
    layout = LAYOUTS["mistral3"]
    path = write_layout(layout, layout.base(tmp_path / "standard.gguf"), tmp_path / "own.gguf")
    with open_model(path) as model:
        whole, file = _bytes(model), _standard(model)
        for start, length in (
            (0, 1),
            (3, 4096),
            (file.size - 5, 100),
            (file.size, 10),
            (file.size + 1, 10),
            (77777, 0),
        ):
            target = bytearray(length)
            count = file.read_into(memoryview(target), start)
            assert target[:count] == whole[start : start + length]
            assert count == len(whole[start : start + length])
        for start in range(0, file.size, 65_521):
            target = bytearray(65_521)
            assert target[: file.read_into(memoryview(target), start)] == whole[start : start + 65_521]


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    layout = LAYOUTS["olmo3"]
    standard = layout.base(tmp_path / "standard.gguf")
    whole = write_layout(layout, standard, tmp_path / "own.gguf")
    reader, writer = copying(whole, tmp_path / "split.gguf", split_max_tensors=20)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    first = next(tmp_path.glob("split-00001-of-*.gguf"))
    with open_model(first) as file, open_model(standard) as expected:
        assert len(file.paths) > 1
        (tmp_path / "made.gguf").write_bytes(_bytes(file))
        with open_model(tmp_path / "made.gguf") as made:
            assert set(made.metadata) == set(expected.metadata)
            for tensor in expected.tensors:
                np.testing.assert_array_equal(made.data(tensor), expected.data(tensor))


def test_another_rule_is_another_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["olmo3"]
    path = write_layout(layout, layout.base(tmp_path / "standard.gguf"), tmp_path / "own.gguf")
    identities = []
    for rule in (
        LayoutRule(becomes="olmo2"),
        LayoutRule(becomes="olmo2"),
        LayoutRule(becomes="olmo2", missing={".x": ("I", 1)}),
    ):
        monkeypatch.setattr("gguf_io.layouts.layout.RULES", {"olmo3": (rule,)})
        with open_model(path) as file:
            identities.append(file.identity())
    assert identities[0] == identities[1] != identities[2]


def test_gemma_3n_keeps_the_vocabulary_of_text(tmp_path: Path) -> None:
    tokens = ["<pad>", "<unused7>", "<0x0A>", "a", "<image>", "<audio>"]
    path = _write(
        tmp_path,
        "gemma3n",
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 6,
            "tokenizer.ggml.token_type": [3, 3, 1, 1, 3, 3],
        },
        {"token_embd.weight": (6, 4), "per_layer_token_embd.weight": (4, 8)},
    )
    with open_model(path) as file:
        assert file.tensors["token_embd.weight"].shape == (4, 4)
        assert file.data("token_embd.weight").shape == (4, 16)
        assert file.metadata.get_list("tokenizer.ggml.tokens", str) == tokens[:4]
        assert file.metadata.get_list("tokenizer.ggml.token_type", int) == [3, 1, 6, 1]
        assert len(file.metadata.get_list("tokenizer.ggml.scores", float)) == 4
        assert file.metadata.get_str("tokenizer.ggml.model") == "llama"
        (tmp_path / "made.gguf").write_bytes(_bytes(file))
        made = GGUFReader(tmp_path / "made.gguf")
        assert made.fields["tokenizer.ggml.tokens"].contents() == tokens[:4]


def test_a_table_of_characters_that_was_spelt(tmp_path: Path) -> None:
    table = bytes(range(256)) * 3
    key = "tokenizer.ggml.precompiled_charsmap"
    spelt = list(base64.b64encode(table).decode())
    with open_model(_write(tmp_path, "bert", {key: spelt}, {})) as file:
        assert bytes(file.metadata.get_list(key, int)) == table
        (tmp_path / "made.gguf").write_bytes(_bytes(file))
        field = GGUFReader(tmp_path / "made.gguf").fields[key]
        assert field.types == [GGUFValueType.ARRAY, GGUFValueType.UINT8]
    with pytest.raises(ModelFileError, match=f"{key}: is not base64"):
        open_model(_write(tmp_path, "bert", {key: [*spelt[:-1], "!"]}, {}))


def test_llama_3_without_the_name_of_its_pre_tokenizer(tmp_path: Path) -> None:
    tokens = [f"t{number}" for number in range(128256)]
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    with open_model(_write(tmp_path, "llama", keys, {})) as file:
        assert (_PRE in file.metadata, file.notes) == (False, ())
    tokens[128006], tokens[128009] = "<|start_header_id|>", "<|eot_id|>"
    for stated in ({}, {_PRE: "default"}):
        with open_model(_write(tmp_path, "llama", {**keys, **stated}, {})) as file:
            assert file.metadata.get_str(_PRE) == "llama-bpe"
    with open_model(_write(tmp_path, "llama", {**keys, _PRE: "smaug-bpe"}, {})) as file:
        assert (file.metadata.get_str(_PRE), file.notes) == ("smaug-bpe", ())


def test_laguna_deepseek_ocr_and_qwen_3_next(tmp_path: Path) -> None:
    path = _write(tmp_path, "laguna", {"laguna.rope.swa.freq_base": 5000.0}, {"blk.0.attn_g.weight": (4, 4)})
    with open_model(path) as file:
        assert list(file.tensors) == ["blk.0.attn_gate.weight"]
        assert file.metadata.get_float("laguna.rope.freq_base_swa") == 5000.0
    shapes = {"blk.1.ffn_down_exps.weight": (4, 8, 12), "blk.1.ffn_down_shexp.weight": (8, 24), "s.neck.weight": (4, 4)}
    with open_model(_write(tmp_path, "deepseekocr", {"deepseekocr.block_count": 2}, shapes)) as file:
        numbers = file.metadata.get_int
        assert numbers("deepseek2-ocr.block_count") == 2
        assert numbers("deepseek2-ocr.expert_feed_forward_length") == 12
        assert numbers("deepseek2-ocr.expert_shared_count") == 2
        assert "vision (SAM), 1 tensors s.*" in file.notes[1]
    keys = {"qwen3next.attention.head_count_kv": [0, 0, 2]}
    with open_model(_write(tmp_path, "qwen3next", keys, {"blk.0.ssm_dt": (4,)})) as file:
        assert list(file.tensors) == ["blk.0.ssm_dt.bias"]
        assert file.metadata.get_int("qwen3next.attention.head_count_kv") == 2


def test_ends_of_answers_of_glm(tmp_path: Path) -> None:
    with open_model(_write(tmp_path, "glm4moelite", {"tokenizer.ggml.eos_token_ids": [5, 6, 7]}, {})) as file:
        assert file.metadata.get_int("tokenizer.ggml.eot_token_id") == 6
        assert file.metadata.get_int("tokenizer.ggml.eom_token_id") == 7


@pytest.mark.parametrize("architecture", RULES)
@pytest.mark.parametrize("value", [-1, 2**63 - 1, "x", [-5, 7, 2**40], ["a"], 1e30])
def test_absurd_values_are_left_to_those_who_read_them(architecture: str, value: Any, tmp_path: Path) -> None:
    keys = {f"{architecture}.{suffix}": value for suffix in SUFFIXES}
    keys |= {"tokenizer.ggml.token_type": value, "tokenizer.ggml.eos_token_ids": value}
    shapes = {"v.a": (4,), "mtp.a": (4,), "token_embd.weight": (4, 4), "blk.1.ffn_down_shexp.weight": (4, 4)}
    shapes |= {"dense.0.weight": (4,)} if architecture == "gemma3" else {}
    shapes |= {"blk.0.ssm_dt": (4,)} if architecture.startswith("qwen3") else {}
    with open_model(_write(tmp_path, architecture, keys, shapes)) as file:
        if file.notes:
            (tmp_path / "made.gguf").write_bytes(_bytes(file))
            open_model(tmp_path / "made.gguf").close()


def _plain(metadata: Metadata) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, MetadataArray) else value for key, value in metadata.items()}


def _standard(model: ModelFile) -> StandardFile:
    file = model.standard_file()
    assert file is not None
    return file


def _bytes(model: ModelFile) -> bytes:
    """The model's standard file, read in pieces of odd sizes."""
    file, written = _standard(model), io.BytesIO()
    for start in range(0, file.size, 999_983):
        target = bytearray(min(999_983, file.size - start))
        assert file.read_into(memoryview(target), start) == len(target)
        written.write(target)
    return written.getvalue()


def _write(folder: Path, architecture: str, keys: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    path = folder / "own.gguf"
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        items = value if isinstance(value, list) else [value]
        kinds = {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32}
        small = all(isinstance(item, int) and -(2**31) <= item < 2**31 for item in items)
        kind = kinds.get(type(items[0]), GGUFValueType.INT32 if small else GGUFValueType.INT64)
        if isinstance(value, list):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, kind)
        else:
            writer.add_key_value(key, value, kind)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    return finish(writer)
