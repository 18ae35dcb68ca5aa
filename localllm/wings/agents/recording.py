"""Records a program's first prompt with a local server that receives requests and generates nothing."""

import http.server
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import RequestError
from localllm.files import read_text, write_whole

# The routes that generate, in the protocols that programs use; how a request to most of them limits the answer.
_LIMITS = {"/v1/messages": "max_tokens", "/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
_RETENTION = {"prompt_cache_retention": "24h"}
_PINS: Mapping[str, Mapping[str, Any]] = {
    "/v1/messages": {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    "/v1/chat/completions": _RETENTION,
    "/v1/responses": _RETENTION,
}
ROUTES = (*_LIMITS, "/api/chat")
MOST_BYTES = 64 << 20
# How much later the prompt with tools may come than another one, such as one for a title.
TITLE_S = 10.0
END_S = 5.0  # for a program to end by itself


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as a program sent it: its route and body."""

    path: str
    body: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> "RecordedRequest":
        """Read what `write` wrote. Raises RequestError."""
        text = read_text(file)
        try:
            found = json.loads(text)
            path, body = found["path"], found["body"]
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f'{file} is not a recorded request: JSON with "path" and "body" is expected.') from error
        if path not in ROUTES or not isinstance(body, dict):
            raise RequestError(f"{file}: {str(path)[:64]!r} must be one of {', '.join(ROUTES)}.")
        return cls(path, body)

    def write(self, file: Path) -> None:
        """Write it for `read`. Raises OSError."""
        write_whole(file, json.dumps({"path": self.path, "body": self.body}).encode())

    def for_model(self, model: str) -> dict[str, Any]:
        """The body of a request that computes the prompt and one token, and pins it where the protocol can."""
        body = {**self.body, "model": model, "stream": False, **_PINS.get(self.path, {})}
        if self.path in _LIMITS:
            return {**body, _LIMITS[self.path]: 1}
        return {**body, "options": {**self.body.get("options", {}), "num_predict": 1}}


def record(start: Callable[[str], "subprocess.Popen[bytes]"], wait_s: float) -> RecordedRequest | None:
    """A program's first prompt; None if it sends no request within `wait_s`.

    start: starts the program against a server at this URL, with a question. Programs may request a title first, so the
    first prompt with tools is returned, or if none has any, the longest within TITLE_S. The program is terminated.
    """
    found: queue.Queue[RecordedRequest] = queue.Queue()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(found))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        process = start(f"http://127.0.0.1:{server.server_port}")
        try:
            return _best(found, process, time.monotonic() + wait_s)
        finally:
            _end(process)
    finally:
        server.shutdown()
        server.server_close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:  # it ignores the signal
        process.kill()
        process.wait()


def _best(
    found: "queue.Queue[RecordedRequest]", process: "subprocess.Popen[bytes]", due: float
) -> RecordedRequest | None:
    best: RecordedRequest | None = None
    while (now := time.monotonic()) < due:
        try:
            one = found.get(timeout=min(0.2, due - now))
        except queue.Empty:
            if process.poll() is not None:
                break
            continue
        if best is None or _worth(one) > _worth(best):
            best = one
        if one.body.get("tools"):
            break
        due = min(due, now + TITLE_S)
    return best


def _worth(one: RecordedRequest) -> tuple[bool, int]:
    return bool(one.body.get("tools")), len(json.dumps(one.body))


def _handler(found: "queue.Queue[RecordedRequest]") -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"object": "list", "data": [], "models": []})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            data = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), MOST_BYTES))
            path = self.path.partition("?")[0]
            try:
                body = json.loads(data)
            except ValueError:
                body = None
            if path in ROUTES and isinstance(body, dict):
                found.put(RecordedRequest(path, body))
            self._answer(400, {"error": {"type": "invalid_request_error", "message": "recorded, not answered"}})

        def _answer(self, status: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler


def tokens_of(usage: Mapping[str, Any]) -> tuple[int, int]:
    """A response's prompt tokens, and how many of them were cached, in any of the protocols."""
    if "cache_read_input_tokens" in usage:
        known = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0) + known, known
    details: Sequence[Any] = [usage.get(name) for name in ("prompt_tokens_details", "input_tokens_details")]
    known = next((one["cached_tokens"] for one in details if one), 0)
    return usage.get("prompt_tokens", usage.get("input_tokens", 0)), known
