"""Bodies of the routes for chats."""

from typing import Annotated, Literal

from pydantic import Field

from localllm.actions.approvals import Decision
from localllm.chats.parameters import NAMES
from localllm.server.bodies import Body
from localllm.server.limits import MAX_BODY_BYTES, MAX_FILES, MAX_INT, MAX_NAME_CHARS

MAX_REASON_CHARS = 4000

Identity = Annotated[int, Field(ge=0, le=2**63 - 1)]
Text = Annotated[str, Field(max_length=MAX_BODY_BYTES)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]


class FileBody(Body):
    """A file to attach: its text, or its bytes as base64 (text, PDF, DOCX, a picture or a WAV)."""

    name: Name
    text: Text | None = None
    data: Text | None = None


class AskBody(Body):
    """A prompt. kept: which attachments of the edited message stay, counted from 0."""

    content: Text = ""
    files: Annotated[list[FileBody], Field(default_factory=list, max_length=MAX_FILES)]
    edits: Identity | None = None
    kept: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(default_factory=list, max_length=MAX_FILES)]


class BeginBody(AskBody):
    """The first prompt of a chat. parameters: those that differ from the model's defaults, as text."""

    model: Name
    parameters: Annotated[dict[Name, Text], Field(default_factory=dict, max_length=len(NAMES))]


class ChangeBody(Body):
    """What to change of a chat. parameters: by name, as text; "default" restores the default. tags: all of them."""

    title: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    model: Name | None = None
    parameters: Annotated[dict[Name, Text], Field(default_factory=dict, max_length=len(NAMES))]
    tags: Annotated[list[Name], Field(max_length=32)] | None = None
    deleted: bool | None = None


class AnswerBody(Body):
    """An answer to write again, or to continue; None means the last one."""

    message: Identity | None = None
    continues: bool = False


class PlaceBody(Body):
    """A message of the chat."""

    message: Identity


class DecisionBody(Body):
    """The user's decision about the call that waits for it. reason: of a refusal, for the model.

    preview: what was shown, so that nothing else is allowed.
    """

    decision: Decision
    preview: Text
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARS)] = ""


class UndoBody(Body):
    """seen: the diff that the user has agreed to, of a change that another chat has made."""

    seen: Text = ""


class TurnBody(PlaceBody):
    """The variant of a message to show: the next (1) or the previous one (-1)."""

    step: Literal[-1, 1]


class ImportBody(Body):
    """A file of exported chats, as base64. stores: whether to import them, not only to tell what is in it."""

    name: Name = "the file"
    data: Text
    stores: bool = False


class SaveBody(Body):
    """What to save under a name: a prompt's text, or a persona's parameters and model."""

    text: Text = ""
    parameters: Annotated[dict[Name, Text], Field(default_factory=dict, max_length=len(NAMES))]
    model: Name = ""


class RenderBody(Body):
    """A text in Markdown."""

    text: Text
