"""Folders of other users and programs, some of which may not be entered or read."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.doctor import check_model_folder
from localllm.library.errors import LibraryError, warn_once
from localllm.library.lookup import all_models, find
from localllm.library.own_store import OwnStore
from localllm.settings import Settings
from localllm.stored import stored_places
from tests.closed_folders import closed
from tests.localllm.library.conftest import write_file, write_ollama_model

Command = Callable[..., int]

VARIABLES = (
    "OLLAMA_MODELS",
    "HF_HUB_CACHE",
    "HF_HOME",
    "LLAMA_CACHE",
    "LOCALLLM_MODEL_FOLDERS",
    "LOCALLLM_MODEL_STORE",
)


@pytest.fixture
def shut(home: Path) -> Iterator[Path]:
    """A folder that may not be entered, with a file and folders in it."""
    folder = home / "shut"
    write_file(folder / "models" / "m.gguf", b"GGUF")
    warn_once.cache_clear()
    with closed(folder):
        yield folder


@pytest.mark.parametrize("variable", VARIABLES)
def test_models_elsewhere_are_found_all_the_same(
    shut: Path,
    tiny_gguf: bytes,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    open_folder = shut.parent / "open"
    write_file(open_folder / "here.gguf", tiny_gguf)
    monkeypatch.setenv("LOCALLLM_MODEL_FOLDERS", str(open_folder))
    monkeypatch.setenv(variable, f"{shut / 'models'}")
    if variable == "LOCALLLM_MODEL_FOLDERS":
        monkeypatch.setenv(variable, f"{shut / 'models'}:{open_folder}")
    assert command("list") == 0
    told = capsys.readouterr()
    assert "builtin" in told.out
    assert "here" in told.out
    assert "bug" not in told.err
    assert told.err.count("Permission denied. Models there are left out.") == 1
    assert command("show", "here") == 0
    assert command("show", "nosuchmodel") == 2
    assert "There is no model 'nosuchmodel'" in capsys.readouterr().err


def test_ollamas_usual_store_may_belong_to_another_user(home: Path, tiny_gguf: bytes) -> None:
    write_ollama_model(home / ".ollama" / "models", "registry.ollama.ai/library/x/1", {"model": tiny_gguf})
    with closed(home / ".ollama"):
        assert [model.name for model in all_models(Settings())] == ["builtin"]
    with closed(home / ".ollama" / "models" / "manifests"):
        assert [model.name for model in all_models(Settings())] == ["builtin"]
    assert find("x:1", Settings()).path.is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "{}/m.gguf", "hello"),
        ("run", "builtin", "hello", "--file", "{}/prompt.txt"),
        ("run", "builtin", "hello", "--format", "{}/schema.json"),
        ("run", "builtin", "hello", "--image", "{}/picture.png"),
        ("run", "builtin", "hello", "--draft", "{}/draft.gguf"),
        ("run", "builtin", "hello", "--lora", "{}/adapter.gguf", "--backend", "llama"),
        ("run", "builtin", "hello", "--mmproj", "{}/mmproj.gguf", "--backend", "llama"),
        ("show", "{}/m.gguf"),
        ("plan", "{}/m.gguf"),
        ("create", "x", "-f", "{}/Modelfile"),
        ("create", "x", "--from", "{}/folder"),
        ("ask", "{}", "What is it?", "--model", "builtin"),
        ("ask", "{}/folder", "What is it?", "--model", "builtin"),
        ("quantize", "builtin", "{}/out.gguf", "--type", "Q8_0"),
        ("quantize", "{}/in.gguf", "out.gguf", "--type", "Q8_0"),
        ("perplexity", "builtin", "{}/text.txt"),
        ("serve", "--model", "{}/m.gguf"),
        ("serve", "--api-key-file", "{}/keys"),
        ("simulate", "builtin", "--machine", "{}/machine.json"),
        ("simulate", "builtin", "--machine", "RTX 4090", "--workload", "{}/trace.jsonl"),
        ("pull", "{}/m.gguf"),
        ("rm", "{}/m.gguf"),
    ],
    ids=" ".join,
)
def test_paths_that_may_not_be_looked_at_are_refused(
    shut: Path, command: Command, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert command(*(argument.format(shut / "models") for argument in arguments)) == 2
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith("error: "), told
    assert "bug" not in told


def test_a_closed_store_of_our_own_is_an_error_where_it_is_changed(shut: Path) -> None:
    store = OwnStore(shut / "models")
    with pytest.raises(LibraryError, match="Permission denied"):
        store.prepare()
    settings = Settings(model_store=str(store.root))
    assert [model.name for model in all_models(settings)] == ["builtin"]
    assert {place.what for place in stored_places(settings, None)} > {"models", "unfinished"}


def test_blobs_stay_while_the_manifests_that_name_them_cannot_be_read(home: Path, tiny_gguf: bytes) -> None:
    store = OwnStore(home / "store")
    store.prepare()
    write_ollama_model(store.root, "registry.ollama.ai/library/x/1", {"model": tiny_gguf})
    blob = next(store.blobs.iterdir())
    with closed(store.manifests), pytest.raises(LibraryError, match="Permission denied"):
        store.discard([blob.name])
    assert blob.is_file()


def test_doctor_says_why_a_model_folder_is_empty(home: Path) -> None:
    folder = home / "models"
    folder.mkdir()
    assert check_model_folder(folder).state == "good"
    with closed(folder):
        assert "Permission denied" in check_model_folder(folder).found
