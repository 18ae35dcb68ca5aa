"""Tools that a conversation gets or loses after its beginning.

A prompt begins with its list of tools, so another list would change everything after it, and nothing computed before
could be reused. The list therefore stays as the conversation began with it, and a change is written where the
conversation came to it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.answer.request import Message

Tool = Mapping[str, Any]

MOST_KEPT = 128  # requests whose tools a model remembers


def name_of(tool: Tool) -> str:
    """The name of a tool in OpenAI's format."""
    return str(tool["function"]["name"])


def ordered(tool: Tool) -> dict[str, Any]:
    """A tool with its keys in OpenAI's order: the prompt must not depend on the key order of the client's JSON."""
    function = tool["function"]
    known = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    others = {key: value for key, value in function.items() if key != "strict"}
    return {"type": "function", "function": {**known, **others}}


def definitions(tools: Sequence[Tool]) -> str:
    """Later tools as the model reads them."""
    said = "This tool can be called now:" if len(tools) == 1 else "These tools can be called now:"
    return "\n".join([said, *(json.dumps(ordered(tool), ensure_ascii=False) for tool in tools)])


def withdrawn(names: Sequence[str]) -> str:
    """What the model reads of tools that are gone."""
    return f"No longer to be called: {', '.join(names)}."


@dataclass(frozen=True, slots=True)
class ToolHistory:
    """The tools of a conversation so far.

    listed: those in the prompt's list, with which it began. changes: what the model is told later, each with the index
    of its message. offered: those that may be called now, by name.
    """

    listed: Sequence[Tool]
    offered: Mapping[str, Tool]
    changes: tuple[tuple[int, str], ...] = ()

    def differences(self, tools: Mapping[str, Tool]) -> int:
        """How many tools would be added, changed or withdrawn for these to be offered."""
        names = self.offered.keys() | tools.keys()
        return sum(self.offered.get(name) != tools.get(name) for name in names)

    def with_tools(self, tools: Mapping[str, Tool], at: int) -> "ToolHistory":
        """The history with other tools from the message at this index on."""
        if tools == self.offered:
            return self
        added = [tool for name, tool in tools.items() if tool != self.offered.get(name)]
        lost = [name for name in self.offered if name not in tools]
        told = [definitions(added)] if added else []
        told += [withdrawn(lost)] if lost else []
        return replace(self, offered=tools, changes=(*self.changes, (at, "\n".join(told))))

    def told(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the changes: behind a tool's result, or as a system message before another message."""
        found: list[Message] = []
        changes = dict(self.changes)
        for at, message in enumerate(messages):
            if at in changes and message["role"] == "tool":
                found.append({**message, "content": _joined(message.get("content"), changes[at])})
                continue
            if at in changes:
                found.append({"role": "system", "content": changes[at]})
            found.append(message)
        return found


Known = dict[tuple[str, str], ToolHistory]
"""Histories by the messages of a request (see _keys) and the tools that it offered, the last requests' at the end."""


def history_of(known: Known, messages: Sequence[Message], tools: Sequence[Tool], owner: str) -> ToolHistory:
    """The history of a conversation's tools, from the longest earlier request that it continues; also kept in `known`.

    A request continues another one if it has its messages, followed by an assistant's. Of several with the same
    messages it continues the one whose tools differ least from its own. owner: whose requests count. Requests on
    several threads may share `known`.
    """
    keys = _keys(messages, owner)
    offered = {name_of(tool): ordered(tool) for tool in tools}
    earlier: dict[str, list[ToolHistory]] = {}
    for (key, _), history in list(known.items()):
        earlier.setdefault(key, []).append(history)
    found = ToolHistory(list(offered.values()), offered)
    for count in range(len(messages) - 1, 0, -1):
        if messages[count]["role"] == "assistant" and (same := earlier.get(keys[count])):
            nearest = min(reversed(same), key=lambda history: history.differences(offered))
            found = nearest.with_tools(offered, len(messages) - 1)
            break
    mine = keys[-1], hashlib.sha256(json.dumps(offered, sort_keys=True).encode()).hexdigest()
    known.pop(mine, None)
    known[mine] = found
    for oldest in list(known)[:-MOST_KEPT]:
        known.pop(oldest, None)
    return found


def _keys(messages: Sequence[Message], owner: str) -> list[str]:
    """A key for each beginning of a conversation, the empty one first."""
    running = hashlib.sha256(owner.encode())
    keys = [running.hexdigest()]
    for message in messages:
        running.update(json.dumps(message, default=_spelt).encode())
        keys.append(running.hexdigest())
    return keys


def _spelt(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)


def _joined(content: Any, text: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}" if content else text
