"""What a stored conversation is made of."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from localllm.answer.tool_calls import ToolCall
from localllm.documents.excerpt import Excerpt, as_file


class Role(StrEnum):
    """Who wrote a message."""

    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that went with a message. tokens is None where the model could not be asked.

    picture is a PNG or JPEG as base64, "" for a text. line: the first one's number where it is an excerpt of a
    document, else 0; page: of a PDF.
    """

    name: str
    text: str
    tokens: int | None = None
    picture: str = ""
    line: int = 0
    page: int = 0

    @property
    def label(self) -> str:
        """The name, with the place of an excerpt."""
        return self.as_excerpt().label if self.line else self.name

    def picture_data(self) -> bytes:
        """The picture's file; empty for a text."""
        return base64.b64decode(self.picture)

    def as_excerpt(self) -> Excerpt:
        """The text as something to quote."""
        return Excerpt(self.name, self.text, self.line or 1, self.page)

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> Self:
        """Read what was stored. Raises ValueError, TypeError or KeyError for what is damaged."""
        attachment = cls(**values)
        for value, kind in (
            (attachment.name, str),
            (attachment.text, str),
            (attachment.tokens, int | None),
            (attachment.line, int),
            (attachment.page, int),
        ):
            _check(value, kind)
        base64.b64decode(attachment.picture, validate=True)
        return attachment


@dataclass(slots=True)
class Message:
    """One node of a conversation's tree: messages with one parent are variants of each other.

    stats are an answer's figures as `tui.answering` notes them: counts, timings and speed. calls are the tools that it
    asks for. A tool's message has the one call whose result it is. summary: what the model is given in place of this
    message and all before it; "" for nothing.
    """

    id: int
    session_id: int
    parent_id: int | None
    role: Role
    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    error: str | None = None
    model: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    attachments: tuple[Attachment, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    created: float = 0.0
    summary: str = ""

    def check(self) -> None:
        """Raise TypeError where a field that was stored is of another type."""
        for text in (self.content, self.reasoning, self.model, self.summary):
            _check(text, str)
        for end in (self.finish_reason, self.error):
            _check(end, str | None)
        for name, value in self.stats.items():
            _check(value, list if name == "unseen" else int | float | None)
        for call in self.calls:
            _check(call.name, str)
            _check(call.arguments, dict)

    def for_model(self, sees: bool = True) -> str:
        """The content with the attached texts before it; a model that sees no pictures is told which there were."""
        files = [as_file(file.label, file.text) for file in self.attachments if not file.picture]
        unseen = [] if sees else [f"Picture {name}: it cannot be shown to you.\n" for name in self.picture_names]
        return "\n".join([*files, *unseen, self.content])

    @property
    def picture_names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.attachments if file.picture)

    def pictures(self) -> tuple[bytes, ...]:
        return tuple(file.picture_data() for file in self.attachments if file.picture)


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session as a list shows it, which leaves parameters out. updated is seconds since the epoch.

    found: the first message that has what was searched for, "" where the title alone has it. tags: in order.
    """

    id: int
    title: str
    model: str
    updated: float
    messages: int
    titled: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    found: str = ""
    tags: tuple[str, ...] = ()
    deleted: bool = False


def _check(value: object, kind: Any) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in place of {getattr(kind, '__name__', kind)}")
