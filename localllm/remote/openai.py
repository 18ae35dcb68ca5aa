"""Models on servers that speak OpenAI's protocol: vLLM, SGLang, llama.cpp, Ollama and others.

Protocol: https://platform.openai.com/docs/api-reference/chat/create. It has no field for reasoning: vLLM, SGLang and
llama.cpp send it as reasoning_content, Ollama and newer versions of vLLM as reasoning.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from localllm.answer.event import AnswerEvent, AnswerPart, Logprob, PartKind, called
from localllm.answer.request import AnswerRequest
from localllm.answer.tool_calls import ToolCall
from localllm.bounded_json import parsed
from localllm.engine.request import Counts, FinishReason
from localllm.errors import RequestError, SettingsError
from localllm.remote.connection import Endpoint, RemoteCall, RemoteError, refusal
from localllm.remote.fields import chat_fields, check, completion_fields
from localllm.remote.stream import RemoteMeter, RemotePrompt, read_logprobs
from localllm.settings import read_key

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_CHOICES = 64
LIST_PATIENCE_S = 10.0  # for a list of models


class ServerKey(Protocol):
    """The settings about what is sent to a server."""

    @property
    def remote_key(self) -> str | None: ...

    @property
    def remote_key_file(self) -> str | None: ...

    @property
    def watermark_key(self) -> str | None: ...


class OpenAIServer:
    """A server and its models. Thread-safe: every request uses its own connection."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    @classmethod
    def at(cls, address: str, settings: ServerKey) -> "OpenAIServer":
        """The server at an address, with the key of the settings.

        Raises RemoteError for a bad address, SettingsError for a bad key file or a watermark.
        """
        if settings.watermark_key:
            raise SettingsError("watermark_key marks answers of this machine's models only; unset it for --remote.")
        return cls(Endpoint.parse(address, read_key(settings.remote_key, settings.remote_key_file, "remote_key_file")))

    def models(self) -> "list[OpenAIModel]":
        """The server's models. Raises RemoteError."""
        rows = RemoteCall(self.endpoint, "GET", "/models", patience_s=LIST_PATIENCE_S).json().get("data") or ()
        return [
            OpenAIModel(self, str(row["id"]), _context(row), llama_cpp=row.get("owned_by") == "llamacpp")
            for row in rows
            if isinstance(row, dict) and "id" in row
        ]

    def model(self, name: str) -> "OpenAIModel":
        """A model by name, whether or not the server lists it."""
        return OpenAIModel(self, name)


