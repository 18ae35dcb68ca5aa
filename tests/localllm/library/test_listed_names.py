"""What a listing shows can be run by that name, and no two rows have the same name."""

import os
from pathlib import Path

import pytest

from gguf_io.system import can_name_file
from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.hub import parse_listing
from localllm.library.lookup import all_models, find, users_models
from localllm.library.names import ModelName, looks_like_path, plain
from localllm.server.catalog import Catalog
from localllm.server.errors import ApiError
from localllm.server.errors import ModelNotFoundError as NotServedError
from localllm.settings import Settings
from localllm.text import nearest
from tests.localllm.library.conftest import write_file, write_hugging_face_model, write_ollama_model
from tests.systems import CAN_LINK, needs_links


def rows(settings: Settings) -> list[LibraryModel]:
    """The models that are listed, each found by the command line and by requests under the name it is listed by."""
    found = list(all_models(settings))
    names = [plain(model.name) for model in found]
    assert len(set(names)) == len(names), names
    for model in found:
        assert find(model.name, settings).path == model.path, model.name
        assert find(model.name.upper(), settings).path == model.path, model.name
    catalog = Catalog([], settings)
    for entry in catalog.entries():
        assert catalog.find(entry.name).path == entry.path, entry.name
    return found[1:]


@pytest.mark.parametrize(
    "file", ["BIG.GGUF", "Mixed.GguF", "two words.gguf", "dots.and.v1.2.gguf", "ü.gguf", "a:b.gguf"]
)
def test_files_of_any_name(home: Path, tiny_gguf: bytes, file: str) -> None:
    if not can_name_file(file):
        pytest.skip("this system's files cannot have such names")
    write_file(home / "f" / file, tiny_gguf)
    (model,) = rows(Settings(model_folders=f"{home}/f"))
    assert model.name == file[: -len(".gguf")]
    assert find(file, Settings(model_folders=f"{home}/f")).path == home / "f" / file


def test_upper_case_suffixes_in_every_place(home: Path, tiny_gguf: bytes) -> None:
    write_hugging_face_model(home / "huggingface/hub", "u/r", "M-Q8_0.GGUF", tiny_gguf)
    write_file(home / ".lmstudio/models/p/q/N-Q4_0.GGUF", tiny_gguf)
    write_file(home / "llama.cpp/O.GGUF", tiny_gguf)
    write_file(home / "f/P-00001-of-00002.GGUF", tiny_gguf)
    write_file(home / "f/P-00002-of-00002.GGUF", tiny_gguf)
    write_file(home / "f/MMPROJ-P.GGUF", tiny_gguf)
    names = [model.name for model in rows(Settings(model_folders=f"{home}/f"))]
    assert names == ["hf.co/u/r:Q8_0", "p/q:Q4_0", "O", "P"]
    listing = b'{"sha": "ab", "siblings": [{"rfilename": "X-Q8_0.GGUF", "lfs": {"size": 9, "sha256": "%s"}}]}'
    _, (file,) = parse_listing(listing % (b"0" * 64), "there")
    assert (file.stem, file.label) == ("X-Q8_0", "Q8_0")
    assert str(find_stored("https://host.example/x/Big.GGUF")) == "host.example/web/Big:latest"


def find_stored(url: str) -> ModelName:
    from localllm.library.lookup import stored_name

    return stored_name(url)


@pytest.mark.parametrize(
    "order",
    [
        *("{0}/f|{0}/f/in", "{0}/f/in|{0}/f", "{0}/f|{0}/f/", "{0}/f|{0}/./f"),
        pytest.param("{0}/link|{0}/f", marks=needs_links),
    ],
)
def test_a_file_that_several_folders_lead_to_is_listed_once(home: Path, tiny_gguf: bytes, order: str) -> None:
    write_file(home / "f/in/a.gguf", tiny_gguf)
    if CAN_LINK:
        (home / "link").symlink_to(home / "f")
    (model,) = rows(Settings(model_folders=order.replace("|", os.pathsep).format(home)))
    assert model.name == "a"


def test_a_folder_of_another_program_may_be_named_too(home: Path, tiny_gguf: bytes) -> None:
    write_file(home / ".lmstudio/models/p/q/m-Q8_0.gguf", tiny_gguf)
    settings = Settings(model_folders=f"{home}/.lmstudio/models")
    assert [model.name for model in rows(settings)] == ["p/q:Q8_0"]
    assert find("m-Q8_0", settings).source is Source.LM_STUDIO


