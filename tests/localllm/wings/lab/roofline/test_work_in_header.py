"""A token's cost from the header, compared with the products that the loaded model's program records."""

from pathlib import Path

import pytest

from gguf_io import open_model
from localllm.speed.work import work_in_header
from models.config import read_config
from models.errors import UnsupportedModelError
from models.native_runner import NativeRunner
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write

# Dense and MoE, with shared experts, fused tensors, odd widths, tied and separate outputs, windows, latents, second
# embeddings, layers that compute only wanted rows, parallel streams.
SHAPES = (
    "llama",
    "mixtral",
    "qwen2",
    "qwen3moe",
    "phi3",
    "gemma3",
    "granitemoe",
    "qwen2moe",
    "glm4",
    "phi2",
    "gpt-oss",
    "deepseek2",
    "deepseek2-old",
    "deepseek2-odd",
    "qwen35",
    "qwen35-odd",
    "qwen35moe",
    "qwen3next",
    "qwen3next-fused",
    "gemma4",
    "gemma4-odd",
    "gemma4-moe",
    "gemma3n",
    "gemma3n-short",
    "granitehybrid",
    "granitehybrid-moe",
    "falcon-h1-odd",
    "nemotron_h",
    "nemotron_h_moe",
    "mamba2",
)


@pytest.mark.parametrize("name", SHAPES)
def test_the_header_tells_what_the_program_reads_and_computes(name: str, tmp_path: Path) -> None:
    with open_model(write(MODELS[name], tmp_path / "small.gguf")) as file:
        told = work_in_header(file)
        runner = NativeRunner(file, kv_bytes=8 << 20, threads=1)
    try:
        sequence = runner.create_sequence()
        runner.run([0], [0], [sequence], [0])
        assert (told.row, told.logits) == runner.last_step().products()
        config = read_config(file)
        read = config.attention.attends if config.slot_sizes else [True] * config.layers
        layers = [layer for layer in range(config.layers) if read[layer]]
        looks = zip(layers, told.looks, strict=True)
        stored = sum(each for layer, (_, each) in looks if config.attention.kv_layers[layer] == layer)
        ids = 4 if any(config.recurs) else 0  # kept, since rows may be computed again
        info = runner.info
        assert stored + ids == pytest.approx(info.kv_bytes_per_token * (1 + info.window_pages))
    finally:
        runner.close()


def test_what_the_engine_does_not_compute_has_no_work(tmp_path: Path) -> None:
    path = write(MODELS["llama"], tmp_path / "small.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with open_model(path) as file, pytest.raises(UnsupportedModelError, match="mamba"):
        work_in_header(file)
