"""A scripted server of OpenAI's protocol, on a real socket."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.fakes.http_server import Quiet, serving


class ScriptedOpenAI:
    """The server's answers, and the requests it received. Pieces are deltas of a chat, or whole events."""

    def __init__(self) -> None:
        self.pieces: list[dict[str, Any]] = []
        self.turns: list[list[dict[str, Any]]] = []  # pieces of the first answers, before `pieces`
        self.ending = b"data: [DONE]\n\n"
        self.refusal: tuple[int, Any] | None = None
        self.models: list[dict[str, Any]] = [
            {"id": "tiny", "max_model_len": 512},
            {"id": "other", "meta": {"n_ctx_train": 64}},
            {"id": "third"},
        ]
        self.json_answer: Any = None  # sent instead of a stream
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.hold = threading.Event()  # if cleared, the answer waits until this is set or the client disconnects
        self.hold.set()
        self.gone = threading.Event()
        self.address = ""

    def says(self, *texts: str, finish: str = "stop", **usage: Any) -> None:
        """Script an answer with these pieces."""
        self.pieces = [{"content": text} for text in texts]
        self.pieces.append({"choices": [{"delta": {}, "finish_reason": finish}]})
        self.pieces.append({"choices": [], "usage": usage})


@contextmanager
def openai_server() -> Iterator[ScriptedOpenAI]:
    """Serve until the block ends."""
    script = ScriptedOpenAI()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._note()
            self._json({"object": "list", "data": script.models})

        def do_POST(self) -> None:
            self._note()
            body = self.rfile.read(size := int(self.headers["Content-Length"]))
            if len(body) < size:
                return  # the client disconnected
            script.asked.append(json.loads(body))
            if script.refusal:
                status, content = script.refusal
                self._json(content, status)
            elif script.json_answer is not None:
                self._json(script.json_answer)
            else:
                self._stream()

        def _note(self) -> None:
            script.paths.append(self.path)
            script.keys.append(self.headers.get("Authorization"))

        def _stream(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for piece in script.turns.pop(0) if script.turns else script.pieces:
                    event = piece if piece.keys() & {"choices", "error", "usage"} else {"choices": [{"delta": piece}]}
                    self.wfile.write(b": still here\n\ndata: " + json.dumps(event).encode() + b"\n\n")
                    self.wfile.flush()
                while not script.hold.wait(0.02):
                    self.wfile.write(b": still here\n\n")
                self.wfile.write(script.ending)
            except OSError:
                script.gone.set()

        def _json(self, content: Any, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content.encode() if isinstance(content, str) else json.dumps(content).encode())

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as host:
        script.address = f"http://{host}"
        try:
            yield script
        finally:
            script.hold.set()
