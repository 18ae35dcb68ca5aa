"""Parsing tool calls in the formats that models write. What cannot be parsed is text."""

import json
import re
from dataclasses import dataclass
from typing import Any

# A function's name before its arguments, as Mistral and DeepSeek write it. Possessive, so that matching is linear.
_NAMED = re.compile(
    r"(?:function\s*+<｜tool▁sep｜>)?+(?P<name>[\w.-]++)\s*+(?:\[ARGS\]|<｜tool▁sep｜>|```json)?+\s*+(?={)"  # noqa: RUF001
)
# Text between or around calls that has no meaning.
_SEPARATOR = re.compile(r"(?:\s|,|;|```|</?tool_call>|<｜tool▁call▁(?:begin|end)｜>)+")  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function to call and its arguments, a JSON object."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(opening: str, body: str) -> tuple[ToolCall, ...]:
    """Parse the text between tool-call markers; returns () unless all of it can be parsed.

    opening: the marker before the text, which may be a part of the call. Supported formats: JSON objects with name and
    arguments (or parameters), alone, in a list or in sequence; a name before its JSON arguments; <function=name> around
    JSON or <parameter=...> tags.
    """
    text = opening + body if opening.startswith("<function=") else body
    try:
        calls = _tagged(text) if "<function=" in text else _plain(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()
    return tuple(calls)


def _tagged(text: str) -> list[ToolCall]:
    calls, between = _tags(text, "<function=", "</function>", may_end_open=True)
    if _SEPARATOR.sub("", between):
        raise ValueError("text outside of the calls")
    return [ToolCall(name, _tag_arguments(body)) for name, body in calls]


def _tag_arguments(body: str) -> dict[str, Any]:
    found, between = _tags(body, "<parameter=", "</parameter>")
    rest = between.strip()
    if found and rest:
        raise ValueError("text outside of the parameters")
    if found:
        return {name: _value(value.removeprefix("\n").removesuffix("\n")) for name, value in found}
    return _object(json.loads(rest)) if rest else {}


def _tags(text: str, opening: str, closing: str, may_end_open: bool = False) -> tuple[list[tuple[str, str]], str]:
    """The names and bodies of `<opening NAME>body<closing>`, and the text between them. Raises ValueError."""
    found, between, at = [], [], 0
    while (start := text.find(opening, at)) >= 0:
        named = text.index(">", start)
        end = text.find(closing, named)
        if end < 0 and not may_end_open:
            raise ValueError(f"{opening} is not closed")
        stop = end if end >= 0 else len(text)
        found.append((text[start + len(opening) : named].strip(), text[named + 1 : stop]))
        between.append(text[at:start])
        at = min(stop + len(closing), len(text))
    return found, "".join([*between, text[at:]])


def _value(text: str) -> Any:
    """A parameter's value: parsed if it is JSON, else the text."""
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
