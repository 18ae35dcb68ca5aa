"""What a stored conversation is made of."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from localllm.engine.tool_calls import ToolCall


class Role(StrEnum):
    """Who wrote a message."""

    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that went with a message. tokens is None where the model's tokenizer could not be asked."""

    name: str
    text: str
    tokens: int | None = None


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

    def for_model(self) -> str:
        """The content with the attached files before it."""
        files = [f"File {file.name}:\n```\n{file.text}\n```\n" for file in self.attachments]
        return "\n".join([*files, self.content])


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
