"""Answers a question from the stored answer to one that means the same (`--semantic-cache`).

Only where nothing but the question's words may differ: same user, model, system text, earlier messages, tools, format
and sampling. Unless the settings say otherwise, only the first question of a conversation at temperature 0.
"""

import hashlib
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, fields

import numpy as np
from anyio import to_thread
from numpy.typing import NDArray

from localllm.answer.event import Answer, AnswerEvent, AnswerPart, PartKind
from localllm.answer.request import AnswerRequest
from localllm.engine.request import Counts, FinishReason
from localllm.errors import LocalLLMError
from localllm.semantic.store import AnswerStore, CachedAnswer, store_path
from localllm.server.options import parse_duration
from localllm.settings import Settings

log = logging.getLogger(__name__)

PIECE = 48  # characters of an event
_OF_THE_QUEUE = frozenset({"client", "priority", "background", "pins", "persist_from", "messages"})
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Question:
    """A question that may be answered from the store, and its vector."""

    scope: str
    text: str
    vector: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer, and the cosine of its question with the one that was asked."""

    stored: CachedAnswer
    cosine: float

    @property
    def note(self) -> str:
        """One sentence for the client."""
        return f"Answered from the semantic cache: cosine {self.cosine:.4f} to an earlier question."


class SemanticCache:
    """The stored answers of a server. model: the embedding model's name."""

    def __init__(self, settings: Settings, store: AnswerStore | None = None) -> None:
        """Raises SemanticCacheError, and ValueError for an invalid time to live."""
        assert settings.semantic_cache is not None
        self.model = settings.semantic_cache
        self._settings = settings
        self._store = store or AnswerStore(
            store_path(), settings.semantic_mib << 20, parse_duration(settings.semantic_ttl)
        )

    def find(
        self, request: AnswerRequest, text: str, row: NDArray[np.float32], models: str
    ) -> tuple[Question, Hit | None]:
        """The question, and a stored answer to it if there is one. models: identifies the two models. Blocks."""
        question = Question(scope_of(request, models), text, row.astype(np.float32))
        found = self._store.nearest(question.scope, text, question.vector, self._settings.semantic_threshold)
        if found is None:
            return question, None
        hit = Hit(*found)
        log.info("semantic cache: answer %d, cosine %.4f", hit.stored.id, hit.cosine)
        return question, hit

    async def keep(self, question: Question, name: str, answer: Answer) -> None:
        """Store a complete answer without tool calls. A failure is logged: the answer was sent."""
        last = answer.last
        if last.finish_reason is not FinishReason.STOP or answer.calls or not answer.content or last.warnings:
            return
        told = answer.reasoning, answer.content, last.counts.prompt
        try:
            await to_thread.run_sync(self._store.add, question.scope, name, question.text, question.vector, told)
        except LocalLLMError as error:
            log.warning("%s", error)

    def close(self) -> None:
        self._store.close()

    def question_of(self, request: AnswerRequest) -> str | None:
        """The text of the last message, if the answer depends on nothing that a vector does not show."""
        if request.prompt is not None or request.before or request.background or not request.messages:
            return None
        *before, last = request.messages
        text = last.get("content")
        if last.get("role") != "user" or not isinstance(text, str) or not text.strip():
            return None
        if request.sampling.get("logprobs") is not None or request.tool_choice is not None:
            return None
        if self._settings.semantic_scope == "any":
            return text
        is_first = all(message.get("role") in _SYSTEM for message in before)
        return text if is_first and request.sampling.get("temperature") == 0 else None


def scope_of(request: AnswerRequest, models: str) -> str:
    """A digest of all that the answer depends on, except the last message's words. models: as for `find`."""
    *before, last = request.messages
    rest = {one.name: getattr(request, one.name) for one in fields(request) if one.name not in _OF_THE_QUEUE}
    others = {name: value for name, value in last.items() if name != "content"}
    text = json.dumps([models, before, others, rest], sort_keys=True, default=repr, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class StoredPrompt:
    """The prompt of an answer from the store, of which nothing is computed. Implements Prompt."""

    tokens: tuple[int, ...] = ()
    text = None
    pictures: tuple[()] = ()

    def __init__(self, hit: Hit) -> None:
        self._hit = hit

    def submit(self, choice: int = 0) -> "StoredAnswer":
        return StoredAnswer(self._hit)


class StoredAnswer:
    """A stored answer as a stream of events. Implements AnswerStream."""

    def __init__(self, hit: Hit) -> None:
        self._hit = hit
        self._events = self._made()
        self._cancelled = False
        self.accepted: Future[None] = Future()
        self.accepted.set_result(None)

    def cancel(self) -> None:
        self._cancelled = True

    def poll(self) -> list[AnswerEvent]:
        return [*self._events]

    def __iter__(self) -> Iterator[AnswerEvent]:
        return self._events

    async def __aiter__(self) -> AsyncGenerator[AnswerEvent, None]:
        for event in self._events:
            yield event

    def _made(self) -> Iterator[AnswerEvent]:
        stored = self._hit.stored
        counts = Counts(prompt=stored.prompt_tokens, cached_memory=stored.prompt_tokens)
        for kind, text in ((PartKind.REASONING, stored.reasoning), (PartKind.CONTENT, stored.content)):
            for start in range(0, len(text), PIECE):
                if self._cancelled:
                    yield AnswerEvent(counts=counts, finish_reason=FinishReason.CANCELLED)
                    return
                yield AnswerEvent((AnswerPart(kind, text[start : start + PIECE]),), counts)
        yield AnswerEvent(counts=counts, finish_reason=FinishReason.STOP, warnings=(self._hit.note,))


def hit_headers(hit: Hit | None) -> dict[str, str]:
    """The response headers of an answer from the store."""
    return {} if hit is None else {"X-Semantic-Cache": f"hit; cosine={hit.cosine:.4f}"}
