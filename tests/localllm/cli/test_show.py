import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from localllm.cli.main import main
from tests.gguf_files import finish
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write

TEMPLATE = "{{ messages[0].content }}\x1b[2J"


def write_model(path: Path) -> Path:
    """A file with the keys of a Llama of 2 layers, 8 wide, 2 heads of 4, 1 KV head; one F32 and one F16 tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("sample")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_token_list([f"t{index}" for index in range(40)])
    writer.add_chat_template(TEMPLATE)
    writer.add_array("sample.pair", [1, 2])
    writer.add_float32("sample.infinite", float("inf"))
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_k.weight", np.zeros((4, 8), np.float16))
    writer.add_tensor("token_embd.weight", np.zeros((40, 8), np.float32))
    finish(writer)
    return path


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run localllm show and return the exit code."""

    def call(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["localllm", "show", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return call


def test_json_counts_by_hand(tmp_path: Path, show: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "m.gguf")
    assert show(str(path), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    metadata = result.pop("metadata")
    buffers = result["buffers_bytes"]
    assert buffers > 0  # llama.cpp's, estimated
    assert result == {
        "name": "sample",
        "notes": [],
        "architecture": "llama",
        "parameters": 40 * 8 + 2 * 4 * 8,
        "quantization": "F32",
        "file_bytes": path.stat().st_size,
        "context": 64,
        "vocabulary": 40,
        "layers": 2,
        "width": 8,
        "heads": 2,
        "tensor_groups": [
            {"type": "F32", "tensors": 1, "bytes": 40 * 8 * 4},
            {"type": "F16", "tensors": 2, "bytes": 2 * 4 * 8 * 2},
        ],
        "chat_template": TEMPLATE,
        "weights_bytes": 1280 + 128,
        "kv_types": ["f16", "f16"],
        # 2 layers of 1 head: a key and a value of 4 numbers, 2 bytes each
        "kv_bytes_per_token": 2 * 1 * (4 + 4) * 2,
        "buffers_bytes": buffers,
        "window_bytes_per_token": 0,
        "window_tokens": 0,
        "state_bytes": 0,
        "memory_bytes": 1280 + 128 + 64 * 32 + buffers,
    }
    assert metadata["tokenizer.ggml.tokens"] == {"items": 40}
    assert metadata["sample.pair"] == [1, 2]
    assert metadata["sample.infinite"] == "inf"


def test_text_says_the_same(tmp_path: Path, show: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert show(str(write_model(tmp_path / "m.gguf"))) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("sample: llama, 384 parameters, F32\n")
    for words in ("64 tokens", "40 tokens", "1.25 KiB", "32 B a token", "[40 items]", TEMPLATE):
        assert words in out


def test_keys_and_values_are_counted_in_the_types_of_the_settings(
    tmp_path: Path, show: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["llama"]
    path = str(write(model, tmp_path / "m.gguf"))
    monkeypatch.setenv("LOCALLLM_KV_TYPE_V", "q8_0")
    assert show(path, "--json") == 0
    blocks = model.head // 32 * 34
    expected = model.layers * model.kv_heads * (2 * model.head + 4 + blocks)
    assert json.loads(capsys.readouterr().out)["kv_bytes_per_token"] == expected
    assert show(path) == 0
    assert "a token in f16 and q8_0" in capsys.readouterr().out


def test_heads_that_do_not_fit_the_types_are_named(
    tmp_path: Path, show: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_KV_TYPE_K", "q8_0")
    assert show(str(write_model(tmp_path / "m.gguf"))) == 2
    assert "heads of 4 numbers" in capsys.readouterr().err


def test_a_file_without_layers_is_shown(
    tmp_path: Path, show: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "clip")
    writer.add_tensor("v.weight", np.zeros((4, 8), np.float32))
    finish(writer)
    assert show(str(tmp_path / "m.gguf")) == 0
    out = capsys.readouterr().out
    assert "unknown for this architecture" in out
    assert show(str(tmp_path / "m.gguf"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"] is None


def test_a_file_that_is_not_a_model_exits_2(
    tmp_path: Path, show: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.gguf").write_text("hello, this is no model at all")
    for path in (tmp_path / "missing.gguf", tmp_path, tmp_path / "text.gguf"):
        assert show(str(path)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert str(path) in err


def test_an_absurd_number_of_layers_is_refused(
    tmp_path: Path, show: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(2**32 - 1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    finish(writer)
    assert show(str(tmp_path / "m.gguf")) == 2
    assert "llama.block_count: is 4294967295, outside 0..1024" in capsys.readouterr().err


def test_real_models_are_shown(data_dir: Path, show: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((data_dir / "models" / "gguf").glob("*.gguf")):
        assert show(str(path), "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["architecture"] == "llama"
        assert result["file_bytes"] == path.stat().st_size
