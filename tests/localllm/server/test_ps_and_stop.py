"""localllm ps and stop, against a running server."""

import json
from collections.abc import Callable

import httpx
import pytest

from tests.localllm.server.conftest import MODEL, Server, StartServer

Command = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    from localllm.cli.main import main

    def call(port: int, *arguments: str) -> int:
        monkeypatch.setenv("LOCALLLM_PORT", str(port))
        monkeypatch.setattr("sys.argv", ["localllm", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return call


def loaded(server: Server) -> list[str]:
    return [model["name"] for model in httpx.get(f"{server.url}/api/ps").json()["models"]]


@pytest.mark.slow
def test_what_is_loaded_is_listed_and_stopped(
    start_server: StartServer, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_server() as server:
        assert command(server.port, "ps") == 0
        assert "no model in memory" in capsys.readouterr().err
        body = {"model": MODEL, "prompt": "Once", "options": {"num_predict": 2}, "stream": False}
        assert httpx.post(f"{server.url}/api/generate", json=body, timeout=120).status_code == 200
        assert command(server.port, "ps") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["NAME", "SIZE", "CONTEXT", "UNTIL"]
        (name,) = loaded(server)
        assert lines[1].startswith(name)
        assert command(server.port, "ps", "--json") == 0
        assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [name]
        assert command(server.port, "stop", name) == 0
        assert loaded(server) == []
        assert command(server.port, "stop", "nothing-of-this-name") == 2
        assert "not found" in capsys.readouterr().err


def test_without_a_server_it_is_said_how_to_start_one(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(9, "ps") == 2
    assert "localllm serve" in capsys.readouterr().err
