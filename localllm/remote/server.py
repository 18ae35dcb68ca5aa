"""Answers of a server that speaks OpenAI's protocol, read as they come.

Protocol: https://platform.openai.com/docs/api-reference/chat/create. Reasoning is in no part of it: vLLM, SGLang and
llama.cpp call it reasoning_content, Ollama and later versions of vLLM reasoning.
"""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.engine.answer_parts import AnswerPart, PartKind
from localllm.engine.request import Counts, FinishReason, SamplingParams, Timings
from localllm.remote.calls import CallBuilder
from localllm.remote.connection import Call, Endpoint, refusal
from localllm.remote.contents import spelt
from localllm.remote.errors import RemoteError
from localllm.remote.logprobs import SpeltLogprob, read_logprobs
from localllm.settings import Settings, read_key

# Sampling parameters that are the protocol's own, and extensions that servers name differently.
STANDARD = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
EXTENSIONS = {
    "top_k": ("top_k",),
    "min_p": ("min_p",),
    "repeat_penalty": ("repeat_penalty", "repetition_penalty"),  # llama.cpp and Ollama; vLLM and SGLang
    **{name: (name,) for name in ("repeat_last_n", "typical_p", "mirostat", "mirostat_tau", "mirostat_eta")},
}


NO_REASON = "The server ended the answer without saying why. Its log may tell; a prompt beyond its context, say."


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that a server offers. context is in tokens, None where the server does not say.

    fills_in is False where a completion's suffix is known to be left out without a word.
    """

    name: str
    context: int | None
    fills_in: bool = True


@dataclass(frozen=True, slots=True)
class RemoteUpdate:
    """A piece of an answer. counts and timings are the newest; finish_reason ends the answer, with error if it failed.

    Until the server has told its own counts, generated is the number of pieces that have come.
    """

    parts: tuple[AnswerPart, ...] = ()
    logprobs: tuple[SpeltLogprob, ...] = ()
    counts: Counts = field(default_factory=Counts)
    timings: Timings = field(default_factory=Timings)
    finish_reason: FinishReason | None = None
    error: str | None = None


class RemoteAnswer:
    """An answer on its way. Iterate over it on one thread; cancel on any. The last update has a finish_reason."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._began = time.monotonic()
        self._first = 0.0
        self._counts = Counts()
        self._finish: FinishReason | None = None
        self._calls = CallBuilder()

    def open(self) -> None:
        """Wait until the server has accepted the request. Raises RemoteError with its status where it refuses."""
        self._call.open()

    def cancel(self) -> None:
        """Ask to stop. The last update still comes."""
        self._call.cancel()

    def __iter__(self) -> Iterator[RemoteUpdate]:
        error: str | None = None
        try:
            for event in self._events():
                update = self._take(event)
                if update.parts or update.logprobs:
                    yield update
        except RemoteError as caught:
            error = str(caught)
        except (TypeError, ValueError, KeyError, AttributeError) as caught:
            error = f"The server sent an event of another shape than OpenAI's ({caught!r})."
        ending = RemoteUpdate(counts=self._counts, timings=self._timings())
        if self._call.cancelled:
            yield replace(ending, finish_reason=FinishReason.CANCELLED)
        elif error is None and self._finish:
            yield replace(ending, parts=tuple(self._calls.flush()), finish_reason=self._finish)
        else:
            yield replace(ending, finish_reason=FinishReason.ERROR, error=error or NO_REASON)

    def _events(self) -> Iterator[dict[str, Any]]:
        """The server-sent events up to [DONE]. Raises RemoteError, also for one that tells of an error."""
        for line in self._call.lines():
            if not line.startswith(b"data:"):
                continue  # a comment that keeps the connection alive, or the blank line between two events
            text = line.removeprefix(b"data:").strip()
            if text == b"[DONE]":
                return
            try:
                event = json.loads(text)
            except ValueError as error:
                raise RemoteError(f"The server sent what is no JSON: {text[:80]!r}.") from error
            if not isinstance(event, dict) or event.get("error"):
                raise RemoteError(f"The server failed: {refusal(text.decode(errors='replace'))}.")
            yield event

    def _take(self, event: Mapping[str, Any]) -> RemoteUpdate:
        """Note counts and the end; return what else there is."""
        if usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self._counts = Counts(
                prompt=usage.get("prompt_tokens") or 0,
                cached_memory=cached,
                generated=usage.get("completion_tokens") or 0,
            )
        choices = event.get("choices") or ()
        if not choices:
            return RemoteUpdate()
        choice = choices[0]
        if reason := choice.get("finish_reason"):
            self._finish = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
        delta = choice.get("delta") or {}
        parts, calls = _texts(choice, delta), delta.get("tool_calls") or ()
        if parts or calls:
            self._first = self._first or time.monotonic()
            if not usage:
                self._counts = replace(self._counts, generated=self._counts.generated + 1)
        return RemoteUpdate((*parts, *self._calls.push(calls)), read_logprobs(choice), self._counts, self._timings())

    def _timings(self) -> Timings:
        """Measured here: the protocol tells none."""
        if not self._first:
            return Timings()
        ttft = self._first - self._began
        return Timings(prefill_s=ttft, decode_s=time.monotonic() - self._first, ttft_s=ttft)


