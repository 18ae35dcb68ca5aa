"""The chat's backend on a server: localllm's own, or any that speaks Ollama's protocol.

Protocol: https://github.com/ollama/ollama/blob/main/docs/api.md. Durations are nanoseconds there.
"""

import base64
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from localllm.engine.answer_parts import AnswerPart, PartKind
from localllm.engine.request import Counts, FinishReason, Progress, SamplingParams, Timings
from localllm.engine.tool_calls import ToolCall
from localllm.errors import RequestError
from localllm.remote.connection import Call, Endpoint
from localllm.remote.errors import RemoteError
from tui.backend import AnswerUpdate, ChatRequest, LoadProgress, ModelChoice, ModelInfo, Recipe, Turn, join_parts

if TYPE_CHECKING:
    from localllm.engine.inspection import EngineSnapshot

DEFAULT_PORT = 11434
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)


class ServerAnswer:
    """Asks and reads JSON lines on a thread of its own. Times are measured here until the server tells its own."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._updates: deque[AnswerUpdate] = deque()
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
        self._call.cancel()

    def _read(self) -> None:
        first = 0.0
        counts, times = Counts(), Timings()
        last = AnswerUpdate(finish_reason=FinishReason.ERROR, error="The server ended the answer without saying why.")
        try:
            for line in _objects(self._call):
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
        except RemoteError as error:
            last = AnswerUpdate(finish_reason=FinishReason.ERROR, error=str(error))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            what = f"The server sent a line of another shape than Ollama's ({error!r})."
            last = AnswerUpdate(finish_reason=FinishReason.ERROR, error=what)
        if self._call.cancelled:
            last = AnswerUpdate((), counts, times, finish_reason=FinishReason.CANCELLED)
        self._updates.append(last)


class ServerBackend:
    """Talks to one server. Thread-safe. Methods raise RemoteError where it cannot be reached or refuses."""

    def __init__(self, address: str, key: str | None = None) -> None:
        """address: host, host:port or a URL. key is shown to the server with every request."""
        self._server = Endpoint.parse(address, key, path="", port=DEFAULT_PORT)
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo | None:
        """See Backend.info."""
        return self._info

    def load(self, name: str, progress: LoadProgress, pull: bool = True) -> ModelInfo:
        """See Backend.load. The server loads the model. Nothing is pulled."""
        progress(f"{self._server.host} loads {name}", 0.0)
        shown = self._ask("POST", "/api/show", {"model": name})
        self._have_loaded(name, progress)
        progress(f"{self._server.host} loads {name}", 1.0)
        contexts = [value for key, value in shown.get("model_info", {}).items() if key.endswith(".context_length")]
        abilities = shown.get("capabilities", ("vision",))  # old servers do not tell; they refuse what they must
        self._info = info = ModelInfo(
            name=name,
            place=f"{self._server.host}:{self._server.port}",
            context=contexts[0] if contexts else None,
            can_think="thinking" in abilities,
            sees="vision" in abilities,
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
        return ServerAnswer(Call(self._server, "POST", "/api/chat", body))

    def count_tokens(self, text: str) -> int | None:
        """The protocol has no way to ask."""
        return None

    def picture_tokens(self, data: bytes) -> int | None:
        """The protocol has no way to ask how many, but whether the model reads pictures at all."""
        if self._info and not self._info.sees:
            raise RequestError(f"{self._info.name} reads text only. Choose a model that sees: /models.")
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

    def save(self, name: str, recipe: Recipe) -> None:
        """See Backend.save. The server keeps the model."""
        if self._info is None:
            raise RequestError("No model is chosen. Choose one with /load.")
        body: dict[str, Any] = {"model": name, "from": self._info.name, "stream": False}
        given = {"system": recipe.system, "parameters": recipe.parameters, "messages": recipe.messages}
        told = self._ask("POST", "/api/create", body | {key: value for key, value in given.items() if value})
        if "error" in told:
            raise RemoteError(f"{self._server} cannot save {name}: {told['error']}")

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
        call = Call(self._server, "POST", "/api/chat", {"model": name, "messages": [], "progress": True})
        for line in _objects(call):
            if "error" in line:
                raise RemoteError(f"{self._server} cannot load {name}: {line['error']}")
            state = line.get("progress")
            if isinstance(state, dict) and "phase" in state:
                progress(f"{self._server.host}: {state['phase']}", state.get("share", 0.0))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return Call(self._server, method, path, body).json()


def _objects(call: Call) -> Iterator[dict[str, Any]]:
    """The JSON object of each line. Raises RemoteError."""
    for line in call.lines():
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise RemoteError(f"The server sent what is no JSON: {line[:80]!r}. Is it Ollama's protocol?") from error
        if not isinstance(found, dict):
            raise RemoteError(f"The server sent something unexpected: {line[:80]!r}. Is it Ollama's protocol?")
        yield found


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        message["thinking"] = turn.reasoning
    if turn.pictures:
        message["images"] = [base64.b64encode(data).decode() for data in turn.pictures]
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
