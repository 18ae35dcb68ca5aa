"""Each refused request has one line in the log: the route, the model, the client, the status and the reason."""

import json
import re
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.server.limits import MAX_BODY_BYTES
from tests.localllm.server.conftest import MODEL, Server, StartServer
from tests.waiting import PATIENCE_S, eventually

SECRET = "sesame"
PROMPT = "zanzibar"
UNSUPPORTED = {"/props"}
_NUMBERS = count(1)


@pytest.fixture(scope="module")
def guarded(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(SECRET, encoding="utf-8")
    with start_server("--api-key-file", str(file), models=(MODEL,)) as server:
        yield server


def refusal(server: Server, method: str, path: str, status: int, key: str = SECRET, **arguments: Any) -> str:
    """Send a request that is refused; return its only line in the log."""
    client = f"probe-{next(_NUMBERS)}."
    headers = {"User-Agent": client, "Authorization": f"Bearer {key}", **arguments.pop("headers", {})}
    answer = httpx.request(method, server.url + path, headers=headers, timeout=PATIENCE_S, **arguments)
    assert answer.status_code == status, answer.text
    eventually(lambda: client in server.log.read_text(errors="replace"))
    (line,) = [line for line in server.log.read_text(errors="replace").splitlines() if client in line]
    assert "refused: " in line and f"status {status}" in line and method in line and len(line) < 800
    return line


def routes(server: Server) -> list[tuple[str, str]]:
    headers = {"Authorization": f"Bearer {SECRET}"}
    found = httpx.get(f"{server.url}/openapi.json", headers=headers, timeout=PATIENCE_S).json()["paths"]
    filled = {path: re.sub(r"\{.*?\}", "x", path.replace("{chat}", "1")) for path in found}
    return [(method.upper(), filled[path]) for path, methods in found.items() for method in methods]


def test_every_route_logs_requests_of_strangers(guarded: Server) -> None:
    for method, path in routes(guarded):
        if path not in ("/health", "/v1/health"):
            assert "an API key is required" in refusal(guarded, method, path, 401, key="other")
        assert "Host" in refusal(guarded, method, path, 403, headers={"Host": "evil.example"})
        assert "Origin" in refusal(guarded, method, path, 403, headers={"Origin": "https://evil.example"})


def test_every_route_logs_bodies_that_are_not_json(guarded: Server) -> None:
    posts = [path for method, path in routes(guarded) if method == "POST" and not path.startswith("/api/blobs")]
    for path in ("/v1/responses/x/cancel", "/api/chats/1/stop"):  # have no body
        posts.remove(path)
    assert len(posts) > 20
    for path in posts:
        status = 501 if path in UNSUPPORTED or path.startswith("/slots/") else 400
        line = refusal(guarded, "POST", path, status, content=f'{{"prompt": "{PROMPT}",')
        assert ("JSON" in line or status == 501) and PROMPT not in line


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/api/generate", {"prompt": PROMPT, "options": {"top_k": "x"}}),
        ("/api/chat", {"messages": [{"role": "user", "content": PROMPT}], "think": "x"}),
        ("/api/embed", {"input": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "top_p": 9}),
        ("/v1/completions", {"prompt": PROMPT, "n": 0}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": -5}),
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 0}),
        ("/completion", {"prompt": PROMPT, "temperature": "x"}),
        ("/infill", {"input_prefix": 5}),
        ("/v1/rerank", {"query": PROMPT}),
        ("/tokenize", {"content": 5}),
    ],
)
def test_wrong_fields_are_logged_with_the_model_and_without_the_prompt(
    guarded: Server, path: str, wrong: dict[str, Any]
) -> None:
    line = refusal(guarded, "POST", path, 400, json={"model": MODEL, **wrong})
    assert f"model {MODEL}," in line and PROMPT not in line and SECRET not in line


def test_other_refusals_are_logged(guarded: Server) -> None:
    assert "no-such" in refusal(guarded, "POST", "/api/generate", 404, json={"model": "no-such", "prompt": PROMPT})
    assert "larger than" in refusal(guarded, "POST", "/v1/messages", 413, content=b" " * (MAX_BODY_BYTES + 1))
    assert "compressed" in refusal(guarded, "POST", "/api/chat", 415, headers={"Content-Encoding": "br"})
    assert "/nowhere" in refusal(guarded, "GET", "/nowhere", 404)
    assert "properties" in refusal(guarded, "POST", "/props", 501)
    assert "/api/chat" in refusal(guarded, "DELETE", "/api/chat", 405)
    refusal(guarded, "HEAD", f"/api/blobs/sha256:{64 * '0'}", 404)
    before = guarded.log.read_text().count("Invalid HTTP")
    with socket.create_connection(("127.0.0.1", guarded.port)) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert b" 400 " in connection.recv(1000)
    assert guarded.log.read_text().count("Invalid HTTP") > before


@pytest.mark.parametrize("sign", ["\n", "\r\n", "\x1b[2J\x1b]0;x\x07", "\u2028", "\x85", "\u202e", "\ud800"])
def test_a_client_cannot_write_lines_or_escapes_into_the_log(guarded: Server, sign: str) -> None:
    name = f"a{sign}warning: refused: GET /forged"
    body = json.dumps({"model": name, "prompt": PROMPT}).encode()
    agent = "x\x9b2J" + "y" * 5000
    line = refusal(guarded, "POST", "/api/generate", 400, content=body)
    assert line.count("refused") >= 1 and sign not in line
    written = guarded.log.read_bytes()
    assert b"\x1b" not in written.replace(b"\x1b[33m", b"") and b"\x9b" not in written
    assert not any(
        row.startswith(("refused: GET /forged", "warning: refused: GET /forged"))
        for row in written.decode().splitlines()
    )
    httpx.get(f"{guarded.url}/none", headers={"User-Agent": agent.encode("latin-1")}, timeout=PATIENCE_S)
    eventually(lambda: "client x" in guarded.log.read_text(errors="replace"))
    assert max(map(len, Path(guarded.log).read_text(errors="replace").splitlines())) < 1200


def test_an_error_within_a_stream_is_logged(guarded: Server) -> None:
    words = "once upon a time " * 200
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": words}], "progress": True}
    client = f"probe-{next(_NUMBERS)}."
    headers = {"User-Agent": client, "Authorization": f"Bearer {SECRET}"}
    with httpx.stream(
        "POST", f"{guarded.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S
    ) as answer:
        answer.read()
    eventually(lambda: client in guarded.log.read_text())
    (line,) = [line for line in guarded.log.read_text().splitlines() if client in line]
    assert "context" in line and "once upon" not in line