class RemoteServer:
    """A server and its models. Thread-safe: every request has a connection of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def models(self, patience_s: float | None = None) -> list[RemoteModel]:
        """What the server offers. Raises RemoteError, also where it says nothing for patience_s seconds."""
        rows = Call(self.endpoint, "GET", "/models", patience_s=patience_s).json().get("data") or ()
        return [_model(row) for row in rows if isinstance(row, dict) and "id" in row]

    def chat(self, model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> RemoteAnswer:
        """Begin an answer to a conversation; images in it are parts {"type": "image", "data": bytes}.

        options are further fields of the request; see sampling_options.
        """
        return self._answer("/chat/completions", {"model": model, "messages": [*map(spelt, messages)], **options})

    def complete(self, model: str, prompt: str, options: Mapping[str, Any]) -> RemoteAnswer:
        """Begin to continue a text, without a chat template."""
        return self._answer("/completions", {"model": model, "prompt": prompt, **options})

    def embed(self, model: str, texts: Sequence[Any], options: Mapping[str, Any]) -> tuple[list[Any], int]:
        """A vector for each text (or list of token ids), and how many tokens were read. Raises RemoteError."""
        body = {"model": model, "input": list(texts), **options}
        answer = Call(self.endpoint, "POST", "/embeddings", body).json()
        try:
            rows = sorted(answer["data"], key=lambda row: row.get("index", 0))
            vectors = [row["embedding"] for row in rows]
        except (KeyError, TypeError, AttributeError) as error:
            raise RemoteError(f"{self.endpoint} answers something else than vectors.") from error
        return vectors, int((answer.get("usage") or {}).get("prompt_tokens") or 0)

    def rank(self, model: str, query: str, documents: Sequence[str]) -> tuple[list[tuple[int, float]], int]:
        """The index and the score of each document, in any order, and how many tokens were read. Raises RemoteError.

        The route is Jina's and Cohere's, which vLLM, SGLang and llama.cpp have beside OpenAI's.
        """
        body = {"model": model, "query": query, "documents": list(documents)}
        answer = Call(self.endpoint, "POST", "/rerank", body).json()
        try:
            found = [(int(row["index"]), float(row["relevance_score"])) for row in answer["results"]]
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteError(f"{self.endpoint} answers something else than scores.") from error
        return found, int((answer.get("usage") or {}).get("total_tokens") or 0)

    def _answer(self, route: str, body: dict[str, Any]) -> RemoteAnswer:
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        return RemoteAnswer(Call(self.endpoint, "POST", route, body | streaming))


def remote_server(address: str, settings: Settings) -> RemoteServer:
    """The server at an address, with the key of the settings.

    Raises RemoteError for a bad address, SettingsError for a bad key file.
    """
    key = read_key(settings.remote_key, settings.remote_key_file, "remote_key_file")
    return RemoteServer(Endpoint.parse(address, key))


def sampling_options(sampling: SamplingParams, names: Collection[str]) -> dict[str, Any]:
    """The fields of a request for those sampling parameters that are named; the server decides the others."""
    options = {name: getattr(sampling, name) for name in STANDARD if name in names}
    for ours, theirs in EXTENSIONS.items():
        if ours in names:
            options |= dict.fromkeys(theirs, getattr(sampling, ours))
    return {name: value for name, value in options.items() if value is not None}


def _texts(choice: Mapping[str, Any], delta: Mapping[str, Any]) -> tuple[AnswerPart, ...]:
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    content = delta.get("content") or choice.get("text")
    found = ((PartKind.REASONING, reasoning), (PartKind.CONTENT, content))
    return tuple(AnswerPart(kind, str(text)) for kind, text in found if text)


def _model(row: Mapping[str, Any]) -> RemoteModel:
    return RemoteModel(str(row["id"]), _context(row), fills_in=row.get("owned_by") != "llamacpp")


def _context(row: Mapping[str, Any]) -> int | None:
    """vLLM and SGLang say max_model_len; llama.cpp meta.n_ctx of one slot, or n_ctx_train where it is older."""
    meta = row.get("meta")
    lengths = (meta.get("n_ctx") or meta.get("n_ctx_train")) if isinstance(meta, dict) else None
    found = row.get("max_model_len") or lengths
    return found if isinstance(found, int) else None
