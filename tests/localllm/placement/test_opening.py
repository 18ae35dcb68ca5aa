"""Planning again if a GPU has less room than it reported."""

import logging
from types import SimpleNamespace

import pytest

from gguf_io.model_file import open_model
from gpu_offload.devices import Device, DeviceKind
from gpu_offload.errors import LlamaCppMemoryError
from gpu_offload.options import LlamaOptions
from localllm.placement.backends import open_placed, open_runner, place
from localllm.settings import Settings
from tests.gpu_offload import sparse_models
from tests.oracle import llama_oracle

GIB = 2**30


class TightGpu:
    """A runner that loads only up to a number of layers, and the attempts made."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[LlamaOptions] = []

    def __call__(self, _model: object, options: LlamaOptions, _progress: object) -> SimpleNamespace:
        self.tried.append(options)
        if options.gpu_layers > self.most:
            raise LlamaCppMemoryError("the GPU is full.")
        return SimpleNamespace(options=options)


@pytest.fixture
def model(tmp_path):
    with open_model(sparse_models.write(sparse_models.LLAMA_8B, tmp_path / "model.gguf")) as opened:
        yield opened


def use_gpu(monkeypatch, runner: TightGpu) -> None:
    device = Device("CUDA0", "A GPU", "CUDA", DeviceKind.GPU, 6 * GIB, 5 * GIB)
    monkeypatch.setattr("gpu_offload.devices.gpus", lambda: [device])
    monkeypatch.setattr("gpu_offload.runner.LlamaCppRunner", runner)


def opened(model, **settings: object):
    return open_placed(model, place(model, Settings(backend="llama", **settings), room=8 * GIB))


def test_less_is_planned_until_it_fits_and_it_is_said(model, monkeypatch, caplog):
    runner = TightGpu(most=20)
    use_gpu(monkeypatch, runner)
    with caplog.at_level(logging.WARNING):
        loaded, placed = opened(model, ctx=4096)
    layers = [options.gpu_layers for options in runner.tried]
    assert len(layers) > 1
    assert layers == sorted(layers, reverse=True)
    assert loaded.options == placed.options
    assert placed.options.gpu_layers <= 20
    assert caplog.text.count("Trying again") == len(layers) - 1
    assert f"a GPU had less memory than it reported, so less was planned for it (attempt {len(layers)})" in placed.notes


def test_it_gives_up_in_the_end(model, monkeypatch):
    runner = TightGpu(most=-1)
    use_gpu(monkeypatch, runner)
    with pytest.raises(LlamaCppMemoryError):
        opened(model)
    assert len(runner.tried) == 4


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_a_real_model_opens_on_what_is_here(data_dir):
    with open_model(data_dir / "models/gguf/stories260K-F32.gguf") as small:
        runner, placed = open_runner(small, Settings(backend="llama"))
    assert placed.fits
    assert runner.info.pages_total >= placed.options.context_tokens
    runner.close()
