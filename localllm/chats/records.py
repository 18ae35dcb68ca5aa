"""The records of a stored conversation."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self, get_type_hints

from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.tool_calls import ToolCall
from localllm.extraction import Content
from localllm.quoting.excerpt import Excerpt, as_file

# The name of a pasted text says what was pasted; the digest tells texts of the same size apart.
OUTPUT = "output"  # the attachment of a message with a command of the user's
PASTED = re.compile(r"pasted-(\d+)-(lines|characters)-[0-9a-f]{6}")


class Role(StrEnum):
    """Who wrote a message."""

    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file attached to a message. tokens: None if the count is unknown.

    picture: an image file as base64, "" for a text. line: the number of the first line if this is an excerpt of a
    document, else 0. page: the PDF page of an excerpt or a picture.
    """

    name: str
    text: str
    tokens: int | None = None
    picture: str = ""
    line: int = 0
    page: int = 0

    @property
    def label(self) -> str:
        """The name; for an excerpt, with its place in the document; "pasted 5,000 lines" for a pasted text."""
        if found := PASTED.fullmatch(self.name):
            return f"pasted {int(found[1]):,} {found[2]}"
        if self.picture and self.page:
            return f"{self.name}, page {self.page}"
        return self.as_excerpt().label if self.line else self.name

    def picture_data(self) -> bytes:
        """The picture file's bytes; empty for a text."""
        return base64.b64decode(self.picture)

    def as_excerpt(self) -> Excerpt:
        """The text as an excerpt that answers can quote."""
        return Excerpt(self.name, self.text, self.line or 1, self.page)

    @classmethod
    def of_file(cls, name: str, content: Content) -> tuple[Self, ...]:
        """A file's text, and the pages of a PDF that are pictures; their tokens are not counted."""
        pages = (cls(name, "", picture=base64.b64encode(one.data).decode(), page=one.page) for one in content.pages)
        return (*([cls(name, content.text)] if content.text or not content.pages else []), *pages)

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> Self:
        """Read a stored attachment. Raises ValueError, TypeError or KeyError if it is damaged."""
        attachment = cls(**values)
        for field_name, kind in get_type_hints(cls).items():
            _check(getattr(attachment, field_name), kind)
        base64.b64decode(attachment.picture, validate=True)
        return attachment


@dataclass(slots=True)
class Message:
    """One node of a conversation's tree: messages with the same parent are variants of each other.

    stats: an answer's counts, timings and speed, as recorded by `localllm.chats.ending`. calls: the tool calls of an
    answer; a tool's message has the one call whose result it is. summary: sent to the model in place of this message
    and all before it; "" for none.
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

    def add(self, part: AnswerPart) -> str:
        """Append a part of an answer; returns what it adds to the content."""
        self.calls += part.tool_calls
        if part.kind is PartKind.REASONING:
            self.reasoning += part.text
            return ""
        said = part.unfinished if part.kind is PartKind.TOOL_CALLS else part.text
        text = said if self.content else said.lstrip("\n")
        self.content += text
        return text

    @property
    def is_failure(self) -> bool:
        """Whether a tool's result says that the call failed or did not run."""
        return self.content.startswith("Error: ")

    def check(self) -> None:
        """Raise TypeError if a stored field has the wrong type."""
        for text in (self.content, self.reasoning, self.model, self.summary):
            _check(text, str)
        for end in (self.finish_reason, self.error):
            _check(end, str | None)
        for name, value in self.stats.items():
            _check(value, list if name in ("unseen", "pictures") else int | float | None)
        for call in self.calls:
            _check(call.name, str)
            _check(call.arguments, dict)

    def for_model(self, sees: bool = True) -> str:
        """The content, preceded by the attached texts; if sees is False, also by the names of the pictures."""
        files = [
            as_file(file.label if file.line else file.name, file.text) for file in self.attachments if not file.picture
        ]
        unseen = [] if sees else [f"Picture {name}: it cannot be shown to you.\n" for name in self.picture_names]
        return "\n".join([*files, *unseen, self.content])

    @property
    def picture_names(self) -> tuple[str, ...]:
        return tuple(file.label for file in self.attachments if file.picture)

    def pictures(self) -> tuple[bytes, ...]:
        return tuple(file.picture_data() for file in self.attachments if file.picture)


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session as shown in a list. parameters: empty in lists. updated: seconds since the epoch.

    found: the first message that matches the search, "" if only the title matches. tags: sorted.
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
