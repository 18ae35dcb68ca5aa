"""What a stored conversation is made of."""

import base64
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from localllm.answer.tool_calls import ToolCall


class Role(StrEnum):
    """Who wrote a message."""

    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that went with a message. tokens is None where the model could not be asked.

    picture is a PNG or JPEG as base64, "" for a text.
    """

    name: str
    text: str
    tokens: int | None = None
    picture: str = ""


@dataclass(slots=True)
class Message:
    """One node of a conversation's tree: messages with one parent are variants of each other.

    stats are an answer's figures as `tui.answering` notes them: counts, timings and speed. calls are the tools that it
    asks for.
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

    def for_model(self, sees: bool = True) -> str:
        """The content with the attached texts before it; a model that sees no pictures is told which there were."""
        files = [f"File {file.name}:\n```\n{file.text}\n```\n" for file in self.attachments if not file.picture]
        unseen = [] if sees else [f"Picture {name}: it cannot be shown to you.\n" for name in self.picture_names]
        return "\n".join([*files, *unseen, self.content])

    @property
    def picture_names(self) -> tuple[str, ...]:
        """The names of the attached pictures."""
        return tuple(file.name for file in self.attachments if file.picture)

    def pictures(self) -> tuple[bytes, ...]:
        """The attached pictures' files."""
        return tuple(base64.b64decode(file.picture) for file in self.attachments if file.picture)


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session as a list shows it. updated is seconds since the epoch."""

    id: int
    title: str
    model: str
    updated: float
    messages: int
    parameters: dict[str, Any] = field(default_factory=dict)
    titled: bool = False
