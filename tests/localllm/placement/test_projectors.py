"""Which projector a model gets: the named one, else the only one in its folder that fits."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_io import open_model
from gguf_io.errors import ModelFileError
from gpu_offload.memory import projector_bytes
from localllm.errors import RequestError
from localllm.image_reader import KEPT_BYTES
from localllm.placement.backends import choose_backend, loaded_projector, open_placed, place, plan_request
from localllm.placement.companions import projector_of
from localllm.placement.memory import conversation_bytes
from localllm.settings import Settings
from models.errors import UnsupportedModelError
from models.native_runner import NativeRunner
from models.vision.encoder import vision_needs
from tests.oracle import llama_oracle
from tests.projector_files import write_projector


@pytest.fixture
def model(data_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    shutil.copyfile(data_dir / "models" / "gguf" / "stories260K-F32.gguf", path)
    return path


def chosen(model: Path, mmproj: str | None = None) -> Path | None:
    with open_model(model) as file:
        return projector_of(file, mmproj)


def test_the_only_one_beside_the_model_that_fits(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(model) is None
    for kind in ("mlp", "gemma3"):  # which read rows of the model's width, and make others
        write_projector(tmp_path / f"mmproj-{kind}.gguf", kind, width=64, text=96)
    (tmp_path / "mmproj-broken.gguf").write_bytes(b"GGUF")
    assert chosen(model) is None
    beside = write_projector(tmp_path / "model-mmproj-f16.gguf")
    assert chosen(model) == beside
    assert chosen(model, mmproj="none") is None
    write_projector(tmp_path / "mmproj-b.gguf", "gemma3")
    caplog.clear()
    assert chosen(model) is None and "several projectors" in caplog.text
    assert chosen(model, mmproj=str(beside)) == beside
    with pytest.raises(RequestError, match="projector not found"):
        chosen(model, mmproj=str(tmp_path / "missing.gguf"))


@llama_oracle.needs_llama
def test_a_projector_of_other_kinds_chooses_llama_cpp_and_counts_in_its_plan(model: Path, tmp_path: Path) -> None:
    beside = write_projector(tmp_path / "mmproj.gguf", keys={"clip.projector_type": "resampler"})
    with open_model(model) as file:
        choice = choose_backend(file, Settings(gpu_layers=0))
        assert (choice.backend, "mmproj.gguf" in choice.reason) == ("llama", True)
        assert choose_backend(file, Settings(mmproj="none", gpu_layers=0)).backend == "native"
        with pytest.raises(UnsupportedModelError, match="image encoders of the type 'resampler'"):
            place(file, Settings(backend="native", mmproj=str(beside)))
        assert loaded_projector(file, None) == beside
        assert loaded_projector(file, "none") is None
        with pytest.raises(RequestError, match="projector not found"):
            loaded_projector(file, None, [tmp_path / "gone.gguf"])
        shown, _ = conversation_bytes(file, 512, beside)
        assert shown is not None and shown > projector_bytes(beside) + file.weights_bytes
        request = plan_request(file, Settings(), beside)
    assert (request.base.mmproj, request.projector_bytes) == (beside, projector_bytes(beside))


def test_a_projector_that_the_native_engine_supports_stays_there_and_counts_in_its_plan(
    model: Path, tmp_path: Path
) -> None:
    beside = write_projector(tmp_path / "mmproj.gguf", "gemma3")
    settings = Settings(gpu_layers=0, kv_mib=16, threads=1, packed_mib=0)
    with open_model(model) as file:
        placed = place(file, settings)
        without = place(file, replace(settings, mmproj="none"))
        assert (placed.backend, placed.options.mmproj) == ("native", beside)
        assert placed.uses[0].other > KEPT_BYTES == placed.uses[0].other - _encoder_bytes(beside)
        assert placed.uses[0].weights == without.uses[0].weights
        runner, loaded = open_placed(file, placed)
        assert isinstance(runner, NativeRunner) and runner.projector is not None
        runner.close()
        assert loaded.uses == placed.uses


def test_a_projector_of_another_width_is_refused(model: Path, tmp_path: Path) -> None:
    beside = write_projector(tmp_path / "wide.gguf", "gemma3", text=96)
    with (
        open_model(model) as file,
        pytest.raises(ModelFileError, match="makes rows of 96 numbers"),
    ):
        open_placed(file, place(file, Settings(backend="native", kv_mib=16, threads=1, mmproj=str(beside))))


def _encoder_bytes(path: Path) -> int:
    with open_model(path) as file:
        needs = vision_needs(file, 1)
    return needs.weights + needs.buffers
