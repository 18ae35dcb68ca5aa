"""The chat's backend on a server: localllm's own, or any that speaks Ollama's protocol.

Protocol: https://github.com/ollama/ollama/blob/main/docs/api.md. Durations are nanoseconds there.
"""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from localllm.engine.answer_parts import AnswerPart, PartKind
from localllm.engine.inspection import EngineSnapshot
from localllm.engine.request import Counts, FinishReason, Progress, SamplingParams, Timings
from localllm.engine.tool_calls import ToolCall
from localllm.errors import LocalLLMError, RequestError
from tui.backend import AnswerUpdate, ChatRequest, LoadProgress, ModelChoice, ModelInfo, Turn, join_parts

DEFAULT_PORT = 11434
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
# Only connecting is bounded: a server may read a long prompt for minutes before it says anything.
CONNECT_S = 10.0


class ServerError(LocalLLMError):
    """The server cannot be reached, or refuses. The message names its address."""


class ServerAnswer:
    """Reads a stream of JSON lines on a thread of its own. Times are measured here until the server tells its own."""

    def __init__(self, response: http.client.HTTPResponse, wire: socket.socket) -> None:
        self._response = response
        self._wire = wire
        self._updates: deque[AnswerUpdate] = deque()
        self._cancelled = False
        self._began = time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def poll(self) -> AnswerUpdate | None:
        """See Answer.poll."""
        waiting = [self._updates.popleft() for _ in range(len(self._updates))]
        return (
            replace(waiting[-1], parts=join_parts(part for update in waiting for part in update.parts))
            if waiting
            else None
        )

    def cancel(self) -> None:
        """See Answer.cancel. A connection that ends is what the protocol has for it."""
        self._cancelled = True
        with contextlib.suppress(OSError):  # it has ended by itself
            self._wire.shutdown(socket.SHUT_RDWR)

    def _lines(self) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for line in self._response if line.strip())

    def _read(self) -> None:
        first = 0.0
        counts, times = Counts(), Timings()
        last = AnswerUpdate(finish_reason=FinishReason.ERROR, error="The server ended the answer without saying why.")
        try:
            for line in self._lines():
                if "error" in line:
                    last = AnswerUpdate(finish_reason=FinishReason.ERROR, error=str(line["error"]))
                    break
                now = time.monotonic()
                parts = _parts(line.get("message", {}))
                if parts:
                    # A line is a token, or nearly so; the server's own count comes last.
                    counts, first = Counts(generated=counts.generated + 1), first or now
                times = Timings(
                    prefill_s=(first or now) - self._began,
                    decode_s=now - first if first else 0.0,
                    ttft_s=first - self._began if first else 0.0,
                )
                if line.get("done"):
                    last = _end(line, parts, times)
                    break
                self._updates.append(AnswerUpdate(parts, counts, times, _progress(line)))
        except (OSError, ValueError, http.client.HTTPException) as error:
            last = AnswerUpdate(finish_reason=FinishReason.ERROR, error=f"The connection broke: {error}.")
        finally:
            self._response.close()
            self._wire.close()
        if self._cancelled:
            last = AnswerUpdate((), counts, times, finish_reason=FinishReason.CANCELLED)
        self._updates.append(last)