def test_equal_names_are_disambiguated(home: Path, tiny_gguf: bytes) -> None:
    for file in ("f/a/m.gguf", "f/b/m.gguf", "g/m.gguf", "h/M.gguf", "g/x.gguf.gguf", "g/builtin.gguf"):
        write_file(home / file, tiny_gguf)
    settings = Settings(model_folders=os.pathsep.join(f"{home}/{folder}" for folder in "fgh"))
    names = {model.name: model.path.relative_to(home).as_posix() for model in rows(settings)}
    assert names["m"] == "f/a/m.gguf"
    assert names["b/m"] == "f/b/m.gguf"
    assert (names["m:2"], names["M:3"]) == ("g/m.gguf", "h/M.gguf")
    assert names["builtin:2"] == "g/builtin.gguf"
    assert len(names) == 6


def test_of_stored_models_the_first_has_the_name(home: Path, tiny_gguf: bytes) -> None:
    for root in ("localllm/models", ".ollama/models"):
        write_ollama_model(home / root, "registry.ollama.ai/library/m/latest", {"model": tiny_gguf})
    write_file(home / "f/m.gguf", tiny_gguf)
    names = [(model.name, model.source) for model in rows(Settings(model_folders=f"{home}/f"))]
    assert names == [("m:latest", Source.OWN), ("m:2", Source.FOLDER)]


@pytest.mark.parametrize("name", ["m", "M", "m:latest", "M:LATEST"])
def test_the_usual_tag_may_be_left_out_or_added_everywhere(home: Path, tiny_gguf: bytes, name: str) -> None:
    path = write_file(home / "f/m.gguf", tiny_gguf)
    settings = Settings(model_folders=f"{home}/f")
    assert find(name, settings).path == path
    assert Catalog([], settings).find(name).path == path


def test_models_that_a_server_was_started_with_have_names_of_their_own(home: Path, tiny_gguf: bytes) -> None:
    first, second = (write_file(home / folder / "m.gguf", tiny_gguf) for folder in ("a", "b"))
    settings = Settings(model_folders=f"{home}/a")
    catalog = Catalog([str(first), str(second)], settings)
    served = {entry.name: entry.path for entry in catalog.entries() if entry.name != "builtin"}
    assert served == {"m": first, "m:2": second}
    assert catalog.find("m:2").path == second
    assert catalog.find("M:latest").path == first


@pytest.mark.parametrize("name", ["./m.gguf", "../m", "/etc/passwd", "~/m.gguf", "m.gguf", "f/m.gguf"])
def test_requests_never_name_paths(home: Path, tiny_gguf: bytes, name: str) -> None:
    write_file(home / "m.gguf", tiny_gguf)
    write_file(home / "f/m.gguf", tiny_gguf)
    with pytest.raises((ApiError, NotServedError)):
        Catalog([], Settings()).find(name)


@pytest.mark.parametrize(
    "name", ["./text.gguf", "/models/m.gguf", "~/m", "../m.gguf", r"C:\m.gguf", r"a\b", "D:/m", r"\\server\share\m"]
)
def test_a_path_is_not_taken_for_a_name(name: str) -> None:
    with pytest.raises(LibraryError, match="is a path, not a model's name"):
        ModelName.parse(name)
    assert looks_like_path(name, on_windows=True)


@pytest.mark.parametrize("name", ["qwen3:0.6b", "hf.co/user/repo:Q4_K_M", "host:80/a/b", "a/b"])
def test_a_name_is_not_taken_for_a_path(name: str) -> None:
    assert not looks_like_path(name, on_windows=True)


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b-instruct-Q4_K_M"),
        ("smollm2", "SmolLM2-135M-Instruct.Q4_1"),
        ("SMOLLM2_135m", "SmolLM2-135M-Instruct.Q4_1"),
        ("coder-1.5b", "qwen-coder-1.5b"),
        ("gema3", "gemma3:270m"),
        ("llama", None),
    ],
)
def test_suggestions(home: Path, tiny_gguf: bytes, wanted: str, near: str | None) -> None:
    for name in ("qwen-coder-1.5b", "qwen2.5-coder-0.5b-instruct-Q4_K_M", "SmolLM2-135M-Instruct.Q4_1"):
        write_file(home / f"f/{name}.gguf", tiny_gguf)
    write_ollama_model(home / ".ollama/models", "registry.ollama.ai/library/gemma3/270m", {"model": tiny_gguf})
    settings = Settings(model_folders=f"{home}/f")
    with pytest.raises(ModelNotFoundError) as refused:
        find(wanted, settings)
    assert ("did you mean" in str(refused.value)) == (near is not None)
    assert nearest(wanted, [model.name for model in users_models(settings)]) == near
