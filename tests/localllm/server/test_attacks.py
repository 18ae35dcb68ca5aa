"""Known attacks on servers of this kind, one test each."""

import asyncio
import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from gguf_io.system import raise_file_limit
from tests.systems import own_places
from tests.waiting import PATIENCE_S

MODEL = "stories260K-Q8_0"
# Prologue that sets the time limit for request headers.
HEADERS_IN = "from localllm.server import serve; serve.HEADER_SECONDS = {}"
SHORT = {"model": MODEL, "prompt": "Hi", "stream": False, "options": {"num_predict": 2}}


def post(server: Any, path: str, **arguments: Any) -> httpx.Response:
    return httpx.post(server.url + path, timeout=PATIENCE_S, **arguments)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example:11434",
        "a@localhost",
        "1.2.3.4",
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/tags", "/v1/models", "/health", "/metrics", "/docs"])
def test_rebound_host_is_refused(server: Any, host: str, path: str) -> None:
    assert httpx.get(server.url + path, headers={"Host": host}, timeout=PATIENCE_S).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:11434", "127.8.9.1", "[::1]:11434", "x.localhost"]
)
def test_names_of_this_machine_are_served(server: Any, host: str) -> None:
    assert httpx.get(server.url + "/api/version", headers={"Host": host}, timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "file://", "http://localhost.evil.example"])
def test_foreign_origin_is_refused(server: Any, origin: str) -> None:
    answer = post(server, "/api/generate", json=SHORT, headers={"Origin": origin})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert httpx.options(server.url + "/api/generate", headers=preflight, timeout=PATIENCE_S).status_code == 403


def test_named_origins_and_hosts_may_call(start_server: Any) -> None:
    with start_server(
        OLLAMA_ORIGINS="https://app.example, vscode-webview://x", LOCALLLM_ALLOW_HOSTS="llm.lan"
    ) as server:
        allowed = {"Origin": "https://app.example"}
        answer = httpx.get(server.url + "/api/tags", headers=allowed, timeout=PATIENCE_S)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        preflight = httpx.options(
            server.url + "/api/chat", headers={**allowed, "Access-Control-Request-Method": "POST"}, timeout=PATIENCE_S
        )
        assert preflight.status_code == 200
        assert (
            httpx.get(
                server.url + "/api/tags", headers={"Origin": "https://other.example"}, timeout=PATIENCE_S
            ).status_code
            == 403
        )
        assert (
            httpx.get(server.url + "/api/tags", headers={"Host": "llm.lan:80"}, timeout=PATIENCE_S).status_code == 200
        )


