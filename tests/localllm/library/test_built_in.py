"""The name of the built-in model works wherever a model is requested, and cannot be reused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.library import resolve
from localllm.library.entry import Source
from localllm.library.errors import LibraryError
from localllm.library.lookup import all_models, find
from localllm.library.names import ModelName
from localllm.library.own_store import OwnStore
from localllm.library.pull import pull
from localllm.settings import Settings
from tests.localllm.library.conftest import write_file, write_ollama_model

SETTINGS = Settings()


@pytest.fixture(autouse=True)
def file(home: Path, tiny_gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny file in place of the real one: only names are tested."""
    path = write_file(home / "program" / "built-in.gguf", tiny_gguf)
    monkeypatch.setattr("models.builtin.path", lambda: path)
    return path


@pytest.mark.parametrize("name", ["builtin", "Builtin", "builtin:latest", "registry.ollama.ai/library/builtin:latest"])
def test_its_names(file: Path, name: str) -> None:
    assert (find(name, SETTINGS).path, find(name, SETTINGS).source) == (file, Source.BUILT_IN)
    assert resolve(name) == file
    assert pull(name, SETTINGS).path == file  # it is here: no server is contacted


def test_no_other_programs_model_takes_its_name(home: Path, file: Path, tiny_gguf: bytes) -> None:
    write_ollama_model(home / ".ollama" / "models", "registry.ollama.ai/library/builtin/latest", {"model": tiny_gguf})
    assert find("builtin", SETTINGS).path == file
    assert [model.path for model in all_models(SETTINGS)] == [file]


def test_it_is_listed_and_shown(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list") == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[1].startswith("builtin ")
    assert "built-in" in told.out
    assert "demonstration" in told.err
    assert command("show", "builtin", "--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "tiny"


def test_it_cannot_be_removed_or_replaced(
    home: Path, file: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("rm", "builtin") == 2
    assert "comes with localllm" in capsys.readouterr().err
    write_file(home / "Modelfile", b"FROM builtin\nSYSTEM You are a pirate.\n")
    assert command("create", "builtin", "-f", "Modelfile") == 2
    assert command("create", "pirate", "-f", "Modelfile") == 0
    assert command("cp", "pirate", "builtin") == 2
    assert find("pirate", SETTINGS).path == file
    with pytest.raises(LibraryError, match="comes with localllm"):
        OwnStore(home / "store").manifest_path(ModelName.parse("builtin:latest"))
    assert file.is_file()
