"""The events of an answer, and the interface of models that answer."""

import json
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from localllm.answer.request import AnswerRequest
from localllm.answer.tool_calls.call import CallDelta, ToolCall
from localllm.engine.request import Counts, FinishReason, Progress, Timings

if TYPE_CHECKING:
    from gguf_io.media import View

_NO_COUNTS, _NO_TIMINGS = Counts(), Timings()


class PartKind(StrEnum):
    """The kind of a part of an answer."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALLS = "tool_calls"


# Parts and events are not frozen because making a frozen one takes four times as long. Nobody changes them.


@dataclass(slots=True, unsafe_hash=True)
class AnswerPart:
    """A part of an answer.

    For PartKind.TOOL_CALLS, text is the calls' source as the model wrote it; deltas are the new pieces of calls, and
    tool_calls the calls that they complete. unfinished: on the last part, the source of a call that was cut off.
    """

    kind: PartKind
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    deltas: tuple[CallDelta, ...] = ()
    unfinished: str = ""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's bytes, its log-probability before any sampling filter, and the likeliest tokens at its position.

    ids: of the token and of the likeliest ones; none from a remote server.
    """

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The token as text, with U+FFFD for invalid UTF-8."""
        return self.token.decode("utf-8", "replace")


@dataclass(slots=True, unsafe_hash=True)
class AnswerEvent:
    """What was added to an answer since the previous event."""

    parts: tuple[AnswerPart, ...] = ()
    # Of the whole answer. A remote server sends its own with the last event; until then they are estimates.
    counts: Counts = _NO_COUNTS
    timings: Timings = _NO_TIMINGS
    progress: Progress | None = None  # only before the first token
    logprobs: tuple[Logprob, ...] = ()
    token_ids: tuple[int, ...] = ()  # empty for a remote server
    # These are on the last event only.
    finish_reason: FinishReason | None = None
    error: str | None = None
    cause: Exception | None = None  # the error's
    seed: int | None = None
    stop_string: str | None = None
    # What the model saw of each picture and heard of each sound; none from a remote server.
    pictures: "tuple[View, ...]" = ()
    # Text in pictures that was too small, and how the answer violates its schemas, added by the server (schema_check).
    warnings: tuple[str, ...] = ()
    # Of the prompt's tokens after the first, on the first event after the prompt; None if not requested.
    prompt_logprobs: tuple[Logprob, ...] | None = None

    @property
    def content(self) -> str:
        """The text of the answer itself, with the source of a call that was cut off."""
        return self.text(PartKind.CONTENT) + "".join([part.unfinished for part in self.parts])

    @property
    def only_content(self) -> str | None:
        """The text of the answer if the event, before the last, has nothing else that was added."""
        if len(self.parts) != 1 or self.logprobs or self.finish_reason or self.prompt_logprobs is not None:
            return None
        (part,) = self.parts
        return part.text or None if part.kind is PartKind.CONTENT and not part.unfinished else None

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return self.text(PartKind.REASONING)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls."""
        return tuple(call for part in self.parts for call in part.tool_calls)

    @property
    def is_cut_call(self) -> bool:
        """Whether the answer ended within a tool call."""
        return any(part.unfinished for part in self.parts)

    def text(self, kind: PartKind) -> str:
        """The text of all parts of a kind."""
        return "".join([part.text for part in self.parts if part.kind is kind])


class _ContentLogprobs:
    """Finds the log-probabilities of an answer's content: of the tokens that have some of its text.

    Parts come in the order of their tokens, and between them tokens have markup and white space.
    """

    def __init__(self) -> None:
        self.found: list[Logprob] = []
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._text = ""  # of the tokens that follow
        self._waiting: list[tuple[int, Logprob | None]] = []  # with their number of characters; None: was found before

    def add(self, logprobs: Sequence[Logprob], parts: Sequence[AnswerPart]) -> None:
        for logprob in logprobs:
            piece = self._decoder.decode(logprob.token)
            self._text += piece
            self._waiting.append((len(piece), logprob))
        for number, part in enumerate(parts, start=1) if self._waiting else ():
            # Behind the last part is only what is held; before the others is only markup.
            find = self._text.rfind if number == len(parts) else self._text.find
            for text in (part.text, part.text.strip()):  # white space may come from the splitter
                if text and (at := find(text)) >= 0:
                    self._take(at, at + len(text), part.kind is PartKind.CONTENT)
                    break

    def _take(self, begin: int, end: int, is_content: bool) -> None:
        """Take the text up to `end`, which is content from `begin` on, or is none."""
        at = 0
        while self._waiting and at < end:
            size, logprob = self._waiting[0]
            if is_content and logprob is not None and at + max(size, 1) > begin:
                self.found.append(logprob)
                logprob = None
            if at + size > end:  # the token goes on in the next part
                self._waiting[0] = (at + size - end, logprob)
                break
            at += size
            del self._waiting[0]
        self._text = self._text[end:]


