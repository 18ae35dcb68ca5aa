"""Tool calls as models write them. What does not parse is no call: the caller shows it as text."""

import json
import re
from dataclasses import dataclass
from typing import Any

_FUNCTION = re.compile(r"<function=(?P<name>[^>]+)>(?P<body>.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<name>[^>]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)
# A function's name before its arguments, as Mistral and DeepSeek write it.
_NAMED = re.compile(r"(?:function\s*<｜tool▁sep｜>)?(?P<name>[\w.-]+)\s*(?:\[ARGS\]|<｜tool▁sep｜>|```json)?\s*(?={)")  # noqa: RUF001
# What stands between calls or around them, and carries no meaning.
_SEPARATOR = re.compile(r"(?:\s|,|;|```|</?tool_call>|<｜tool▁call▁(?:begin|end)｜>)+")  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function to call and its arguments, a JSON object."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(opening: str, body: str) -> tuple[ToolCall, ...]:
    """Return the calls that the text between tool-call markers spells; () unless all of it is understood.

    opening: the marker before it, since some hold a part of the call. Understood are JSON objects with name and
    arguments (or parameters), alone, in a list or one after the other; a name before its JSON arguments; and
    <function=name> around JSON or <parameter=...> tags.
    """
    text = opening + body if opening.startswith("<function=") else body
    try:
        calls = _tagged(text) if "<function=" in text else _plain(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()
    return tuple(calls)


def _tagged(text: str) -> list[ToolCall]:
    if _SEPARATOR.sub("", _FUNCTION.sub("", text)):
        raise ValueError("text beside the calls")
    return [ToolCall(match["name"].strip(), _tag_arguments(match["body"])) for match in _FUNCTION.finditer(text)]


def _tag_arguments(body: str) -> dict[str, Any]:
    parameters = {match["name"].strip(): _value(match["value"]) for match in _PARAMETER.finditer(body)}
    rest = _PARAMETER.sub("", body).strip()
    if parameters and rest:
        raise ValueError("text beside the parameters")
    return parameters or (_object(json.loads(rest)) if rest else {})


def _value(text: str) -> Any:
    """A parameter's value: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    at = 0
    while True:
        if separator := _SEPARATOR.match(text, at):
            at = separator.end()
        if at == len(text):
            return calls
        named = _NAMED.match(text, at)
        value, at = decoder.raw_decode(text, named.end() if named else at)
        if named:
            calls.append(ToolCall(named["name"], _object(value)))
        else:
            calls += [_call(entry) for entry in (value if isinstance(value, list) else [value])]


def _call(entry: dict[str, Any]) -> ToolCall:
    function = entry.get("function", entry)
    arguments = function["arguments"] if "arguments" in function else function.get("parameters", {})
    if isinstance(arguments, str):  # JSON in JSON
        arguments = json.loads(arguments)
    if not isinstance(function["name"], str):
        raise TypeError("a function's name is text")
    return ToolCall(function["name"], _object(arguments))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("arguments are a JSON object")
    return value
