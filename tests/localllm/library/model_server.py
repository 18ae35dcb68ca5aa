"""A loopback server for Ollama's registry protocol and the Hugging Face hub's, which misbehaves on request."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from tests.fakes.http_server import ForgivingServer, Quiet, serving


@dataclass
class Answer:
    """A correct response, which a fault may change before it is sent."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # bytes of body before the connection is closed
    pause_s: float = 0.0  # before each piece
    told_length: bool = True


Fault = Callable[[str, Answer], None]


class ModelServer:
    """routes: path to content. faults: called with path and answer, in order. requests: (path, headers) received."""

    def __init__(self) -> None:
        self.routes: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.ranges = True
        self.lock = threading.Lock()
        server = self

        class Handler(Quiet, BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.serve(self)

        self._server = ForgivingServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}"

    @contextmanager
    def running(self) -> Iterator["ModelServer"]:
        with serving(self._server):
            yield self

    def add_ollama(self, repository: str, tag: str, layers: dict[str, bytes]) -> dict[str, str]:
        """Offer a model; return the digests by kind."""
        listed, digests = [], {}
        for kind, data in layers.items():
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            digests[kind] = digest
            self.routes[f"/v2/{repository}/blobs/{digest}"] = data
            media_type = f"application/vnd.ollama.image.{kind}"
            listed.append({"mediaType": media_type, "digest": digest, "size": len(data)})
        manifest = {"schemaVersion": 2, "config": {}, "layers": listed}
        self.routes[f"/v2/{repository}/manifests/{tag}"] = json.dumps(manifest).encode()
        return digests

    def add_hub(self, repository: str, files: dict[str, bytes], revision: str = "ab" * 20) -> None:
        """Offer a repository."""
        siblings = []
        for path, data in files.items():
            self.routes[f"/{repository}/resolve/{revision}/{path}"] = data
            lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
            siblings.append({"rfilename": path, "size": len(data), "lfs": lfs})
        siblings.append({"rfilename": "README.md", "size": 3, "blobId": "0" * 40})
        self.routes[f"/api/models/{repository}"] = json.dumps({"sha": revision, "siblings": siblings}).encode()

    def fetched(self, part: str) -> list[dict[str, str]]:
        """Headers of the requests whose path contains this."""
        return [headers for path, headers in self.requests if part in path]

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(handler.path.partition("?")[0])
        with self.lock:
            self.requests.append((path, {name.lower(): value for name, value in handler.headers.items()}))
        answer = self._answer(path, handler.headers.get("Range"))
        for fault in self.faults:
            fault(path, answer)
        send(handler, answer)

    def _answer(self, path: str, wanted: str | None) -> Answer:
        if path in self.redirects:
            return Answer(302, b"", {"Location": self.redirects[path]})
        if path not in self.routes:
            return Answer(404, b"not here")
        data, headers = self.routes[path], dict(self.headers.get(path, {}))
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted or "")
        if not self.ranges or match is None:
            return Answer(200, data, headers)
        first, last = int(match[1]), min(int(match[2]), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return Answer(206, data[first : last + 1], headers)


def send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    handler.send_response(answer.status)
    for name, value in answer.headers.items():
        handler.send_header(name, value)
    if answer.told_length:
        handler.send_header("Content-Length", str(len(answer.body)))
    else:
        handler.send_header("Connection", "close")
        handler.close_connection = True
    handler.end_headers()
    body = answer.body if answer.cut_after is None else answer.body[: answer.cut_after]
    step = 16 << 10 if answer.pause_s else max(len(body), 1)
    for start in range(0, len(body), step):
        time.sleep(answer.pause_s)
        handler.wfile.write(body[start : start + step])
    if answer.cut_after is not None:
        handler.close_connection = True


def cut(times: int, after: int, part: str = "/blobs/") -> Fault:
    """Close the connection early this many times, then behave."""
    left, lock = [times], threading.Lock()

    def fault(path: str, answer: Answer) -> None:
        with lock:
            if part in path and left[0] > 0 and len(answer.body) > after:
                left[0] -= 1
                answer.cut_after = after

    return fault


def refuse(times: int, status: int, headers: dict[str, str] | None = None, part: str = "") -> Fault:
    """Answer with a status this many times."""
    left, lock = [times], threading.Lock()

    def fault(path: str, answer: Answer) -> None:
        with lock:
            if part in path and left[0] > 0:
                left[0] -= 1
                answer.status, answer.body, answer.headers = status, b"", dict(headers or {})

    return fault
