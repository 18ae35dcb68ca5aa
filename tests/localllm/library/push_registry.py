"""A loopback registry of Ollama's (Docker's) protocol that takes uploads, and misbehaves on request."""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fakes.http_server import ForgivingServer, Quiet, serving

# Receives method and path; returns a status and the message to refuse with, "cut" to break the connection, or None.
Fault = Callable[[str, str], tuple[int, str] | str | None]


class PushRegistry:
    """blobs: by digest. manifests: by repository:tag. faults: asked before each request. requests: method and path."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.uploads: dict[str, bytearray] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        registry = self

        class Handler(Quiet, BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                registry.serve(self)

            def __getattr__(self, name: str) -> Callable[[], None]:
                if name.startswith("do_"):
                    return self.handle_any
                raise AttributeError(name)

        self._server = ForgivingServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["PushRegistry"]:
        with serving(self._server):
            yield self

    def of_kind(self, name: str) -> dict[str, bytes]:
        """The blobs of a pushed model by the ends of their media types."""
        layers = json.loads(self.manifests[name])["layers"]
        return {layer["mediaType"].rpartition(".")[2]: self.blobs[layer["digest"]] for layer in layers}

    def sent(self, method: str, part: str = "") -> int:
        """How many requests of a method had this in their path."""
        return sum(name == method and part in path for name, path in self.requests)

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        method, path = handler.command, unquote(parts.path)
        self.requests.append((method, path))
        fault = next((found for one in self.faults if (found := one(method, path)) is not None), None)
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length // 2 if fault == "cut" else length)
        status, headers, data = 404, {}, b""
        if isinstance(fault, tuple):
            status, data = fault[0], json.dumps({"errors": [{"code": "X", "message": fault[1]}]}).encode()
        elif match := re.fullmatch(r"/v2/(.+)/blobs/uploads/(\w*)", path):
            status, headers, data = self._upload(handler, match[2], parse_qs(parts.query), body)
        elif match := re.fullmatch(r"/v2/(.+)/blobs/(sha256:\w+)", path):
            status = 200 if match[2] in self.blobs else 404
        elif match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", path):
            content = json.loads(body)
            missing = [each for each in (*content["layers"], content["config"]) if each["digest"] not in self.blobs]
            status = 400 if missing else 201
            self.manifests[f"{match[1]}:{match[2]}"] = body
        if fault == "cut":
            handler.close_connection = True
            handler.connection.close()
            return
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if method != "HEAD":
            handler.wfile.write(data)

    def _upload(
        self, handler: BaseHTTPRequestHandler, upload: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if handler.command == "POST":
            upload = secrets.token_hex(8)
            self.uploads[upload] = bytearray()
            return 202, {"Location": f"{handler.path}{upload}?state=1"}, b""
        got = self.uploads.get(upload)
        if got is None:
            return 404, {}, b'{"errors": [{"message": "no such upload"}]}'
        place = {"Location": f"{urlsplit(handler.path).path}?state={len(got) + len(body)}"}
        if handler.command == "GET":
            return 204, {**place, "Range": f"0-{len(got) - 1}"}, b""
        if handler.command == "PATCH":
            first = int(handler.headers["Content-Range"].partition("-")[0])
            got += body if first == len(got) else b""
            return (202 if first + len(body) == len(got) else 416), place, b""
        assert query["state"]
        digest = f"sha256:{hashlib.sha256(got).hexdigest()}"
        if digest == query["digest"][0]:
            self.blobs[digest] = bytes(self.uploads.pop(upload))
            return 201, {}, b""
        return 400, {}, b'{"errors": [{"code": "DIGEST_INVALID", "message": "provided digest did not match"}]}'
