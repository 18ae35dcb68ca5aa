"""Models on servers that speak Ollama's protocol, including localllm's own server.

Protocol: https://github.com/ollama/ollama/blob/main/docs/api.md. Its durations are in nanoseconds.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm.answer.event import AnswerEvent, AnswerPart, PartKind, called
from localllm.answer.request import AnswerRequest, Message
from localllm.answer.tool_calls import ToolCall
from localllm.bounded_json import parsed
from localllm.engine.request import Counts, FinishReason, Progress, Timings
from localllm.errors import RequestError
from localllm.remote.connection import Endpoint, RemoteCall, RemoteError
from localllm.remote.fields import check
from localllm.remote.stream import RemoteMeter, RemotePrompt, read_logprobs

if TYPE_CHECKING:
    from gguf_io.runner_info import LoadProgress

DEFAULT_PORT = 11434


class OllamaServer:
    """A server and its models. Thread-safe. All methods raise RemoteError."""

    def __init__(self, address: str, key: str | None = None) -> None:
        """address: host, host:port or a URL. key: sent with every request."""
        self.endpoint = Endpoint.parse(address, key, path="", port=DEFAULT_PORT)

    def load(self, name: str, progress: "LoadProgress") -> "OllamaModel":
        """Make the server load a model, without pulling it. An exception from progress is raised and ends the load."""
        progress(f"{self.endpoint.host} loads {name}", 0.0)
        shown = self.ask("POST", "/api/show", {"model": name})
        # An empty conversation only loads the model. A localllm server reports progress.
        call = RemoteCall(self.endpoint, "POST", "/api/chat", {"model": name, "messages": [], "progress": True})
        for line in _objects(call):
            if "error" in line:
                raise RemoteError(f"{self.endpoint} cannot load {name}: {line['error']}")
            state = line.get("progress")
            if isinstance(state, dict) and "phase" in state:
                progress(f"{self.endpoint.host}: {state['phase']}", state.get("share", 0.0))
        progress(f"{self.endpoint.host} loads {name}", 1.0)
        contexts = [value for key, value in shown.get("model_info", {}).items() if key.endswith(".context_length")]
        # Old servers do not list capabilities; assume vision, since they reject images that they cannot read.
        capabilities = frozenset(shown.get("capabilities", ("vision",)))
        return OllamaModel(self, name, contexts[0] if contexts else None, capabilities)

    def models(self) -> list[tuple[dict[str, Any], bool]]:
        """The rows of /api/tags, and whether each model is loaded."""
        loaded = {row.get("name") for row in self.ask("GET", "/api/ps").get("models", ())}
        return [(row, row["name"] in loaded) for row in self.ask("GET", "/api/tags").get("models", ())]

    def create(self, name: str, recipe: Mapping[str, Any]) -> None:
        """Create a model on the server. recipe: further fields of /api/create."""
        answer = self.ask("POST", "/api/create", {"model": name, "stream": False, **recipe})
        if "error" in answer:
            raise RemoteError(f"{self.endpoint} cannot save {name}: {answer['error']}")

    def ask(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to a route that does not stream, and return the response."""
        return RemoteCall(self.endpoint, method, route, body).json()


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A server's model. Implements AnsweringModel. context: in tokens, None if unknown."""

    server: OllamaServer
    name: str
    context: int | None = None
    capabilities: frozenset[str] = frozenset()
    most_choices: int = 1

    def prepare(self, request: AnswerRequest) -> RemotePrompt:
        """See AnsweringModel. The server renders and tokenises. Raises RequestError for fields the protocol lacks."""
        check(request)
        lacks = (request.prompt, request.tool_choice, request.adapters, request.grammar, request.prompt_logprobs)
        if any(value is not None for value in lacks):
            raise RequestError(
                "prompts, their log-probabilities, tool_choice, adapters and grammars are not supported on a server of "
                "Ollama's protocol"
            )
        limits = {"num_predict": request.max_tokens, "num_ctx": request.context_limit, "num_keep": request.keep}
        limits |= {"image_min_tokens": request.image_min_tokens, "image_max_tokens": request.image_max_tokens}
        options = {**request.sampling, **limits, "stop": list(request.stop) if request.stop else None}
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [_message(message) for message in request.messages],
            "options": {name: value for name, value in options.items() if value is not None},
            "stream": True,
            "progress": True,  # an extension of localllm's server
        }
        if (logprobs := body["options"].pop("logprobs", None)) is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs}
        if request.think is not None:
            body["think"] = request.think
        if offered := request.offered_tools:
            body["tools"] = offered
        if request.has_format:
            body["format"] = request.format
        return RemotePrompt(self.server.endpoint, "/api/chat", body, partial(_read, most=logprobs or 0))


