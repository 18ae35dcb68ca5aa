"""With a home folder that cannot be written, commands work and report what they cannot store."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.localllm.library.model_server import ModelServer
from tests.systems import use_own_places


@pytest.fixture
def sealed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of the folders, which stops even root."""
    (home / "file").write_text("")
    use_own_places(home / "file", monkeypatch)
    return home / "file"


def test_an_answer_comes_all_the_same(
    sealed: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    long = "Tell me a story about a fox. " * 60  # which would be stored on disk
    assert command("run", "builtin", long, "--max-tokens", "4", "--temperature", "0", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["completion_tokens"] == 4
    assert "warning" in err and str(sealed) in err
    assert sealed.read_text() == ""


def test_what_is_found_elsewhere_is_listed_and_a_pull_says_where_else(
    server: ModelServer, sealed: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("list", "--json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["builtin"]
    assert command("config") == command("cache") == 0
    server.add_ollama("library/x", "latest", {"model": tiny_gguf})
    assert command("pull", f"{server.host}/library/x") == 2
    assert "Name another folder by the setting model_store" in capsys.readouterr().err
