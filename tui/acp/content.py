"""Translates between the protocol's content and the chat's: prompts, tool calls, MCP servers."""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from acp import (
    schema,
    text_block,
    tool_content,
    tool_diff_content,
    update_agent_message_text,
    update_agent_thought_text,
    update_user_message_text,
)

from gguf_io.system import file_of_url
from localllm.actions.action import Action
from localllm.actions.folder import Folder
from localllm.answer.tool_calls import ToolCall
from localllm.chats import Attachment, Message, Role
from localllm.chats.attaching import attachments_of, medium_of
from localllm.errors import RequestError
from localllm.text import shortened
from tui.attachments import attachments_at, counted
from tui.backend import Backend

KINDS: Mapping[str, schema.ToolKind] = {
    "read_file": "read",
    "list_files": "search",
    "search_files": "search",
    "edit_file": "edit",
    "run_command": "execute",
}

Blocks = Sequence[
    schema.TextContentBlock
    | schema.ImageContentBlock
    | schema.AudioContentBlock
    | schema.ResourceContentBlock
    | schema.EmbeddedResourceContentBlock
]
Servers = Sequence[schema.HttpMcpServer | schema.SseMcpServer | schema.AcpMcpServer | schema.McpServerStdio]
Content = list[schema.ContentToolCallContent | schema.FileEditToolCallContent | schema.TerminalToolCallContent]


def read_prompt(blocks: Blocks, folder: Folder, backend: Backend) -> tuple[str, tuple[Attachment, ...]]:
    """A prompt's text and attachments. Files are mentioned in the text where they stand, as in the chat: @NAME.

    Raises RequestError for what the model cannot be given.
    """
    texts: list[str] = []
    files: dict[str, tuple[Attachment, ...]] = {}
    for block in blocks:
        match block:
            case schema.TextContentBlock():
                texts.append(block.text)
                continue
            case schema.ImageContentBlock():
                name = _resource(block.uri, folder)[0] if block.uri else f"picture-{len(files) + 1}"
                files[name] = (medium_of(name, _decoded(name, block.data)),)
            case schema.AudioContentBlock():
                name = f"sound-{len(files) + 1}"
                files[name] = (medium_of(name, _decoded(name, block.data)),)
            case schema.ResourceContentBlock():
                name, path = _resource(block.uri, folder)
                if path is not None and (text := folder.files.unsaved(path)) is not None:
                    files[name] = (Attachment(name, text),)
                elif path is not None and os.path.isfile(path):
                    files[name] = attachments_at(name, path)
            case schema.EmbeddedResourceContentBlock(resource=schema.TextResourceContents() as resource):
                name, _ = _resource(resource.uri, folder)
                files[name] = (Attachment(name, resource.text),)
            case schema.EmbeddedResourceContentBlock():
                name, _ = _resource(block.resource.uri, folder)
                files[name] = attachments_of(name, _decoded(name, block.resource.blob))
        texts.append(f'@"{name}"' if " " in name else f"@{name}")
    text = "".join(texts).strip()
    if not text:
        raise RequestError("The prompt is empty.")
    weighed = (counted(each, backend.count_tokens, backend.see_picture) for each in files.values())
    return text, tuple(chain.from_iterable(weighed))


def servers_of(given: Servers) -> dict[str, dict[str, Any]]:
    """The client's MCP servers in the format of mcp.json. Raises RequestError for other transports."""
    found: dict[str, dict[str, Any]] = {}
    for server in given:
        match server:
            case schema.McpServerStdio():
                env = {one.name: one.value for one in server.env}
                found[server.name] = {"command": server.command, "args": server.args, **({"env": env} if env else {})}
            case schema.HttpMcpServer():
                headers = {one.name: one.value for one in server.headers}
                found[server.name] = {"url": server.url, "headers": headers}
            case _:
                raise RequestError(f"MCP server {server.name}: only the transports stdio and http are supported.")
    return found


def title(call: ToolCall) -> str:
    """A call in one line: the tool and its first text argument."""
    subject = next((str(value) for value in call.arguments.values() if isinstance(value, str)), "")
    return " ".join(f"{call.name} {subject}".split())[:120]


def start_of(identity: str, call: ToolCall, folder: Folder) -> schema.ToolCallStart:
    """A call before it is checked."""
    path = call.arguments.get("path")
    here = isinstance(path, str) and call.name in KINDS and "\0" not in path
    return schema.ToolCallStart(
        session_update="tool_call",
        tool_call_id=identity,
        title=title(call),
        kind=KINDS.get(call.name, "other"),
        status="pending",
        locations=[schema.ToolCallLocation(path=os.path.normpath(folder.root / str(path)))] if here else None,
        raw_input=call.arguments,
    )


def preview_of(action: Action) -> Content:
    """What an action would do, for the user: a file's old and new text, or the action's preview."""
    change = action.change
    if change is None:
        return [tool_content(text_block(action.preview))]
    before, after = (
        None if data is None else data.decode("utf-8", "replace") for data in (change.before, change.after)
    )
    return [tool_diff_content(str(change.path), after or "", before)]


def end_of(identity: str, message: Message, shows_text: bool = True) -> schema.ToolCallProgress:
    """A call's result. shows_text: False keeps the content that was shown before."""
    return schema.ToolCallProgress(
        session_update="tool_call_update",
        tool_call_id=identity,
        status="failed" if message.is_failure else "completed",
        content=[tool_content(text_block(message.content))] if shows_text else None,
    )


def replayed(
    messages: Sequence[Message], folder: Folder
) -> list[
    schema.UserMessageChunk
    | schema.AgentMessageChunk
    | schema.AgentThoughtChunk
    | schema.ToolCallStart
    | schema.ToolCallProgress
]:
    """The updates that show a stored conversation."""
    updates: list[Any] = []
    for place, message in enumerate(messages):
        if message.role is Role.TOOL:
            updates += [start_of(call_id(place), message.calls[0], folder), end_of(call_id(place), message)]
        elif message.role is Role.USER:
            updates.append(update_user_message_text(message.content))
        else:
            updates += [update_agent_thought_text(message.reasoning)] if message.reasoning else []
            updates += [update_agent_message_text(message.content)] if message.content else []
    return updates


def call_id(place: int) -> str:
    """A call's name in the protocol. place: its result's place in the conversation."""
    return f"call-{place}"


def _resource(uri: str, folder: Folder) -> tuple[str, Path | None]:
    """A resource's name for the model, and its path if it is a file. Raises RequestError for a malformed URI.

    A file's name is its path, relative to the folder if it is in it, with the lines that are meant.
    """
    try:
        parts = urlsplit(uri)
        if parts.scheme != "file":
            return uri, None
        path = Path(file_of_url(uri))
        real = Path(os.path.realpath(path))
    except ValueError as error:  # also for a path with a null byte
        raise RequestError(
            f"{shortened(uri)!r} is not a valid URI: {error}. Send one such as file:///notes/plan.txt."
        ) from error
    name = folder.name(real) if folder.root in real.parents else str(path)
    return (f"{name}#{parts.fragment}" if parts.fragment else name), path


def _decoded(name: str, data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise RequestError(f"{name}: is not base64.") from error
