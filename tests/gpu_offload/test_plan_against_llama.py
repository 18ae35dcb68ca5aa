"""Planned sizes against those that llama.cpp itself reports for the same file and settings."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_io.model_file import open_model
from gpu_offload import library
from gpu_offload.loading import output_rows
from gpu_offload.memory import ModelNeeds
from gpu_offload.options import LlamaOptions
from gpu_offload.placement import Placement
from gpu_offload.sequences import sequence_numbers, window_of
from tests.gpu_offload import sparse_models
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

MIB = 2**20
KV = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB")
COMPUTE = re.compile(r"compute buffer size = +([\d.]+) MiB")
OUTPUT = re.compile(r"output buffer size = +([\d.]+) MiB")
WEIGHTS = re.compile(r"model buffer size = +([\d.]+) MiB")


def reported(path: Path, options: LlamaOptions, *, simulate: bool) -> dict[str, float]:
    """Return llama.cpp's own sizes in MiB, CPU only. simulate lets it work everything out without allocating."""
    llama = llama_oracle.api()
    library.llama()  # which takes llama.cpp's log the first time
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    if simulate:
        params.no_alloc = True
        params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    with llama_oracle.recorded_log() as lines:
        model = llama.llama_model_load_from_file(str(path).encode(), params)
        assert model, llama_oracle.log()[-2000:]
        wanted = llama.llama_context_default_params()
        wanted.n_ctx = options.context_tokens
        wanted.n_batch = wanted.n_ubatch = options.batch_rows
        wanted.n_seq_max = sequence_numbers(options, window_of(model))
        wanted.n_outputs_max = output_rows(options)
        wanted.kv_unified = True
        wanted.swa_full = options.full_window_cache
        wanted.flash_attn_type = int(options.flash_attention is not False)
        wanted.type_k = getattr(llama, f"GGML_TYPE_{options.type_k.upper()}")
        wanted.type_v = getattr(llama, f"GGML_TYPE_{options.type_v.upper()}")
        context = llama.llama_init_from_model(model, wanted)
        assert context, llama_oracle.log()[-2000:]
        llama.llama_free(context)
        llama.llama_model_free(model)
    log = "".join(lines)
    return {
        "weights": sum(map(float, WEIGHTS.findall(log))),
        "kv": sum(map(float, KV.findall(log))),
        "compute": sum(map(float, COMPUTE.findall(log) + OUTPUT.findall(log))),
    }


def planned(path: Path, options: LlamaOptions) -> dict[str, float]:
    with open_model(path) as model:
        use = Placement(ModelNeeds(model), options, ()).main_memory(0)
    return {"weights": use.weights / MIB, "kv": use.kv / MIB, "compute": use.compute / MIB}


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3"])
def made_model(request, data_dir, tmp_path_factory) -> Path:
    tool = data_dir.parent / "tools/make_model.py"
    if not tool.exists():
        pytest.skip(f"no model maker at {tool}")
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    subprocess.run([sys.executable, tool, request.param, path, "--type", "F16"], check=True, capture_output=True)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_loaded_model_takes_what_was_planned(made_model, kv_type):
    options = LlamaOptions(context_tokens=2048, type_k=kv_type, type_v=kv_type)
    truth, ours = reported(made_model, options, simulate=False), planned(made_model, options)
    assert ours["weights"] == pytest.approx(truth["weights"], rel=0.01)
    assert ours["kv"] == pytest.approx(truth["kv"], abs=0.02)
    assert sum(ours.values()) == pytest.approx(sum(truth.values()), rel=0.05)


BASE = LlamaOptions(context_tokens=8192)
SETTINGS = {
    "short": replace(BASE, context_tokens=1024),
    "usual": BASE,
    "long": replace(BASE, context_tokens=32768, max_sequences=2),
    "quantised": replace(BASE, type_k="q8_0", type_v="q8_0"),
    "no flash attention": replace(BASE, flash_attention=False),
    "long batches": replace(BASE, batch_rows=2048),
    "windows only": replace(BASE, context_tokens=32768, max_sequences=2, full_window_cache=False),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    "name", ["LLAMA_8B", "QWEN3_06B", "QWEN2_VL_7B", "QWEN3_30B_A3B", "GEMMA2_9B", "GEMMA3_27B", "DEEPSEEK_V2_LITE"]
)
def test_real_shapes_within_five_percent_and_never_far_under(tmp_path, name, options):
    path = sparse_models.write(getattr(sparse_models, name), tmp_path / "model.gguf")
    truth, ours = reported(path, options, simulate=True), planned(path, options)
    with open_model(path) as model:
        weights = ModelNeeds(model).file_bytes / MIB  # not allocated in a simulation
    assert ours["weights"] == pytest.approx(weights, rel=1e-6)
    assert ours["kv"] == pytest.approx(truth["kv"], abs=0.02)
    difference = ours["compute"] - truth["compute"]
    assert difference > -200
    assert abs(difference) < 0.05 * (weights + truth["kv"] + truth["compute"])
    assert ours["compute"] == pytest.approx(truth["compute"], rel=0.2)
