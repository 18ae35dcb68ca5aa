"""localllm run --image, and its refusals."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm.cli.main import application
from localllm.errors import RequestError
from localllm.front.prompt import pictures_among, read_image
from tests.picture_files import png
from tests.projector_files import write_projector


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


def test_pictures_are_named_among_the_arguments(tmp_path: Path) -> None:
    picture = tmp_path / "my photo.PNG"
    picture.write_bytes(png(1))
    for arguments in ([str(picture), "What is it?"], ["What is it?", str(picture)]):
        assert pictures_among(arguments) == ([picture], "What is it?")
    assert pictures_among([str(picture), str(picture)]) == ([picture, picture], None)
    assert pictures_among(["missing.jpg", "Hi"]) == ([Path("missing.jpg")], "Hi")
    for text in ("What does logo.png show?", "Explain a.png", "logo.png"):
        assert pictures_among([text]) == ([], text)
    assert pictures_among([]) == ([], None)
    with pytest.raises(RequestError, match=r".there. is a second prompt"):
        pictures_among(["Hello", "there"])


@pytest.mark.parametrize("budget", [12, 60])
def test_what_was_seen_of_several_pictures_is_told(data_dir: Path, tmp_path: Path, budget: int) -> None:
    model = shutil.copyfile(data_dir / "models" / "gguf" / "stories260K-F32.gguf", tmp_path / "model.gguf")
    write_projector(tmp_path / "mmproj-model.gguf", "gemma4uv")
    named = [str(tmp_path / f"{seed}.png") for seed in (1, 2)]
    for seed, path in enumerate(named, 1):
        Path(path).write_bytes(png(seed))
    command = ["run", str(model), named[0], "Once", named[1], "--max-tokens", "1", "--no-cache"]
    command += ["--image-max-tokens", str(budget)]
    told = CliRunner().invoke(application(), command)
    assert told.exit_code == 0, told.output
    assert "Picture 1: 40 x 30, seen as" in told.stderr and "Picture 2: 40 x 30, seen as" in told.stderr
    first, second = json.loads(CliRunner().invoke(application(), [*command, "--json"]).stdout)["pictures"]
    assert first == second and budget // 2 < first["tokens"] <= budget + 30  # with the marks around it

    plan = ["plan", str(model), "--image-max-tokens", str(budget), "--images"]
    shown = CliRunner().invoke(application(), [*plan, "3x40x30"])
    assert shown.exit_code == 0 and "pictures of 40 x 30: " in shown.output, shown.output
    counted = json.loads(CliRunner().invoke(application(), [*plan, "3x40x30", "--json"]).stdout)["images"]
    assert counted == {"count": 3, "width": 40, "height": 30, "tokens": counted["tokens"]}
    assert budget // 2 < counted["tokens"] <= budget
    many = CliRunner().invoke(application(), [*plan, "400"])
    assert many.exit_code == 2 and "which is too many" in many.output
    refused = CliRunner().invoke(application(), [*plan, "4x0x9"])
    assert isinstance(refused.exception, RequestError) and "such as 4 or 4x1920x1080" in str(refused.exception)