def test_key_is_asked_for_everywhere(start_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n", encoding="utf-8")
    with start_server("--api-key-file", str(file)) as server:
        for path in ("/", "/api/tags", "/v1/models", "/metrics", "/docs", "/openapi.json"):
            assert httpx.get(server.url + path, timeout=PATIENCE_S).status_code == 401
            assert (
                httpx.get(server.url + path, headers={"Authorization": "Bearer sesam"}, timeout=PATIENCE_S).status_code
                == 401
            )
            assert (
                httpx.get(server.url + path, headers={"Authorization": "Bearer sesame"}, timeout=PATIENCE_S).status_code
                == 200
            )
        assert (
            httpx.get(server.url + "/api/tags", headers={"X-Api-Key": "sesame"}, timeout=PATIENCE_S).status_code == 200
        )
        assert httpx.get(server.url + "/health", timeout=PATIENCE_S).status_code == 200
        assert (
            httpx.get(server.url + "/v1/models", timeout=PATIENCE_S).json()["error"]["type"] == "authentication_error"
        )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_addresses_need_a_key(host: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from localllm.cli.main import main; main()",
        "serve",
        "--host",
        host,
        "--port",
        "0",
    ]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | own_places(tmp_path), check=False)
    assert found.returncode == 2 and "--without-key" in found.stderr


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "../../etc/passwd", "..", "a/../b", "a/b/c/d/e", "~/x.gguf", "./x", "C:\\x", "a\x00b",
        "x" * 5000, "file:///etc/passwd", "http://evil.example/x.gguf", "", " ", "%2e%2e", "a:b:c", "\ud800",
    ],
)  # fmt: skip
def test_names_are_never_paths(server: Any, name: str, model_files: Path) -> None:
    body = json.dumps({"model": name, "name": name, "prompt": "x", "input": "x", "content": "x", "source": name})
    others = ["/v1/completions", "/tokenize"] if name else []  # no name given: the one loaded model
    for path in ("/api/generate", "/api/show", "/api/embed", *others):
        answer = post(server, path, content=body)
        assert answer.status_code in (400, 404), (path, answer.text)
    real = json.dumps({"model": str(model_files / f"{MODEL}.gguf"), "prompt": "x"})
    assert post(server, "/api/generate", content=real).status_code in (400, 404)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "\xff"}', b"[" * 10_000, b'{"a":' * 10_000,
        b'{"model": "x", "options": {"seed": ' + b"9" * 6000 + b"}}", b'{"model": "x", "keep_alive": NaN}',
        b'{"model": "x", "keep_alive": 1e999}', b'{"model": "x", "messages": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"model": {"$ne": 1}}', b'{"model": "x", "prompt": ["x"], "messages": 7}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_malformed_bodies_are_400(server: Any, body: bytes, path: str) -> None:
    answer = post(server, path, content=body)
    assert answer.status_code in (400, 404) and "error" in answer.json()


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 10**30}, {"num_predict": 10**12}, {"num_ctx": 10**400}, {"top_k": -5}, {"temperature": 1e308},
        {"top_p": -1}, {"repeat_penalty": 0}, {"stop": ["x"] * 1000}, {"stop": "x" * 10**5}, {"stop": [1]},
        {"num_ctx": "8"}, {"num_ctx": 2.5}, {"num_ctx": True}, 
    ],
)  # fmt: skip
def test_hostile_options_are_400(server: Any, options: dict[str, Any]) -> None:
    answer = post(server, "/api/generate", content=json.dumps({**SHORT, "options": options}))
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    "name", ["169.254.169.254/a/b", "127.0.0.1:1/a/b", "http://127.0.0.1:1/x.gguf", "evil.example/a/b"]
)
def test_requests_pull_from_known_registries_only(server: Any, name: str) -> None:
    answer = post(server, "/api/pull", json={"model": name, "stream": False})
    assert answer.status_code == 400 and "evil" not in answer.json()["error"]


def test_no_request_brings_a_template_or_its_arguments(server: Any) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    hostile = {**body, "chat_template": "{{ 9**9**9 }}"}
    (plain,) = post(server, "/v1/chat/completions", json=body).json()["choices"]
    (choice,) = post(server, "/v1/chat/completions", json=hostile).json()["choices"]
    assert choice["message"] == plain["message"] and "chat_template" in choice["warnings"][0]
    assert post(server, "/apply-template", json=hostile).status_code == 200
    for refused in ({"reasoning_effort": "{{ 7*7 }}"}, {"chat_template_kwargs": {"messages": [], "range": 10**9}}):
        assert post(server, "/v1/chat/completions", json={**body, **refused}).status_code == 400


def test_hostile_schemas_are_400(server: Any) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(70):
        deep = {"type": "object", "properties": {"x": deep}}
    for schema in (
        deep,
        {"not": {}},
        {"enum": []},
        {"$ref": "http://evil.example/schema"},
    ):
        assert post(server, "/api/generate", json={**SHORT, "format": schema}).status_code == 400, schema


def test_a_pattern_that_grows_is_bounded(server: Any) -> None:
    schema = {"type": "string", "pattern": "(a{1000}){1000}"}
    answer = post(server, "/api/generate", json={**SHORT, "format": schema})
    assert answer.status_code in (200, 400)