class ServerBackend:
    """Talks to one server. Thread-safe."""

    def __init__(self, address: str, key: str | None = None) -> None:
        """address: host, host:port or a URL. key is shown to the server with every request."""
        parts = urlsplit(address if "://" in address else f"http://{address}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{address!r} is not the address of a server: give host:port or a URL.")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._secure else DEFAULT_PORT)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo | None:
        """See Backend.info."""
        return self._info

    def load(self, name: str, progress: LoadProgress, pull: bool = True) -> ModelInfo:
        """See Backend.load. The server loads the model. Nothing is pulled."""
        progress(f"{self._host} loads {name}", 0.0)
        shown = self._ask("POST", "/api/show", {"model": name})
        self._have_loaded(name, progress)
        progress(f"{self._host} loads {name}", 1.0)
        contexts = [value for key, value in shown.get("model_info", {}).items() if key.endswith(".context_length")]
        self._info = info = ModelInfo(
            name=name,
            place=f"{self._host}:{self._port}",
            context=contexts[0] if contexts else None,
            can_think="thinking" in shown.get("capabilities", ()),
        )
        return info

    def submit(self, request: ChatRequest) -> ServerAnswer:
        """See Backend.submit."""
        if self._info is None:
            raise RequestError("No model is chosen. Choose one with /load.")
        sampling, usual = request.sampling, SamplingParams()
        # What the user has not changed is the server's to decide: its model may have parameters of its own.
        options = {name: value for name in SAMPLING if (value := getattr(sampling, name)) != getattr(usual, name)}
        limits = {"seed": sampling.seed, "num_predict": request.max_tokens, "num_ctx": request.context}
        options |= {name: value for name, value in limits.items() if value is not None}
        body: dict[str, Any] = {
            "model": self._info.name,
            "messages": [_message(turn) for turn in request.turns],
            "options": options,
            "stream": True,
            "progress": True,  # localllm's own; other servers do not look at it
        }
        if request.thinking is not None:
            body["think"] = request.thinking
        return ServerAnswer(*self._send("POST", "/api/chat", body))

    def count_tokens(self, text: str) -> int | None:
        """The protocol has no way to ask."""
        return None

    def models(self, near: str | None) -> Sequence[ModelChoice]:
        """The server's models."""
        loaded = {entry.get("name") for entry in self._ask("GET", "/api/ps").get("models", ())}
        return [
            ModelChoice(
                name=entry["name"],
                size=entry.get("size"),
                quantization=entry.get("details", {}).get("quantization_level", ""),
                parameters=entry.get("details", {}).get("parameter_size", ""),
                loaded=entry["name"] in loaded,
            )
            for entry in self._ask("GET", "/api/tags").get("models", ())
        ]

    def inspect(self) -> "Future[EngineSnapshot] | None":
        """A server's engine cannot be looked into."""
        return None

    def memory_bytes(self) -> int | None:
        """The memory is the server's."""
        return None

    def close(self) -> None:
        """Nothing is held between requests."""

    def _have_loaded(self, name: str, progress: LoadProgress) -> None:
        """Ask an empty conversation, which loads the model and no more. A server of localllm's tells how far it is."""
        response, wire = self._send("POST", "/api/chat", {"model": name, "messages": [], "progress": True})
        with contextlib.closing(response), contextlib.closing(wire):
            try:
                for line in map(json.loads, response):
                    if "error" in line:
                        raise ServerError(f"{self._name} cannot load {name}: {line['error']}")
                    state = line.get("progress")
                    if isinstance(state, dict) and "phase" in state:
                        progress(f"{self._host}: {state['phase']}", state.get("share", 0.0))
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise ServerError(f"{self._name} broke off while it loaded {name}: {error}.") from error

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response, wire = self._send(method, path, body)
        with contextlib.closing(response), contextlib.closing(wire):
            try:
                answer = json.loads(response.read())
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise ServerError(f"{self._name}: {path} gave no JSON: {error}. Is it Ollama's protocol?") from error
        return answer if isinstance(answer, dict) else {}

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        """Send a request; return the answer to read, and the connection to end. Raises ServerError."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_S)
        try:
            connection.connect()
            wire = connection.sock  # the connection forgets it where the answer ends with it
            wire.settimeout(None)
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, path, content, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerError(f"{self._name} cannot be reached: {error}. Is the server running?") from error
        if response.status != http.client.OK:
            text = response.read(4096).decode(errors="replace")
            connection.close()
            hint = ""
            if response.status == http.client.UNAUTHORIZED:
                hint = " Set LOCALLLM_REMOTE_KEY, or remote_key_file, to its key."
            raise ServerError(f"{self._name} refuses: {_reason(text) or response.reason} ({response.status}).{hint}")
        return response, wire

    @property
    def _name(self) -> str:
        return f"{self._host}:{self._port}"


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        message["thinking"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = turn.call_objects()
    return message


def _parts(message: dict[str, Any]) -> tuple[AnswerPart, ...]:
    parts = []
    if message.get("thinking"):
        parts.append(AnswerPart(PartKind.REASONING, message["thinking"]))
    if message.get("content"):
        parts.append(AnswerPart(PartKind.CONTENT, message["content"]))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        made = ToolCall(name=function["name"], arguments=function["arguments"])
        parts.append(AnswerPart(PartKind.TOOL_CALLS, json.dumps(call), (made,)))
    return tuple(parts)


def _progress(line: dict[str, Any]) -> Progress | None:
    """How far a server of localllm's has read the prompt."""
    told = line.get("progress")
    if not isinstance(told, dict) or "total" not in told:  # it may also load the model again first
        return None
    return Progress(told.get("queue_position", 0), told.get("completed", 0), told.get("total", 0))


def _end(line: dict[str, Any], parts: tuple[AnswerPart, ...], times: Timings) -> AnswerUpdate:
    """The last update, with the server's own counts and times."""
    counts = Counts(
        prompt=line.get("prompt_eval_count", 0),
        cached_memory=line.get("prompt_eval_cached_count", 0),
        generated=line.get("eval_count", 0),
        dropped_messages=line.get("dropped_messages", 0),
        dropped_tokens=line.get("dropped_tokens", 0),
    )
    prefill, decode = (line.get(f"{name}_duration", 0) / 1e9 for name in ("prompt_eval", "eval"))
    length = line.get("done_reason") == "length"
    return AnswerUpdate(
        parts,
        counts,
        Timings(prefill_s=prefill, decode_s=decode, ttft_s=times.ttft_s),
        finish_reason=FinishReason.LENGTH if length else FinishReason.STOP,
    )


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text[:200].strip()
