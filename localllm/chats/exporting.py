"""Chats as files: Markdown of what is shown, or JSON of everything, which can be imported."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from localllm.chats.conversation import Conversation
from localllm.chats.importing import exported
from localllm.chats.records import Message, Role
from localllm.quoting.excerpt import fenced


def export(conversation: Conversation, as_json: bool) -> str:
    """A stored conversation as text."""
    if as_json:
        session, shown = conversation.session_id, conversation.messages
        assert session is not None
        store = conversation.store
        return exported(store.summary(session), store.all_messages(session), shown[-1].id if shown else None)
    checked = [replace(message, content=conversation.checked(message)) for message in conversation.messages]
    return as_markdown(conversation.title, checked)


def file_name(title: str, ending: str) -> str:
    """A name for the file of a chat with this title."""
    name = "".join(letter if letter.isalnum() else "-" for letter in title).strip("-").lower()
    return (name or "chat") + ending


def as_markdown(title: str, messages: Sequence[Message]) -> str:
    """The conversation as Markdown: reasoning folded, attached files in fences that their text cannot close."""
    parts = [f"# {title}\n"]
    for message in messages:
        if message.role is Role.TOOL:
            parts.append(f"### {message.calls[0].name}\n\n{fenced(message.content)}")
            continue
        parts.append("## You\n" if message.role is Role.USER else f"## {message.model or 'Assistant'}\n")
        for file in message.attachments:
            if file.picture:
                parts.append(f"*Picture: {file.label}*\n")
                continue
            parts.append(f"{file.label}:\n\n{fenced(file.text)}")
        if message.reasoning:
            parts.append(f"<details><summary>Thinking</summary>\n\n{message.reasoning.strip()}\n\n</details>\n")
        parts.append(f"{message.content.strip()}\n")
        for call in message.calls:
            parts.append(f"```json\n{json.dumps(asdict(call), ensure_ascii=False)}\n```\n")
    return "\n".join(parts)
