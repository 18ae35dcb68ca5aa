"""Answers that must be tool calls: a JSON Schema that only calls satisfy, and the way back from its text."""

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.engine.answer_parts import AnswerPart, PartKind
from localllm.engine.tool_calls import parse_tool_calls
from localllm.server.errors import ApiError


def chosen_tools(tools: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The named tool, or all where name is "". Raises ApiError 400 where no such tool is offered."""
    found = [tool for tool in tools if name in ("", tool["function"]["name"])]
    if not found:
        raise ApiError(
            400, f"tool_choice names {name!r}, which is not among the tools" if name else "there are no tools"
        )
    return found


def call_schema(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """What {"name": ..., "arguments": ...} looks like for the tools that chosen_tools gives. Raises as that does."""
    return {"anyOf": [_one(tool["function"]) for tool in chosen_tools(tools, name)]}


def _one(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class ForcedCall:
    """Reads an answer under call_schema; stands where an AnswerSplitter would."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[AnswerPart]:
        """Keep the text."""
        self._text += text
        return []

    def flush(self) -> list[AnswerPart]:
        """The call; an answer that was cut short is content."""
        calls = parse_tool_calls("", self._text)
        kind = PartKind.TOOL_CALLS if calls else PartKind.CONTENT
        return [AnswerPart(kind, self._text, calls)] if self._text else []