def _message(message: Message) -> dict[str, Any]:
    content = message.get("content") or ""
    parts: Sequence[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    fields: dict[str, Any] = {
        "role": message["role"],
        "content": "\n".join(part["text"] for part in parts if part["type"] == "text"),
    }
    if reasoning := message.get("reasoning_content") or message.get("thinking"):
        fields["thinking"] = reasoning
    if pictures := [part["data"] for part in parts if part["type"] == "image"]:
        fields["images"] = [base64.b64encode(data).decode() for data in pictures]
    for key in ("tool_calls", "tool_name", "tool_call_id"):
        if value := message.get(key):
            fields[key] = value
    return fields


def _read(call: RemoteCall, meter: RemoteMeter, most: int) -> Iterator[AnswerEvent]:
    """See Reader. most: alternatives for each log-probability."""
    for line in _objects(call):
        if "error" in line:
            raise RemoteError(str(line["error"]))
        parts = _parts(line.get("message", {}))
        if parts:
            meter.piece()
        logprobs = read_logprobs(line.get("logprobs") or (), most)
        if line.get("done"):
            yield _end(line, meter.event(parts, logprobs))
            return
        yield meter.event(parts, logprobs, _progress(line))


def _objects(call: RemoteCall) -> Iterator[dict[str, Any]]:
    """The JSON object of each line. Raises RemoteError."""
    for line in call.lines():
        if not line.strip():
            continue
        try:
            found = parsed(line)
        except ValueError as error:
            raise RemoteError(f"The server sent a line that is not JSON: {line[:80]!r}. Is it Ollama's?") from error
        if not isinstance(found, dict):
            raise RemoteError(f"The server sent a line that is not an object: {line[:80]!r}. Is it Ollama's?")
        yield found


def _parts(message: Mapping[str, Any]) -> tuple[AnswerPart, ...]:
    parts = []
    if message.get("thinking"):
        parts.append(AnswerPart(PartKind.REASONING, message["thinking"]))
    if message.get("content"):
        parts.append(AnswerPart(PartKind.CONTENT, message["content"]))
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    for call in calls:
        made = ToolCall(call["function"]["name"], call["function"]["arguments"])
        parts.append(called([made], json.dumps(call)))
    return tuple(parts)


def _progress(line: Mapping[str, Any]) -> Progress | None:
    """Prefill progress, which only localllm servers send."""
    found = line.get("progress")
    if not isinstance(found, dict) or "total" not in found:  # without total: progress of a load
        return None
    return Progress(found.get("queue_position", 0), found.get("completed", 0), found.get("total", 0))


def _end(line: Mapping[str, Any], event: AnswerEvent) -> AnswerEvent:
    """The last event, with the server's counts and times."""
    counts = Counts(
        prompt=line.get("prompt_eval_count", 0),
        cached_memory=line.get("prompt_eval_cached_count", 0),
        generated=line.get("eval_count", 0),
        drafted=line.get("draft_count", 0),
        accepted=line.get("draft_accepted_count", 0),
        dropped_messages=line.get("dropped_messages", 0),
        dropped_tokens=line.get("dropped_tokens", 0),
    )
    prefill, decode, drafting = (line.get(f"{name}_duration", 0) / 1e9 for name in ("prompt_eval", "eval", "draft"))
    return replace(
        event,
        counts=counts,
        timings=Timings(prefill_s=prefill, decode_s=decode, ttft_s=event.timings.ttft_s, drafting_s=drafting),
        finish_reason=FinishReason.LENGTH if line.get("done_reason") == "length" else FinishReason.STOP,
    )
