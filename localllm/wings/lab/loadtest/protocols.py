"""The two protocols of a load test: how to write a request, and how to read a line of its stream.

https://github.com/ollama/ollama/blob/main/docs/api.md, https://platform.openai.com/docs/api-reference/chat/streaming
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.wings.lab.workload.texts import Prompt


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A request to send `at` seconds after the beginning, answered by at most `answer_tokens` tokens."""

    at: float
    prompt: Prompt
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Line:
    """The content of a stream's line. text: whether it has text. Counts are None if it has none."""

    text: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    error: str | None = None
    last: bool = False


class Protocol(ABC):
    """A protocol. raw: prompts go to the model without its chat template.

    routes: of chats and of raw prompts, below the server's address. listing: in the response of models_route, the field
    with the models and that with a model's name.
    """

    name: str
    routes: tuple[str, str]
    models_route: str
    listing: tuple[str, str]

    def __init__(self, model: str, raw: bool, extra: Mapping[str, Any]) -> None:
        """extra: fields added to every request; they override ours."""
        self.model, self._raw, self._extra = model, raw, extra

    @property
    def route(self) -> str:
        """The path of requests."""
        return self.routes[self._raw]

    @abstractmethod
    def body(self, job: TimedJob, stream: bool = True) -> dict[str, Any]:
        """A request, greedy unless `extra` says otherwise."""

    @abstractmethod
    def read(self, line: str) -> Line | None:
        """Read a line; None if it carries nothing. Raises ValueError, KeyError or TypeError for another format."""

    @abstractmethod
    def prompt_tokens(self, answer: Mapping[str, Any]) -> int | None:
        """The number of prompt tokens reported in an answer that is not streamed."""

    @classmethod
    def model_names(cls, answer: Mapping[str, Any]) -> list[str]:
        """The models in the response of models_route. Raises KeyError or TypeError for another format."""
        models, name = cls.listing
        return [str(row[name]) for row in answer[models]]

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        if self._raw:
            return {"prompt": prompt if isinstance(prompt, str) else "\n".join(str(one["content"]) for one in prompt)}
        return {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}


class OpenAI(Protocol):
    """Chat completions, or completions for raw prompts."""

    name = "openai"
    routes = ("/v1/chat/completions", "/v1/completions")
    models_route = "/v1/models"
    listing = ("data", "id")

    def body(self, job: TimedJob, stream: bool = True) -> dict[str, Any]:
        fields = {"model": self.model, **self._prompt(job.prompt), "max_tokens": job.answer_tokens, "temperature": 0}
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {"stream": False}
        return {**fields, **streaming, **self._extra}

    def read(self, line: str) -> Line | None:
        if not line.startswith("data:"):
            return None  # a blank line between events, or a comment that keeps the connection alive
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return Line(last=True)
        event = json.loads(data)
        if event.get("error"):
            return Line(error=_error_text(event["error"]))
        usage, choices = event.get("usage") or {}, event.get("choices") or ()
        return Line(
            text=any(_has_text(choice) for choice in choices),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            generated_tokens=usage.get("completion_tokens"),
            last=any(choice.get("finish_reason") for choice in choices),  # usage may still come, or [DONE]
        )

    def prompt_tokens(self, answer: Mapping[str, Any]) -> int | None:
        return (answer.get("usage") or {}).get("prompt_tokens")


class Ollama(Protocol):
    """Ollama's chat, or generate for raw prompts."""

    name = "ollama"
    routes = ("/api/chat", "/api/generate")
    models_route = "/api/tags"
    listing = ("models", "name")

    def body(self, job: TimedJob, stream: bool = True) -> dict[str, Any]:
        options = {"num_predict": job.answer_tokens, "temperature": 0, **self._extra.get("options", {})}
        raw = {"raw": True} if self._raw else {}
        return {
            "model": self.model, **self._prompt(job.prompt), **raw, "stream": stream, **self._extra, "options": options
        }  # fmt: skip

    def read(self, line: str) -> Line | None:
        if not line.strip():
            return None
        event = json.loads(line)
        if event.get("error"):
            return Line(error=_error_text(event["error"]))
        message = event.get("message") or event
        return Line(
            text=bool(message.get("content") or message.get("response") or message.get("thinking")),
            prompt_tokens=event.get("prompt_eval_count"),
            cached_tokens=event.get("prompt_eval_cached_count"),
            generated_tokens=event.get("eval_count"),
            last=bool(event.get("done")),
        )

    def prompt_tokens(self, answer: Mapping[str, Any]) -> int | None:
        return answer.get("prompt_eval_count")


PROTOCOLS: dict[str, type[Protocol]] = {protocol.name: protocol for protocol in (OpenAI, Ollama)}


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a choice has text or reasoning. Servers name the field of reasoning differently."""
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning")
    return bool(choice.get("text")) or any(delta.get(name) for name in names)


def _error_text(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
