"""localllm run --image, and its refusals."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm.cli.main import application
from localllm.errors import RequestError
from localllm.front.prompt import read_image
from tests.gpu_offload.projector_files import png, write_projector


def test_images_are_read_and_have_no_place_in_raw_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    assert read_image(tmp_path / "a.png") == png(1)
    with pytest.raises(RequestError, match="cannot be read"):
        read_image(tmp_path / "missing.png")
    refused = CliRunner().invoke(application(), ["run", "m.gguf", "Hi", "--raw", "--image", str(tmp_path / "a.png")])
    assert isinstance(refused.exception, RequestError) and "--image cannot be used with --raw" in str(refused.exception)


def test_a_projector_leaves_a_model_on_the_native_engine(data_dir: Path, tmp_path: Path) -> None:
    model = shutil.copyfile(data_dir / "models" / "gguf" / "stories260K-F32.gguf", tmp_path / "model.gguf")
    projector = str(write_projector(tmp_path / "mmproj.gguf"))
    for more in ([], ["--mmproj", projector]):
        command = ["run", str(model), "Once", "--max-tokens", "2", "--no-cache", "--json", *more]
        assert json.loads(CliRunner().invoke(application(), command).stdout)["backend"] == "native"


def test_an_image_changes_the_answer(data_dir: Path, tmp_path: Path) -> None:
    model = str(data_dir / "models" / "gguf" / "stories260K-F32.gguf")
    projector = str(write_projector(tmp_path / "projector.gguf"))
    answers = []
    for seed in (1, 2):
        picture = tmp_path / f"{seed}.png"
        picture.write_bytes(png(seed))
        flags = [
            "--mmproj",
            projector,
            "--image",
            str(picture),
            "--temperature",
            "0",
            "--max-tokens",
            "8",
            "--no-cache",
        ]
        told = CliRunner().invoke(application(), ["run", model, "Once upon a time", "--no-cache", *flags])
        assert told.exit_code == 0, told.output
        answers.append(told.stdout)
    assert answers[0] and answers[0] != answers[1]
