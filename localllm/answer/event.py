"""What comes of an answer, whoever computes it: one stream of one kind of event."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from localllm.answer.request import AnswerRequest
from localllm.answer.tool_calls import ToolCall
from localllm.engine.request import Counts, FinishReason, Progress, Timings

_NO_COUNTS, _NO_TIMINGS = Counts(), Timings()


class PartKind(StrEnum):
    """What a piece of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer. tool_calls are set for PartKind.TOOL_CALLS alone, whose text is the source of the calls."""

    kind: PartKind
    text: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's bytes, the natural logarithm of its probability before any filter, and the likeliest tokens there."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()

    @property
    def text(self) -> str:
        """The token as text, with U+FFFD for what is not UTF-8."""
        return self.token.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What has come since the event before.

    counts and timings are the newest: a server elsewhere tells its counts last, and until then generated counts what
    has come. token_ids are known of an engine in this process alone. progress is set before the first token;
    finish_reason, and with it seed, stop_string and error (cause is the exception behind it), on the last event only.
    """

    parts: tuple[AnswerPart, ...] = ()
    counts: Counts = _NO_COUNTS
    timings: Timings = _NO_TIMINGS
    progress: Progress | None = None
    logprobs: tuple[Logprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    cause: Exception | None = None
    seed: int | None = None
    stop_string: str | None = None

    @property
    def content(self) -> str:
        """The text of the answer itself."""
        return self._text(PartKind.CONTENT)

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return self._text(PartKind.REASONING)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls."""
        return tuple(call for part in self.parts for call in part.tool_calls)

    def _text(self, kind: PartKind) -> str:
        return "".join([part.text for part in self.parts if part.kind is kind])


@dataclass(slots=True)
class Answer:
    """A whole answer: its events together. reasoning_tokens: those up to the end of its reasoning."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    last: AnswerEvent = field(default_factory=AnswerEvent)
    reasoning_tokens: int = 0

    def add(self, event: AnswerEvent) -> None:
        """Append an event."""
        reasoning = event.reasoning
        self.content += event.content
        self.reasoning += reasoning
        self.calls += event.calls
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.last = event
        if reasoning:
            self.reasoning_tokens = len(self.token_ids)


def merged(events: Sequence[AnswerEvent]) -> AnswerEvent:
    """Several events, at least one, as one; neighbouring parts of one kind are joined."""
    return replace(
        events[-1],
        parts=joined(part for event in events for part in event.parts),
        logprobs=tuple(logprob for event in events for logprob in event.logprobs),
        token_ids=tuple(token for event in events for token in event.token_ids),
    )


def joined(parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
    """The parts, neighbours of one kind as one; calls stay apart."""
    found: list[AnswerPart] = []
    for part in parts:
        if found and found[-1].kind == part.kind and part.kind is not PartKind.TOOL_CALLS:
            found[-1] = AnswerPart(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return tuple(found)


class AnswerStream(Protocol):
    """An answer under way. Read it from one place, in one of three ways; the last event has a finish_reason.

    accepted is done once the request was taken, and raises the refusal of a server elsewhere, which is then also the
    last event's error.
    """

    accepted: "Future[None]"

    def cancel(self) -> None:
        """Ask to stop, from any thread. The last event still comes."""

    def poll(self) -> list[AnswerEvent]:
        """What has come since the last call. Never waits."""

    def __iter__(self) -> Iterator[AnswerEvent]: ...

    def __aiter__(self) -> AsyncGenerator[AnswerEvent, None]: ...


class Prompt(Protocol):
    """A request as one model reads it. tokens and text are None where only a server elsewhere knows them."""

    @property
    def tokens(self) -> tuple[int, ...] | None: ...

    @property
    def text(self) -> str | None: ...

    @property
    def images(self) -> int:
        """How many images it holds."""

    def submit(self, choice: int = 0) -> AnswerStream:
        """Begin to answer; choice is added to the seed, so that several answers differ.

        Raises RequestError, ContextOverflowError, QueueFullError, TemplateError, EngineStoppedError.
        """


class AnsweringModel(Protocol):
    """A model that answers. Thread-safe; its methods may block."""

    @property
    def most_choices(self) -> int:
        """Answers that may be asked for at once."""

    def prepare(self, request: AnswerRequest) -> Prompt:
        """Render, tokenise, compile what constrains the answer. Raises RequestError, TemplateError, PictureError."""


def function_object(call: ToolCall) -> Mapping[str, Any]:
    """A call as conversations hold it."""
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
