"""A conversation as a file for other programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from tui.sessions.records import Message, Role


def as_markdown(title: str, messages: Sequence[Message]) -> str:
    """The conversation to read: reasoning folded, attached files in fences that their text cannot close."""
    parts = [f"# {title}\n"]
    for message in messages:
        parts.append("## You\n" if message.role is Role.USER else f"## {message.model or 'Assistant'}\n")
        for file in message.attachments:
            if file.picture:
                parts.append(f"*Picture: {file.name}*\n")
                continue
            fence = "`" * max(3, _longest_run(file.text) + 1)
            parts.append(f"{file.name}:\n\n{fence}\n{file.text}\n{fence}\n")
        if message.reasoning:
            parts.append(f"<details><summary>Thinking</summary>\n\n{message.reasoning.strip()}\n\n</details>\n")
        parts.append(f"{message.content.strip()}\n")
        for call in message.calls:
            parts.append(f"```json\n{json.dumps(asdict(call), ensure_ascii=False)}\n```\n")
    return "\n".join(parts)


def as_json(title: str, messages: Sequence[Message]) -> str:
    """Everything that is stored of the shown path."""
    return json.dumps(
        {"title": title, "messages": [asdict(message) for message in messages]}, ensure_ascii=False, indent=2
    )


def _longest_run(text: str) -> int:
    """Length of the longest run of backticks."""
    longest = run = 0
    for letter in text:
        run = run + 1 if letter == "`" else 0
        longest = max(longest, run)
    return longest
