"""localllm ps and stop, against a running server."""

import http.server
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from localllm.cli.resident import kv, until
from tests.localllm.server.conftest import MODEL, Server, StartServer
from tests.waiting import PATIENCE_S, eventually

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
    return [model["name"] for model in httpx.get(f"{server.url}/api/ps", timeout=PATIENCE_S).json()["models"]]


@pytest.mark.slow
def test_what_is_loaded_is_listed_and_stopped(
    start_server: StartServer, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_server() as server:
        assert command(server.port, "ps") == 0
        assert "No model is loaded" in capsys.readouterr().err
        body = {"model": MODEL, "prompt": "Once", "options": {"num_predict": 2}, "stream": False}
        assert httpx.post(f"{server.url}/api/generate", json=body, timeout=PATIENCE_S).status_code == 200
        assert command(server.port, "ps") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["NAME", "SIZE", "KV", "CONTEXT", "UNTIL"]
        (name,) = loaded(server)
        small = httpx.get(f"{server.url}/api/ps", timeout=PATIENCE_S).json()["models"][0]
        assert 0 < small["kv_bytes"] < small["size"] and kv(small) in lines[1]
        embed = {"model": MODEL, "input": "Once"}
        assert httpx.post(f"{server.url}/api/embed", json=embed, timeout=PATIENCE_S).status_code == 200
        (both,) = httpx.get(f"{server.url}/api/ps", timeout=PATIENCE_S).json()["models"]
        assert (both["name"], both["context_length"]) == (name, small["context_length"])
        assert both["size"] > small["size"]  # it is in memory twice
        assert lines[1].startswith(name) and lines[1].endswith(" from now")
        assert command(server.port, "ps", "--json") == 0
        assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [name]
        assert command(server.port, "stop", name) == 0
        eventually(lambda: loaded(server) == [])
        assert command(server.port, "stop", "nothing-of-this-name") == 2
        assert "not found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"expires_at": "2026-01-01T12:00:58.4Z"}, "58 s from now"),
        ({"expires_at": "2026-01-01T14:04:50.123456789+02:00"}, "5 min from now"),
        ({"expires_at": "2026-01-02T12:00:00Z"}, "24 h from now"),
        ({"expires_at": "2318-01-02T12:00:00Z"}, "forever"),
        ({"expires_at": "2026-01-01T11:00:00Z"}, "0 s from now"),
        ({"expires_at": "2026-01-01T11:00:00Z", "loading": {"phase": "weights", "share": 0.4}}, "loading, 40%"),
    ],
)
def test_the_remaining_time_of_a_model_is_readable(row: dict[str, Any], told: str) -> None:
    assert until(row, datetime(2026, 1, 1, 12, tzinfo=UTC)) == told


@pytest.mark.slow
def test_a_server_elsewhere_is_asked_with_the_key_for_it(
    start_server: StartServer, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_server() as server:
        assert command(9, "ps", "--host", f"127.0.0.1:{server.port}") == 0
        assert "No model is loaded" in capsys.readouterr().err
        assert command(9, "stop", MODEL, "--host", server.url) == 0
    assert command(9, "ps", "--host", f"127.0.0.1:{server.port}") == 2
    assert "Check the address" in capsys.readouterr().err
    assert command(9, "ps", "--host", "ftp://host") == 2
    assert "not a server's address" in capsys.readouterr().err


def test_a_proxy_of_the_environment_is_not_used(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"models": []}')

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Empty) as listening:
        thread = threading.Thread(target=listening.handle_request, daemon=True)
        listening.timeout = PATIENCE_S
        thread.start()
        assert command(9, "ps", "--host", f"127.0.0.1:{listening.server_address[1]}") == 0
        thread.join(PATIENCE_S)
    assert "No model is loaded" in capsys.readouterr().err


def test_without_a_server_it_is_said_how_to_start_one(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(9, "ps") == 2
    assert "localllm serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "-"),
        ({"kv_bytes": 3 << 20, "kv_window_bytes": 0}, "3 MiB"),
        ({"kv_bytes": 113 << 20, "kv_window_bytes": 9 << 20}, "113 MiB, windows 9 MiB"),
    ],
)
def test_memory_of_window_layers_is_listed_separately(row: dict[str, Any], told: str) -> None:
    """Servers of others do not tell what keys and values take."""
    assert kv(row) == told
