"""What can only be tested on a machine with a GPU and a llama.cpp built for it."""

import logging
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from gguf_io.model_file import open_model
from gpu_offload import devices
from gpu_offload.devices import gpus
from gpu_offload.errors import LlamaCppMissingError
from gpu_offload.memory import kv_bytes_per_token
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.placement.backends import open_runner
from localllm.placement.llama import LlamaRequest, plan
from localllm.settings import Settings
from tests.gpu_offload import sparse_models

pytestmark = pytest.mark.gpu

MIB = 2**20
LEFT = 2 * 2**30  # of a full GPU's memory, too little for an 8B model


@pytest.fixture(scope="module")
def gpu():
    try:
        found = gpus()
    except LlamaCppMissingError as error:
        pytest.skip(str(error))
    if not found:
        pytest.skip("llama.cpp sees no GPU")
    return found[0]


def reported(log: str, device: str) -> dict[str, float]:
    """The buffers that llama.cpp's log reports for a device, in MiB."""
    sizes = dict.fromkeys(("model", "KV", "compute"), 0.0)
    for kind in sizes:
        # Metal's weights are "MTL0_Mapped"; "_Host" is main memory visible to a GPU.
        line = rf"\b{device}(?!_Host)(?:_\w+)? +{kind} buffer size = +([\d.]+) MiB"
        sizes[kind] = sum(map(float, re.findall(line, log)))
    return sizes


def test_any_number_of_layers_gives_the_same_story(gpu, data_dir, open_runner):
    tokens = [1, 403, 407, 261, 378, 432, 383, 286]
    logits = []
    for layers in (0, 3, None):
        options = LlamaOptions(context_tokens=256, gpu_layers=layers, threads=2, split_mode="none")
        runner = open_runner(data_dir / "models/gguf/stories260K-F32.gguf", options)
        sequence = runner.create_sequence()
        rows = range(len(tokens))
        logits.append(runner.run(tokens, rows, [sequence] * len(tokens), rows).copy())
    for found in logits[1:]:
        np.testing.assert_allclose(found, logits[0], atol=0.1)
        np.testing.assert_array_equal(found.argmax(axis=1), logits[0].argmax(axis=1))


@pytest.mark.parametrize("layers", [None, 15])
def test_the_gpu_takes_what_was_planned(gpu, tmp_path, caplog, layers):
    path = sparse_models.write(sparse_models.QWEN3_06B, tmp_path / "model.gguf")
    base = LlamaOptions(split_mode="none")
    request = LlamaRequest(context_tokens=8192, gpu_layers=layers, base=base)
    with open_model(path) as model, caplog.at_level(logging.DEBUG, "localllm.llama_cpp"):
        planned = plan(model, gpus(), 2**40, replace(request, dry_run=True))
        estimated = plan(model, gpus(), 2**40, request)
        assert planned.options == estimated.options
        caplog.clear()  # a dry run logs sizes too
        before = gpus()[0].free_bytes
        runner = LlamaCppRunner(model, planned.options)
        taken = before - gpus()[0].free_bytes
        runner.close()
    truth = reported("\n".join(record.message for record in caplog.records), gpu.name)
    use, guess = planned.uses[1], estimated.uses[1]
    assert planned.measured is (sys.platform == "linux") and truth["model"] > 0
    if planned.measured:
        for part, size in (("model", use.weights), ("KV", use.kv), ("compute", use.compute)):
            assert size / MIB == pytest.approx(truth[part], abs=0.5), part
        assert taken / MIB == pytest.approx(use.needed / MIB, rel=0.05, abs=200)  # other programs use the GPU too
    assert guess.needed / MIB == pytest.approx(sum(truth.values()), rel=0.1)


def test_a_gpu_that_filled_up_meanwhile_gets_less_and_it_is_said(gpu, tmp_path, monkeypatch, caplog):
    before = gpus()
    with open_model(sparse_models.write(sparse_models.QWEN3_06B, tmp_path / "small.gguf")) as small:
        cells = (gpu.free_bytes - LEFT) // kv_bytes_per_token(small, "f16", "f16")
        # Few rows at once: masks for so many cells would use up the memory to be left free.
        options = LlamaOptions(context_tokens=cells, batch_rows=32, split_mode="none")
        hog = LlamaCppRunner(small, options)
    told = iter([before])
    monkeypatch.setattr(devices, "gpus", lambda: next(told, None) or gpus())
    path = sparse_models.write(sparse_models.LLAMA_8B, tmp_path / "large.gguf")
    try:
        with open_model(path) as large, caplog.at_level(logging.WARNING):
            runner, chosen = open_runner(large, Settings(backend="llama", ctx=4096))
            runner.close()
    finally:
        hog.close()
    assert "Trying again with less on the GPU" in caplog.text
    assert chosen.options.gpu_layers < 33
