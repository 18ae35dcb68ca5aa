"""localllm run --image, and its refusals."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm.cli.main import application
from localllm.errors import RequestError
from localllm.front.prompt import files_among, user_content
from tests.pdf_files import DRAWING, pdf_of
from tests.picture_files import png
from tests.projector_files import write_projector


def test_images_are_read_and_have_no_place_in_raw_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    picture, text = user_content("Hi", [tmp_path / "a.png"])
    assert (picture, text) == ({"type": "image", "data": png(1)}, {"type": "text", "text": "Hi"})
    with pytest.raises(RequestError, match="cannot be read"):
        user_content("Hi", [tmp_path / "missing.png"])
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
        assert files_among(arguments) == ([picture], "What is it?")
    assert files_among([str(picture), str(picture)]) == ([picture, picture], None)
    assert files_among(["missing.jpg", "Hi"]) == ([Path("missing.jpg")], "Hi")
    for text in ("What does logo.png show?", "Explain a.png", "logo.png"):
        assert files_among([text]) == ([], text)
    for name in ("scan.PDF", "letter.docx", "note.wav"):
        assert files_among([name, "Summarise it"]) == ([Path(name)], "Summarise it")
    assert files_among([]) == ([], None)
    with pytest.raises(RequestError, match=r".there. is a second prompt"):
        files_among(["Hello", "there"])


@pytest.mark.parametrize("budget", [12, 60])
def test_run_shows_what_was_seen_of_several_pictures(data_dir: Path, tmp_path: Path, budget: int) -> None:
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


MIXED = pdf_of([["The pier opens at six."], DRAWING])
SCANNED = pdf_of([DRAWING])


@pytest.fixture
def document(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    pytest.importorskip("pypdf")
    pytest.importorskip("pypdfium2")
    (tmp_path / "tide.pdf").write_bytes(request.param)
    return tmp_path / "tide.pdf"


@pytest.mark.parametrize("document", [MIXED, SCANNED], ids=["mixed", "scanned"], indirect=True)
def test_a_model_that_sees_gets_the_text_of_a_pdf_and_pages_without_text_as_pictures(
    document: Path, data_dir: Path
) -> None:
    model = shutil.copyfile(data_dir / "models" / "gguf" / "stories260K-F32.gguf", document.with_name("model.gguf"))
    write_projector(document.with_name("mmproj-model.gguf"), "gemma4uv")
    picture, text = user_content("When?", [document])
    assert picture["type"] == "image" and text["text"].endswith("When?")
    has_text = document.read_bytes() == MIXED
    assert ("The pier opens at six." in text["text"] and "File tide.pdf:" in text["text"]) is has_text
    command = ["run", str(model), str(document), "When?", "--max-tokens", "1", "--no-cache", "--image-max-tokens", "16"]
    told = CliRunner().invoke(application(), command)
    assert told.exit_code == 0 and "Picture 1: " in told.stderr and "Picture 2" not in told.stderr, told.output


@pytest.mark.parametrize("document", [MIXED], indirect=True)
def test_a_model_that_reads_text_gets_a_pdfs_text_and_a_warning(document: Path, data_dir: Path) -> None:
    model = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    command = ["run", str(model), str(document), "When?", "--max-tokens", "1", "--no-cache"]
    told = CliRunner().invoke(application(), command)
    assert told.exit_code == 0 and "reads text only, without 1 picture" in told.stderr, told.output
    shown = json.loads(CliRunner().invoke(application(), [*command, "--json"]).stdout)
    assert len(shown["warnings"]) == 1 and "pictures" not in shown


@pytest.mark.parametrize("document", [SCANNED], indirect=True)
def test_a_scanned_pdf_is_refused_by_a_model_that_reads_text(document: Path, data_dir: Path) -> None:
    model = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    refused = CliRunner().invoke(application(), ["run", str(model), str(document), "When?", "--no-cache"])
    assert "reads text only" in str(refused.exception)


def test_what_cannot_be_given_is_refused_by_its_path(tmp_path: Path) -> None:
    for name, content, words in (
        ("a.pdf", b"%PDF-1.7\n%%EOF", "a.pdf: cannot be read as PDF"),
        ("b.wav", b"RIFF\0\0\0\0WAVEfmt ", "b.wav cannot be attached. The sound is damaged"),
        ("c.png", b"BM" + bytes(60), "c.png cannot be attached"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RequestError, match=words):
            user_content("Hi", [tmp_path / name])
