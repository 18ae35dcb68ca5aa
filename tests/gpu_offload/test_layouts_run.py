"""Models in Ollama's own layouts give the same results as in llama.cpp's layout, in both backends."""

import logging
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_io import open_model
from gguf_io.errors import LocalLLMError, ModelFileError
from gpu_offload.errors import LlamaCppError
from gpu_offload.loading import load_model, served
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from gpu_offload.text_encoder import LlamaTextEncoder
from localllm.cli.main import main
from localllm.engine.runner import Runner
from localllm.placement.backends import open_runner
from localllm.placement.llama import LlamaRequest, plan
from localllm.settings import Settings
from localllm.wings.lab.quality.quantize import quantize
from models.native_runner import NativeRunner
from tests.layout_files import LAYOUTS, Layout, write_layout
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

OPTIONS = LlamaOptions(context_tokens=256, max_sequences=2, gpu_layers=0, threads=1)
TOKENS = np.random.default_rng(7).integers(0, 300, 50).tolist()
FLAGS = ("--raw", "--temperature", "0", "--max-tokens", "40", "--ctx", "256", "--no-cache", "--backend")
EMBEDDING = "embeddinggemma"
GENERATING = [name for name in LAYOUTS if name != EMBEDDING]


@pytest.mark.parametrize("name", GENERATING)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    standard, own = _both(LAYOUTS[name], tmp_path)
    with open_model(standard) as file:
        expected = _logits(LlamaCppRunner(file, OPTIONS))
    with open_model(own) as file:
        np.testing.assert_array_equal(_logits(LlamaCppRunner(file, OPTIONS)), expected)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].native])
def test_the_native_engine_computes_the_same(name: str, tmp_path: Path) -> None:
    standard, own = _both(LAYOUTS[name], tmp_path)
    with open_model(standard) as file:
        expected = _logits(NativeRunner(file, kv_bytes=8 << 20, context=512))
    with open_model(own) as file:
        np.testing.assert_array_equal(_logits(NativeRunner(file, kv_bytes=8 << 20, context=512)), expected)


@pytest.mark.parametrize("name", GENERATING)
def test_it_is_planned_as_the_standard_file_is(name: str, tmp_path: Path) -> None:
    plans = []
    for path in _both(LAYOUTS[name], tmp_path):
        with open_model(path) as file:
            made = plan(file, [], 1 << 30, LlamaRequest(context_tokens=256, dry_run=True))
            plans.append(made)
            assert made.measured == (sys.platform == "linux")
    assert plans[0] == plans[1]


@pytest.mark.parametrize("backend", ["native", "llama"])
@pytest.mark.parametrize("name", ["stories260K-F16", "stories260K-pad256-Q4_K_M"])
def test_a_real_model_tells_the_same_story(
    name: str,
    backend: str,
    tmp_path: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    standard = data_dir / f"models/gguf/{name}.gguf"
    layout = replace(LAYOUTS["mistral3"], keys={})  # Llama except for the keys
    stories = []
    monkeypatch.setattr("sys.stdin", None)
    for path in (standard, write_layout(layout, standard, tmp_path / "own.gguf")):
        monkeypatch.setattr("sys.argv", ["localllm", "run", str(path), "Once upon a time", *FLAGS, backend])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        stories.append(capsys.readouterr().out)
    assert len(stories[0]) > 100
    assert stories[0] == stories[1]


def test_an_embedding_model_makes_the_same_vectors(tmp_path: Path) -> None:
    vectors = []
    for path in _both(LAYOUTS[EMBEDDING], tmp_path):
        with open_model(path) as file, LlamaTextEncoder(file, OPTIONS) as encoder:
            vectors.append(encoder.pooled([TOKENS[:9], TOKENS[9:12]]))
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_what_opens_a_model_says_whose_layout_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, own = _both(LAYOUTS["mistral3"], tmp_path)
    with caplog.at_level(logging.INFO, "localllm.placement.backends"), open_model(own) as file:
        runner, choice = open_runner(file, Settings(ctx=256, kv_mib=8, gpu_layers=0), None)
        runner.close()
    assert choice.backend == "native"
    assert "Not used: projector, 1 tensors mm.*" in caplog.text


@pytest.mark.parametrize("command", [["show"], ["plan", "--ctx", "256"], ["plan", "--json", "--ctx", "256"]])
def test_commands_say_what_is_not_used(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, own = _both(LAYOUTS["qwen35"], tmp_path)
    monkeypatch.setattr("sys.argv", ["localllm", command[0], str(own), *command[1:]])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().out
    assert not ended.value.code
    assert "Ollama's own layout" in shown
    assert "multi-token prediction, 2 tensors mtp.*" in shown


def test_quantising_asks_for_another_file(tmp_path: Path) -> None:
    _, own = _both(LAYOUTS["olmo3"], tmp_path)
    with pytest.raises(LocalLLMError, match=r"cannot be quantised.*olmo3 for olmo2.*Start from"):
        quantize(own, tmp_path / "small.gguf", "Q8_0", lambda *_: None)


def test_a_file_that_changes_while_llama_cpp_reads_it(tmp_path: Path) -> None:
    _, own = _both(LAYOUTS["olmo3"], tmp_path)
    with open_model(own) as file:
        with own.open("r+b") as changed:
            changed.truncate(file.size_bytes - 64)
        with pytest.raises(ModelFileError, match="was changed while it was open"):
            load_model(file, OPTIONS)


def test_a_load_of_it_can_be_stopped(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def progress(_what: str, share: float) -> None:
        if share > 0.3:
            raise StoppedError

    _, own = _both(LAYOUTS["olmo3"], tmp_path)
    with open_model(own) as file, pytest.raises(StoppedError):
        load_model(file, OPTIONS, progress)


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_system_without_files_of_callbacks_is_reported(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, own = _both(LAYOUTS["olmo3"], tmp_path)
    with open_model(own) as file:
        standard = file.standard_file()
        assert standard is not None
        monkeypatch.setattr("sys.platform", system)
        with pytest.raises(LlamaCppError, match="on Linux only"), served(standard):
            pass


def _both(layout: Layout, folder: Path) -> tuple[Path, Path]:
    standard = layout.base(folder / "standard.gguf")
    return standard, write_layout(layout, standard, folder / "own.gguf")


def _logits(runner: Runner) -> NDArray[np.float32]:
    count, sequence = len(TOKENS), runner.create_sequence()
    try:
        logits = runner.run(TOKENS, list(range(count)), [sequence] * count, list(range(count))).copy()
    finally:
        runner.close()
    assert np.isfinite(logits).all()
    assert logits.std() > 0.5
    return logits
