"""Planned sizes against those that llama.cpp reports for the same file and settings."""

import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_io.model_file import open_model
from gpu_offload import loading
from gpu_offload.dry_run import MAIN, dry_run
from gpu_offload.estimate import Estimate
from gpu_offload.memory import FileSizes
from gpu_offload.options import LlamaOptions, Use
from gpu_offload.runner import LlamaCppRunner
from tests.gpu_offload import sparse_models
from tests.oracle import llama_oracle

pytestmark = [
    pytest.mark.oracle,
    llama_oracle.needs_llama,
    pytest.mark.skipif(sys.platform != "linux", reason="llama.cpp's figures are read on Linux alone"),
]

MIB = 2**20
BUFFERS = {"weights": "model", "kv": "KV|RS", "compute": "compute"}


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    """Weights as in the file: for repacked ones the log counts the file's copy as well."""
    monkeypatch.setattr(loading, "can_repack", lambda: False)


def loaded(path: Path, options: LlamaOptions, caplog: pytest.LogCaptureFixture) -> dict[str, float]:
    """What llama.cpp logs as allocated when it really loads a model, in MiB."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "localllm.llama_cpp"), open_model(path) as model:
        LlamaCppRunner(model, options).close()
    text = "\n".join(record.message for record in caplog.records)
    return {
        part: sum(map(float, re.findall(rf" (?:{kinds}) buffer size = +([\d.]+) MiB", text)))
        for part, kinds in BUFFERS.items()
    }


def reported(path: Path, options: LlamaOptions) -> Use:
    with open_model(path) as model:
        found = dry_run(model, options)
    assert list(found) == [MAIN]
    return found[MAIN]


HALVES = {"weight_type": sparse_models.F16, "output_type": sparse_models.F16}
MADE = {
    "llama": sparse_models.SparseModel("llama", 2, 256, 512, 4, 2, 64, 32000, context=2048, **HALVES),
    "qwen3": replace(sparse_models.TINY_QWEN3, vocabulary=151936, **HALVES),
}


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", MADE)
def test_a_dry_run_says_what_loading_takes(tmp_path, name, kv_type, caplog):
    made_model = sparse_models.write(MADE[name], tmp_path / "model.gguf")
    options = LlamaOptions(context_tokens=2048, type_k=kv_type, type_v=kv_type, gpu_layers=0)
    found = reported(made_model, options)
    truth = loaded(made_model, options, caplog)
    for part, size in truth.items():
        assert getattr(found, part) / MIB == pytest.approx(size, abs=0.03), part  # the log has two digits
    with open_model(made_model) as model:
        guess = Estimate(FileSizes(model), options, ()).in_main_memory()
    assert guess.weights == pytest.approx(found.weights, rel=0.01)
    assert guess.kv == found.kv
    assert guess.needed == pytest.approx(found.needed, rel=0.05)


@pytest.mark.parametrize("shape", ["TINY_QWEN3", "TINY_GEMMA3"])
def test_a_dry_run_of_other_shapes_says_what_loading_takes(tmp_path, shape, caplog):
    path = sparse_models.write(getattr(sparse_models, shape), tmp_path / "model.gguf")
    options = LlamaOptions(context_tokens=1024, max_sequences=32, gpu_layers=0)
    found, truth = reported(path, options), loaded(path, options, caplog)
    for part, size in truth.items():
        assert getattr(found, part) / MIB == pytest.approx(size, abs=0.03), part


def test_what_llama_cpp_refuses_has_no_figures_and_complains_later(tmp_path, caplog):
    novel = replace(sparse_models.TINY_QWEN3, architecture="novel")
    with open_model(sparse_models.write(novel, tmp_path / "model.gguf")) as model, caplog.at_level(logging.WARNING):
        assert dry_run(model, LlamaOptions(gpu_layers=0)) == {}
        assert dry_run(model, LlamaOptions(split_mode="row")) == {}
    assert not caplog.records


BASE = LlamaOptions(context_tokens=8192, gpu_layers=0)
SETTINGS = {
    "short": replace(BASE, context_tokens=1024),
    "usual": BASE,
    "long": replace(BASE, context_tokens=32768, max_sequences=32),
    "quantised": replace(BASE, type_k="q8_0", type_v="q8_0"),
    "long batches": replace(BASE, batch_rows=2048),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    "name", ["LLAMA_8B", "QWEN3_06B", "QWEN2_VL_7B", "QWEN3_30B_A3B", "GEMMA2_9B", "GEMMA3_27B", "DEEPSEEK_V2_LITE"]
)
def test_estimates_for_real_shapes_are_near_and_never_far_under(tmp_path, name, options):
    path = sparse_models.write(getattr(sparse_models, name), tmp_path / "model.gguf")
    found = reported(path, options)
    with open_model(path) as model:
        guess = Estimate(FileSizes(model), options, ()).in_main_memory()
    assert guess.weights == pytest.approx(found.weights, rel=0.001)
    assert guess.kv == found.kv
    assert abs(guess.needed - found.needed) < 0.05 * found.needed
    assert guess.compute - found.compute > -32 * MIB