def test_large_and_compressed_bodies(server: Any) -> None:
    large = b'{"model": "x", "prompt": "' + b"x" * (17 * 2**20) + b'"}'
    assert post(server, "/api/generate", content=large).status_code == 413

    def chunks() -> Any:
        for _ in range(17):
            yield b" " * 2**20

    with contextlib.suppress(httpx.WriteError):  # refused while it was still sending
        assert post(server, "/api/generate", content=chunks()).status_code == 413
    assert post(server, "/api/generate", content=b"x", headers={"Content-Encoding": "br"}).status_code == 415
    bomb = gzip.compress(b" " * (1 << 30), 9)
    assert post(server, "/api/generate", content=bomb, headers={"Content-Encoding": "gzip"}).status_code == 413


def test_oversized_headers(server: Any) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n")
        connection.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):  # cut off before all was read
            assert b" 4" in connection.recv(64)
    assert httpx.get(server.url + "/health", timeout=PATIENCE_S).status_code == 200


def test_a_bias_against_every_token_is_400(server: Any) -> None:
    biases = {str(token): -100 for token in range(512)}
    answer = post(server, "/v1/completions", json={"model": MODEL, "prompt": "Hi", "logit_bias": biases})
    assert answer.status_code == 400 and "bans every token" in answer.json()["error"]["message"]


def test_two_lengths_of_one_body_are_refused(server: Any) -> None:
    head = b"POST /api/show HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(head + b"0\r\n\r\n")
        answer = b""
        while piece := connection.recv(4096):  # until the server has closed it
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400") and b"exclude each other" in answer


def test_half_open_connections_do_not_block(server: Any) -> None:
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    try:
        for number, connection in enumerate(held):
            if number % 2:
                connection.sendall(b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
            else:
                connection.sendall(b"GET /api/ta")
        assert httpx.get(server.url + "/health", timeout=PATIENCE_S).status_code == 200
        assert post(server, "/api/generate", json=SHORT).status_code == 200
    finally:
        for connection in held:
            connection.close()


async def asked_raw(port: int, gate: asyncio.Event, held: asyncio.Semaphore) -> tuple[int, bool]:
    """The status of one short request over its own connection, and whether it says when to retry."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    held.release()
    await gate.wait()
    body = json.dumps(SHORT).encode()
    head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), b"\r\nretry-after: " in answer.lower()


def test_a_thousand_at_once_get_an_answer_each(start_server: Any) -> None:
    raise_file_limit()
    with start_server(begins=HEADERS_IN.format(PATIENCE_S)) as server:  # a slow machine needs time to connect them
        check_a_thousand(server)


def check_a_thousand(server: Any) -> None:
    assert post(server, "/api/generate", json=SHORT).status_code == 200

    async def storm() -> list[tuple[int, bool]]:
        gate, held = asyncio.Event(), asyncio.Semaphore(0)
        asked = [asyncio.create_task(asked_raw(server.port, gate, held)) for _ in range(1000)]
        for _ in asked:
            await held.acquire()
        gate.set()  # all connections are open, and all requests arrive at once
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            assert (await client.get(server.url + "/health")).status_code == 200
        return await asyncio.gather(*asked)

    answers = asyncio.run(storm())
    assert len(answers) == 1000 and {status for status, _ in answers} <= {200, 503}
    assert any(status == 200 for status, _ in answers)
    assert all(comes_back for status, comes_back in answers if status == 503)
    assert post(server, "/api/generate", json=SHORT).status_code == 200


def test_wrong_methods_and_routes(server: Any) -> None:
    assert httpx.get(server.url + "/api/generate", timeout=PATIENCE_S).status_code == 405
    assert httpx.get(server.url + "/api/nothing", timeout=PATIENCE_S).json() == {"error": "Not Found"}
    assert httpx.get(server.url + "/v1/nothing", timeout=PATIENCE_S).json()["error"]["type"] == "not_found_error"
    assert httpx.request("HEAD", server.url + "/", timeout=PATIENCE_S).status_code == 200


def test_connections_that_say_nothing_are_cut_off(start_server: Any) -> None:
    with start_server(begins=HEADERS_IN.format(1.0)) as server:
        for said in (b"", b"GET /api/ta"):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(said)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(64) == b""
