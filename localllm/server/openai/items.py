"""The items of /v1/responses as a conversation."""

import base64
import binascii
from collections.abc import Sequence
from functools import partial
from typing import Any

from localllm.answer.late_tools import definitions
from localllm.server.bodies import Object, note_ignored, shown
from localllm.server.contents import as_arguments, left_out, openai_content, text_field
from localllm.server.errors import ApiError
from localllm.server.openai.client_tools import KINDS
from localllm.server.openai.tools import INPUT, full_name, toolbox

_string = partial(text_field, "an item")
_SAID = ("content", "reasoning_content", "tool_calls")
_LOADING = ("tool_search_output", "additional_tools")
_SEALED = "localllm:"  # prefix of our reasoning in encrypted_content


def conversation_of(items: Sequence[Object]) -> list[Object]:
    """The messages of a conversation. Unsupported items are left out and logged once. Raises ApiError 400."""
    return _joined([message for item in items if (message := _message(item)) is not None])


def sealed(reasoning: str) -> str:
    """Reasoning or a summary as an item's encrypted_content. It is not encrypted."""
    return base64.b64encode((_SEALED + reasoning).encode()).decode()


def _joined(messages: list[Object]) -> list[Object]:
    """Join an assistant's items of one turn (reasoning, text, calls) into one message."""
    found: list[Object] = []
    for message in messages:
        before = found[-1] if found else {}
        same_turn = message["role"] == before.get("role") == "assistant"
        if not same_turn or (message["content"] and (before["content"] or "tool_calls" in before)):
            found.append(message)
            continue
        before["content"] = before["content"] or message["content"]
        for key in ("reasoning_content", "tool_calls"):
            if key in message:
                before[key] = before[key] + message[key] if key in before else message[key]
    return [message for message in found if message["role"] != "assistant" or any(map(message.get, _SAID))]


def _message(item: Object) -> Object | None:
    """An item as a message; None for an unsupported item. Raises ApiError 400."""
    kind = str(item.get("type") or "message")
    if kind == "message":
        content, role = item.get("content"), item.get("role")
        if not isinstance(role, str) or not isinstance(content, str | list):
            raise ApiError(400, "an input message needs a role and content")
        return {"role": role, "content": openai_content(content, role)}
    if kind in ("function_call", "custom_tool_call"):
        is_custom = kind == "custom_tool_call"
        return _call(item, {INPUT: _string(item, "input")} if is_custom else as_arguments(_string(item, "arguments")))
    if (base := _base(kind)) in KINDS and not kind.endswith("_output"):
        return _call(item | {"name": base}, KINDS[base].arguments(item))
    if (told := _beside(kind, item)) is not None:
        return told
    if kind.endswith("_output"):
        return {"role": "tool", "tool_call_id": _call_id(item), "content": _output(item)}
    note_ignored(f"input item of type {shown(kind)}")
    return None


def _beside(kind: str, item: Object) -> Object | None:
    """The model's reasoning, its summary of a conversation, or further tools, as a message; None for other items."""
    if kind == "additional_tools" and (functions := toolbox(_tools_of(item)).functions):
        return {"role": "developer", "content": definitions(functions)}
    if kind == "compaction_trigger":
        raise ApiError(400, "compaction_trigger is not supported; use /v1/responses/compact")
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": _reasoning(item)}
    if kind in ("compaction", "compaction_summary") and (summary := _opened(item)) is not None:
        return {"role": "user", "content": f"Summary of the conversation so far:\n{summary}"}
    return None


def loaded_tools(items: Sequence[Object]) -> list[Object]:
    """The tools that a conversation gets after its beginning, by a search or otherwise. Raises ApiError 400."""
    return [tool for item in items if item.get("type") in _LOADING for tool in _tools_of(item)]


def _tools_of(item: Object) -> list[Object]:
    tools = item.get("tools")
    if not isinstance(tools, list):
        raise ApiError(400, f"an item of type {item['type']} needs tools as a list")
    return tools


def _base(kind: str) -> str:
    """The tool's type in the type of a call's or result's item."""
    return kind.removesuffix("_output").removesuffix("_call")


def _output(item: Object) -> Any:
    kind = _base(item["type"])
    if kind == "tool_search" and item.get("tools"):
        return definitions(toolbox(item["tools"]).functions)
    if kind in KINDS:
        return KINDS[kind].told(item)
    output = item.get("output")
    if isinstance(output, str | list):
        return openai_content(output, "tool")
    if item["type"] in ("function_call_output", "custom_tool_call_output"):
        raise ApiError(400, f"an item of type {item['type']} needs output as text")
    note_ignored(f"input item of type {shown(item['type'])}")
    return left_out(item["type"][:64])


def _call(item: Object, arguments: str | Object) -> Object:
    function = {"name": full_name(_string(item, "name"), item.get("namespace")), "arguments": arguments}
    call = {"id": _call_id(item), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _call_id(item: Object) -> str:
    """What links a call with its result: of a local shell's result its own id, as of searches that OpenAI ran."""
    return _string(item, "call_id" if item.get("call_id") else "id")


def _reasoning(item: Object) -> str:
    """An item's reasoning: from our encrypted_content, else its full text, else its summary."""
    opened = _opened(item)
    return (_texts(item.get("content")) or _texts(item.get("summary"))) if opened is None else opened


def _opened(item: Object) -> str | None:
    """The text that `sealed` has put into an item's encrypted_content; None if another server has made it."""
    try:
        opened = base64.b64decode(item.get("encrypted_content") or "", validate=True).decode()
    except (binascii.Error, ValueError, TypeError):
        return None
    return opened.removeprefix(_SEALED) if opened.startswith(_SEALED) else None


def _texts(parts: Any) -> str:
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))
