import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_io.errors import ModelFileError
from localllm.errors import RequestError
from localllm.wings.lab.quality.quantize import quantize
from tests.gguf_files import finish
from tests.systems import CAN_LINK

SOURCES = ["stories260K-F32.gguf", "stories260K-F16.gguf", "tinystories656K-pad256-F32.gguf"]


def quiet(_what: str, _share: float) -> None:
    pass


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        tensor.name: (tensor.tensor_type.name, tensor.shape.tolist(), tensor.data.tobytes())
        for tensor in gguf.GGUFReader(path).tensors
    }


def metadata(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if "GGUF." not in name}


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("source", SOURCES)
def test_own_quantisers_write_what_llama_cpp_writes(data_dir: Path, tmp_path: Path, source: str, kind: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="the llama extra is not installed")
    path, ours, theirs = data_dir / "models/gguf" / source, tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    quantize(path, ours, kind, quiet)
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    assert llama_cpp.llama_model_quantize(os.fsencode(path), os.fsencode(theirs), ctypes.byref(parameters)) == 0
    assert tensors(ours) == tensors(theirs)
    assert metadata(ours) == metadata(theirs)


def test_a_file_that_appears_meanwhile_stays(data_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "new.gguf"
    with pytest.raises(RequestError, match="exists already"):
        quantize(data_dir / "models/gguf" / SOURCES[0], target, "Q8_0", lambda *_: target.write_text("mine") and None)
    assert target.read_text() == "mine" and os.listdir(tmp_path) == ["new.gguf"]


@pytest.mark.oracle
def test_llama_cpp_quantises_the_rest(data_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="the llama extra is not installed")
    target = tmp_path / "q4.gguf"
    quantize(data_dir / "models/gguf/tinystories656K-pad256-F32.gguf", target, "q4_k_m", quiet)
    assert tensors(target) == tensors(data_dir / "models/gguf/tinystories656K-pad256-Q4_K_M.gguf")
    assert os.listdir(tmp_path) == ["q4.gguf"]


@pytest.mark.oracle
def test_llama_cpp_tells_how_far_it_is_and_once_what_does_not_fit(
    data_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llama_cpp", reason="the llama extra is not installed")
    shares: list[float] = []
    source = data_dir / "models/gguf/stories260K-F32.gguf"
    quantize(source, tmp_path / "q4.gguf", "Q4_K_M", lambda _what, share: shares.append(share))
    assert len(shares) > 20 and shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "matrices have rows that Q4_K_M cannot hold" in said

    def stop(_what: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "stopped.gguf", "Q4_K_M", stop)
    assert os.listdir(tmp_path) == ["q4.gguf"]


def test_a_model_is_never_written_over_itself_and_a_new_file_is_like_others(data_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes((data_dir / "models/gguf" / SOURCES[0]).read_bytes())
    if CAN_LINK:
        (tmp_path / "link.gguf").symlink_to(source)
    before = source.read_bytes()
    for target in (source, *([tmp_path / "link.gguf"] if CAN_LINK else [])):
        with pytest.raises(RequestError, match="exists already"):
            quantize(source, target, "Q8_0", quiet)
    assert source.read_bytes() == before
    quantize(source, tmp_path / "new.gguf", "Q8_0", quiet)
    assert (tmp_path / "new.gguf").stat().st_mode == source.stat().st_mode


def test_the_format_is_right_without_llama_cpp(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(size=(6, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "f32.gguf", "llama")
    writer.add_name("x")
    writer.add_array("some.words", ["a", "b"])
    writer.add_tensor("blk.0.attn_k.weight", values)
    writer.add_tensor("blk.0.attn_norm.weight", values[0])
    writer.add_tensor("blk.0.ffn_down.weight", values[:, :20])
    finish(writer)
    quantize(tmp_path / "f32.gguf", tmp_path / "q8.gguf", "Q8_0", quiet)
    found = tensors(tmp_path / "q8.gguf")
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0).tobytes()
    assert found["blk.0.attn_k.weight"] == ("Q8_0", [64, 6], expected)
    assert found["blk.0.attn_norm.weight"] == ("F32", [64], values[0].tobytes())
    assert found["blk.0.ffn_down.weight"] == ("F16", [20, 6], values[:, :20].astype(np.float16).tobytes())
    assert metadata(tmp_path / "q8.gguf")["some.words"] == ["a", "b"]


@pytest.mark.parametrize(("kind", "value"), [("Q8_0", 3e38), ("Q8_0", np.inf), ("Q8_0", np.nan), ("F16", 3e38)])
def test_values_that_do_not_fit_are_refused(tmp_path: Path, kind: str, value: float) -> None:
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    weights = np.ones((4, 64), np.float32)
    weights[1, 2] = value
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", weights)
    finish(writer)
    with pytest.raises(ModelFileError, match=r"ffn_up\.weight has values that are not finite, or too large"):
        quantize(source, target, kind, quiet)
    assert os.listdir(tmp_path) == ["source.gguf"]


def test_what_is_refused_leaves_no_file(data_dir: Path, tmp_path: Path) -> None:
    models = data_dir / "models/gguf"
    with pytest.raises(RequestError, match=r"There is no type Q9\. Choose one of F16"):
        quantize(models / SOURCES[0], tmp_path / "a.gguf", "Q9", quiet)
    with pytest.raises(RequestError, match="quantised already"):
        quantize(models / "stories260K-Q8_0.gguf", tmp_path / "a.gguf", "Q8_0", quiet)
    with pytest.raises(RequestError, match="cannot be written"):
        quantize(models / SOURCES[0], tmp_path / "no" / "a.gguf", "Q8_0", quiet)

    def fail(_what: str, _share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(models / SOURCES[0], tmp_path / "a.gguf", "Q8_0", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_any_model(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from localllm.cli.main import main

    run: Callable[[], None] = main
    source = data_dir / "models/gguf" / SOURCES[0]
    monkeypatch.setattr("sys.argv", ["localllm", "quantize", str(source), str(tmp_path / "q.gguf"), "--type", "Q8_0"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    assert tensors(tmp_path / "q.gguf") == tensors(data_dir / "models/gguf/stories260K-Q8_0.gguf")
