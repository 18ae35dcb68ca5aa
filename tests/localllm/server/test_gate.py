"""Access checks, tested without a server."""

import asyncio
import gzip
from collections.abc import Sequence
from typing import Any

import pytest

from localllm.server.app import error_body_at
from localllm.server.keys import Key
from localllm.server.limits import MAX_BODY_BYTES
from localllm.server.options import ServerOptions
from localllm.server.security import Gate


def status(options: ServerOptions, path: str = "/api/tags", **headers: str) -> int:
    """The status of a request without a body; 200 if it passes."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "server": ("127.0.0.1", 11434),
        "headers": [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()],
    }
    told: list[int] = []

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        told.extend([message["status"]] if message["type"] == "http.response.start" else [])

    asyncio.run(Gate(answer, options, error_body_at)(scope, receive, send))
    return told[0]


@pytest.mark.parametrize(
    ("allowed", "origin", "expected"),
    [
        ("*", "https://anybody.example", 200),
        ("https://*.example", "https://a.example", 200),
        ("https://*.example", "https://a.example.evil", 403),
        ("https://*.example", "http://a.example", 403),
        ("vscode-webview://*", "vscode-webview://12ab", 200),
        ("HTTPS://App.Example/", "https://app.example", 200),
        ("https://app.example", "https://app.example.evil", 403),
        ("", "https://app.example", 403),
        ("", "http://localhost", 200),
        ("", "http://localhost:81", 200),
        ("", "http://127.0.0.1:3000", 200),
        ("", "http://[::1]:3000", 200),
        ("", "http://localhost:81/", 200),
        ("", "http://localhost.evil", 403),
        *(
            ("", f"http://localhost:{rest}", 403)
            for rest in ("x.evil.com", "1@evil.com", "80/../evil.com", "", "123456")
        ),
        ("", "http://127.0.0.1:80:evil.com", 403),
        ("", "http://[::1]:x", 403),
        ("", "app://x/../y", 403),
        ("", "vscode-webview://a@b", 403),
        ("http://localhost:*", "http://localhost:1@evil.com", 403),
        ("https://*.example", "https://evil.com/a.example", 403),
        ("https://*.example", "https://evil.com:1.example", 403),
        ("http://[fd00::1]:*", "http://[fd00::1]:3000", 200),
        ("http://[fd00::1]:*", "http://f:3000", 403),
        ("*", "http://a/b", 403),
        ("*", "null", 200),
        ("", "http://localhost.evil:81", 403),
        ("", "app://obsidian.md", 200),
        ("", "tauri://localhost", 200),
        ("", "vscode-webview://12ab", 200),
        ("", "chrome-extension://abcdef", 200),
        ("", "null", 403),
    ],
)
def test_origins(allowed: str, origin: str, expected: int) -> None:
    options = ServerOptions(origins=(allowed,) if allowed else ())
    assert status(options, origin=origin) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("host.docker.internal:11434", 200),
        ("box.local", 200),
        ("192.168.1.7:11434", 200),
        ("10.0.0.2", 200),
        ("[fd00::1]:11434", 200),
        ("8.8.8.8", 403),
        ("internal.evil.example", 403),
        ("local", 403),
    ],
)
def test_hosts(host: str, expected: int) -> None:
    assert status(ServerOptions(), host=host) == expected


def test_a_pattern_of_origins_opens_no_host() -> None:
    assert status(ServerOptions(origins=("*",)), host="evil.example", origin="http://evil.example") == 403


@pytest.mark.parametrize("given", ["sesame", "Sesame2", "", "s\xe9same"])
def test_a_wrong_key(given: str) -> None:
    options = ServerOptions(keys=(Key("", "sesame2"),))
    assert status(options, authorization=f"Bearer {given}") == 401
    assert status(options, **{"x-api-key": given}) == 401
    assert status(options, path="/health", authorization=f"Bearer {given}") == 200


def test_a_right_key() -> None:
    options = ServerOptions(keys=(Key("", "sesame2"),))
    assert status(options, authorization="bearer sesame2") == status(options, **{"x-api-key": "sesame2"}) == 200
    assert status(options, path="/health/../api/tags") == 401


BODY = b'{"messages": [{"role": "user", "content": "Hello"}]}' * 40


def received(parts: Sequence[bytes], encoding: str = "gzip") -> tuple[int, bytes]:
    """The status of a request whose body comes in parts, and the body that the application gets."""
    left = list(parts)
    found: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(0) if left else b"", "more_body": bool(left)}

    async def answer(_scope: Any, receive: Any, send: Any) -> None:
        found.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        found.extend([message["status"]] if message["type"] == "http.response.start" else [])

    headers = [(b"host", b"localhost"), (b"content-encoding", encoding.encode())]
    scope = {"type": "http", "method": "POST", "path": "/api/chat", "server": ("127.0.0.1", 1), "headers": headers}
    asyncio.run(Gate(answer, ServerOptions(), error_body_at)(scope, receive, send))
    return found[-1], found[0] if len(found) > 1 else b""


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", ["gzip", "GZIP", "x-gzip"])
def test_bodies_compressed_by_gzip_are_unpacked(size: int, name: str) -> None:
    packed = gzip.compress(BODY)
    parts = [packed[at : at + size] for at in range(0, len(packed), size)]
    assert received(parts, name) == (200, BODY)
    assert received([BODY], "identity") == (200, BODY)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"not gzip at all", 400),
        (gzip.compress(BODY)[:-9], 400),
        (gzip.compress(BODY) + b"more", 400),
        (gzip.compress(BODY) * 2, 400),
        (b"", 400),
        (gzip.compress(b" " * MAX_BODY_BYTES), 200),
        (gzip.compress(b" " * (MAX_BODY_BYTES + 1)), 413),
    ],
    ids=["text", "cut", "trailing", "two", "empty", "largest", "too large"],
)
def test_bodies_that_gzip_cannot_unpack_are_refused(body: bytes, status: int) -> None:
    assert received([body])[0] == status


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip"])
def test_other_encodings_are_refused(encoding: str) -> None:
    assert received([b"x"], encoding)[0] == 415