@dataclass(slots=True)
class Answer:
    """An answer so far, accumulated from its events. reasoning_tokens: tokens up to the end of the reasoning."""

    texts: dict[PartKind, list[str]] = field(default_factory=lambda: {kind: [] for kind in PartKind})
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    last: AnswerEvent = field(default_factory=AnswerEvent)
    prompt_logprobs: Sequence[Logprob] | None = None
    reasoning_tokens: int = 0
    _content_logprobs: _ContentLogprobs = field(default_factory=_ContentLogprobs)

    @property
    def content_logprobs(self) -> list[Logprob]:
        """The log-probabilities without those of reasoning, calls and markup."""
        return self._content_logprobs.found

    @property
    def content(self) -> str:
        """The text of the answer itself, with the source of a call that was cut off."""
        return "".join(self.texts[PartKind.CONTENT])

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join(self.texts[PartKind.REASONING])

    def add(self, event: AnswerEvent) -> None:
        """Append an event."""
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self._content_logprobs.add(event.logprobs, event.parts)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.last = event
        for part in event.parts:
            self.texts[part.kind].append(part.text)
            self.texts[PartKind.CONTENT].append(part.unfinished)
            self.calls += part.tool_calls
            if part.kind is PartKind.REASONING:
                self.reasoning_tokens = len(self.token_ids)


def called(calls: Sequence[ToolCall], source: str = "") -> AnswerPart:
    """A part with calls that arrived complete."""
    deltas = tuple(CallDelta(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls)
    return AnswerPart(PartKind.TOOL_CALLS, source, tuple(calls), deltas)


def merged(events: Sequence[AnswerEvent]) -> AnswerEvent:
    """One event for one or more; adjacent parts of the same kind are joined, except tool calls."""
    parts: list[AnswerPart] = []
    for part in (part for event in events for part in event.parts):
        if parts and parts[-1].kind == part.kind and part.kind is not PartKind.TOOL_CALLS:
            parts[-1] = AnswerPart(part.kind, parts[-1].text + part.text)
        else:
            parts.append(part)
    return replace(
        events[-1],
        parts=tuple(parts),
        logprobs=tuple(logprob for event in events for logprob in event.logprobs),
        token_ids=tuple(token for event in events for token in event.token_ids),
    )


class AnswerStream(Protocol):
    """An answer in progress. One reader reads it in one of three ways; the last event has a finish_reason.

    accepted: done when the model has accepted the request. It raises a remote server's refusal, which is also the last
    event's error.
    """

    accepted: "Future[None]"

    def cancel(self) -> None:
        """Stop, from any thread. The last event still follows."""

    def poll(self) -> list[AnswerEvent]:
        """The events since the last call. Never blocks."""

    def __iter__(self) -> Iterator[AnswerEvent]: ...

    def __aiter__(self) -> AsyncGenerator[AnswerEvent, None]: ...


class Prompt(Protocol):
    """A request prepared for a model. tokens and text are None for a remote server."""

    @property
    def tokens(self) -> tuple[int, ...] | None: ...

    @property
    def text(self) -> str | None: ...

    @property
    def pictures(self) -> "Sequence[View]":
        """What the model sees of each picture; none for a remote server, which does not tell."""

    def submit(self, choice: int = 0) -> AnswerStream:
        """Start an answer. choice is added to the seed, so that several answers differ.

        Raises RequestError, ContextOverflowError, QueueFullError, TemplateError, EngineStoppedError.
        """


class AnsweringModel(Protocol):
    """A model that answers. Thread-safe; its methods may block."""

    @property
    def most_choices(self) -> int:
        """The most answers to a request."""

    def prepare(self, request: AnswerRequest) -> Prompt:
        """Render, tokenise, compile constraints. Raises RequestError, TemplateError, PictureError, RemoteError."""


def function_object(call: ToolCall) -> Mapping[str, Any]:
    """A tool call as in a conversation's messages."""
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
