"""A model's events as pieces of an answer: content, reasoning, tool calls. A whole answer is a fold over them."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from localllm.engine.answer_parts import AnswerPart, PartKind
from localllm.engine.request import FinishReason, Progress, TokenEvent, TokenLogprob
from localllm.engine.stream import GenerationStream
from localllm.engine.tool_calls import ToolCall
from localllm.errors import LocalLLMError
from localllm.server.errors import ApiError
from localllm.server.front.stream import PartsEvent


class Splitter(Protocol):
    """Tells the parts of one answer apart, as localllm.engine.answer_parts.AnswerSplitter does."""

    def push(self, text: str) -> list[AnswerPart]: ...

    def flush(self) -> list[AnswerPart]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What came since the piece before. last is set on the final piece alone, which may hold text too."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    progress: Progress | None = None
    last: TokenEvent | None = None

    @property
    def says_something(self) -> bool:
        """Whether there is anything to show before the end."""
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


@dataclass(slots=True)
class Answer:
    """All pieces of an answer together. reasoning_tokens: those up to the end of its reasoning."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: TokenEvent = field(default_factory=TokenEvent)
    reasoning_tokens: int = 0

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.content += piece.content
        self.reasoning += piece.reasoning
        self.calls += piece.calls
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.last = piece.last or self.last
        if piece.reasoning:
            self.reasoning_tokens = len(self.token_ids)


class AnswerReader:
    """Turns one generation's events into pieces. Without a splitter all text is content."""

    def __init__(self, splitter: Splitter | None = None) -> None:
        self._splitter = splitter

    def push(self, event: TokenEvent) -> Piece:
        """The piece that an event stands for.

        Raises what a generation failed with, where that is known, and else ApiError, as where it was stopped by us.
        """
        if event.finish_reason is FinishReason.ERROR:
            if isinstance(event.cause, LocalLLMError):
                raise event.cause
            status = 502 if isinstance(event, PartsEvent) else 500
            raise ApiError(status, event.error or "the engine stopped without a reason")
        if event.finish_reason is FinishReason.CANCELLED:
            raise ApiError(503, "the generation was cancelled because the model or the server stops")
        last = event if event.finish_reason else None
        if isinstance(event, PartsEvent):
            return self._piece(event, list(event.parts))
        if self._splitter is None:
            return Piece(event.text, "", (), event.token_ids, event.logprobs, event.progress, last)
        parts = self._splitter.push(event.text)
        if last:
            parts += self._splitter.flush()
        return self._piece(event, parts)

    def _piece(self, event: TokenEvent, parts: list[AnswerPart]) -> Piece:
        return Piece(
            content="".join(part.text for part in parts if part.kind is PartKind.CONTENT),
            reasoning="".join(part.text for part in parts if part.kind is PartKind.REASONING),
            calls=tuple(call for part in parts for call in part.tool_calls),
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            progress=event.progress,
            last=event if event.finish_reason else None,
        )


async def pieces(stream: GenerationStream, reader: AnswerReader) -> AsyncGenerator[Piece, None]:
    """Read a stream to its end."""
    async for event in stream:
        yield reader.push(event)


async def collect(stream: GenerationStream, reader: AnswerReader) -> Answer:
    """Read a stream to its end and return the whole answer."""
    answer = Answer()
    async for piece in pieces(stream, reader):
        answer.add(piece)
    return answer