@dataclass(frozen=True, slots=True)
class OpenAIModel:
    """A server's model. Implements AnsweringModel; thread-safe. context: in tokens, None if unknown.

    llama_cpp: whether the server is llama-server, which ignores a completion's suffix and regular expressions.
    """

    server: OpenAIServer
    name: str
    context: int | None = None
    llama_cpp: bool = False
    most_choices: int = MOST_CHOICES

    @property
    def tokenizer(self) -> NoReturn:
        raise unavailable("tokens")

    @property
    def template(self) -> NoReturn:
        raise unavailable("chat templates")

    def prepare(self, request: AnswerRequest) -> RemotePrompt:
        """See AnsweringModel. The server renders, tokenises and limits the context."""
        check(request)
        if request.adapters is not None:
            raise RequestError("a remote server's adapters cannot be chosen; name a model that has them")
        if request.template is not None:
            raise RequestError("a remote server's template cannot be chosen; leave it out")
        if request.prompt_logprobs is not None:
            raise RequestError("a prompt's log-probabilities are not supported for models of a remote server")
        if request.before:
            raise RequestError("context is not supported for models of a remote server; use /api/chat")
        if self.llama_cpp and request.grammar is not None and request.grammar[0] == "regex":
            raise RemoteError(f"{self.server.endpoint} does not support regular expressions; send a GBNF grammar", 501)
        if request.prompt is None:
            route, fields = "/chat/completions", chat_fields(request)
        elif request.suffix is not None and self.llama_cpp:
            raise RemoteError(f"{self.server.endpoint} does not support suffix; use its own route /infill", 501)
        else:
            route, fields = "/completions", completion_fields(request)
        body = {"model": self.name, **fields, "stream": True, "stream_options": {"include_usage": True}}
        most = request.sampling.get("logprobs") or 0
        is_object = request.format == "json" or (
            isinstance(request.format, dict) and request.format.get("type") == "object"
        )
        opening = "{" if request.prompt is not None and is_object else ""
        return RemotePrompt(self.server.endpoint, route, body, partial(_read, most=most, opening=opening))

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, truncate: bool, dimensions: int | None
    ) -> "tuple[NDArray[np.float32], int]":
        """Embed texts: normalised rows, float32[len(texts), dimensions], and the number of tokens.

        truncate has no effect: the protocol leaves it to the server. Raises RemoteError.
        """
        import numpy as np

        body: dict[str, Any] = {"model": self.name, "input": list(texts), "encoding_format": "float"}
        answer = self._ask("/embeddings", body | ({} if dimensions is None else {"dimensions": dimensions}))
        try:
            found = sorted(answer["data"], key=lambda row: row.get("index", 0))
            rows = np.array([row["embedding"] for row in found], dtype=np.float32)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RemoteError(f"{self.server.endpoint} does not send vectors.") from error
        if rows.ndim != 2 or len(rows) != len(texts):
            raise RemoteError(f"{self.server.endpoint} sends {rows.shape} numbers for {len(texts)} texts.")
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return rows, int((answer.get("usage") or {}).get("prompt_tokens") or 0)

    def rank(self, query: str, documents: Sequence[str], *, truncate: bool) -> "tuple[NDArray[np.float32], int]":
        """Score each document; returns the scores and the number of tokens. truncate has no effect. Raises RemoteError.

        The route is Jina's and Cohere's, which vLLM, SGLang and llama.cpp have too.
        """
        import numpy as np

        answer = self._ask("/rerank", {"model": self.name, "query": query, "documents": list(documents)})
        scores = np.full(len(documents), -np.inf, dtype=np.float32)
        try:
            for row in answer["results"]:
                if not 0 <= row["index"] < len(documents):
                    raise RemoteError(f"{self.server.endpoint} scores document {row['index']} of {len(documents)}.")
                scores[row["index"]] = row["relevance_score"]
        except (LookupError, TypeError, ValueError) as error:
            raise RemoteError(f"{self.server.endpoint} does not send scores.") from error
        if not np.isfinite(scores).all():
            raise RemoteError(f"{self.server.endpoint} does not score every document.")
        return scores, int((answer.get("usage") or {}).get("total_tokens") or 0)

    def _ask(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return RemoteCall(self.server.endpoint, "POST", route, body).json()


def unavailable(what: str) -> RemoteError:
    """The error for a feature that OpenAI's protocol lacks."""
    return RemoteError(f"{what}: not available, since the model is on a remote server of OpenAI's protocol", 501)


def _read(call: RemoteCall, meter: RemoteMeter, most: int, opening: str) -> Iterator[AnswerEvent]:
    """See Reader. most: alternatives for each log-probability. opening: what the text begins with if a format holds."""
    calls, finish = _Calls(), None
    for event in _events(call):
        usage = event.get("usage")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            prompt, generated = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
            meter.counts = Counts(prompt=prompt, cached_memory=cached, generated=generated)
        for choice in (event.get("choices") or ())[:1]:
            delta = choice.get("delta") or {}
            parts, deltas = _texts(choice, delta), delta.get("tool_calls") or ()
            if opening and (begun := "".join(part.text for part in parts).strip()):
                if not begun.startswith(opening):
                    raise RemoteError(
                        f"The server ignores the format: its answer begins with {begun[:40]!r}. "
                        "Send it as a chat: vLLM with --reasoning-parser holds formats only there."
                    )
                opening = ""
            if (parts or deltas) and not usage:
                meter.piece()
            parts += calls.push(deltas)
            logprobs = _logprobs(choice, most)
            if reason := choice.get("finish_reason"):
                finish = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
            if parts or logprobs:
                yield meter.event(tuple(parts), logprobs)
    if finish is not None:
        yield meter.event(tuple(calls.flush()), finish_reason=finish)


def _events(call: RemoteCall) -> Iterator[dict[str, Any]]:
    """The server-sent events up to [DONE]. Raises RemoteError, also if an event reports an error."""
    for line in call.lines():
        if not line.startswith(b"data:"):
            continue  # a comment or the blank line between two events
        text = line.removeprefix(b"data:").strip()
        if text == b"[DONE]":
            return
        try:
            event = parsed(text)
        except ValueError as error:
            raise RemoteError(f"The server sent an event that is not JSON: {text[:80]!r}.") from error
        if not isinstance(event, dict) or event.get("error"):
            raise RemoteError(f"The server failed: {refusal(text.decode(errors='replace'))}.")
        yield event


def _texts(choice: Mapping[str, Any], delta: Mapping[str, Any]) -> list[AnswerPart]:
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    content = delta.get("content") or choice.get("text")
    found = ((PartKind.REASONING, reasoning), (PartKind.CONTENT, content))
    return [AnswerPart(kind, str(text)) for kind, text in found if text]


class _Calls:
    """Joins streamed tool calls: first the name, then the arguments' JSON in pieces, each with the call's index.

    A call is complete when the next one starts or the answer ends.
    """

    def __init__(self) -> None:
        self._index: int | None = None
        self._name = ""
        self._arguments: list[str] = []

    def push(self, deltas: Iterable[Mapping[str, Any]]) -> list[AnswerPart]:
        """Add pieces; return the calls that are now complete."""
        parts: list[AnswerPart] = []
        for delta in deltas:
            index = delta.get("index", 0)
            if index != self._index:
                parts += self.flush()
                self._index = index
            function = delta.get("function") or {}
            self._name += function.get("name") or ""
            arguments = function.get("arguments") or ""
            self._arguments.append(arguments if isinstance(arguments, str) else json.dumps(arguments))
        return parts

    def flush(self) -> list[AnswerPart]:
        """Return the unfinished call, as content if its arguments are not a JSON object."""
        index, name, source = self._index, self._name, "".join(self._arguments)
        self._index, self._name, self._arguments = None, "", []
        if index is None:
            return []
        try:
            arguments = parsed(source or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict) or not name:
            return [AnswerPart(PartKind.CONTENT, f"{name} {source}")]
        return [called([ToolCall(name, arguments)], f"{name} {source}")]


def _logprobs(choice: Mapping[str, Any], most: int) -> tuple[Logprob, ...]:
    """The log-probabilities of a choice, in the format of chats or of completions. most: alternatives for each.

    https://platform.openai.com/docs/api-reference/completions/object
    """
    found = choice.get("logprobs")
    if not isinstance(found, Mapping):
        return ()
    if isinstance(found.get("content"), list):
        return read_logprobs(found["content"], most)
    if "logprob" in found:  # mistral.rs's events have one token without a list
        return read_logprobs([found], most)
    tokens, values = found.get("tokens") or (), found.get("token_logprobs") or ()
    tops: Sequence[Mapping[str, Any]] = found.get("top_logprobs") or ({},) * len(tokens)
    read = []
    for token, value, others in zip(tokens, values, tops, strict=False):
        if value is not None:  # None: a prompt's first token
            top = [(str(text).encode(), float(other)) for text, other in (others or {}).items()]
            read.append(Logprob(str(token).encode(), float(value), tuple(top[:most])))
    return tuple(read)


def _context(row: Mapping[str, Any]) -> int | None:
    """The context: max_model_len of vLLM and SGLang, meta.n_ctx of llama.cpp (n_ctx_train in older versions)."""
    meta = row.get("meta")
    lengths = (meta.get("n_ctx") or meta.get("n_ctx_train")) if isinstance(meta, dict) else None
    found = row.get("max_model_len") or lengths
    return found if isinstance(found, int) else None
