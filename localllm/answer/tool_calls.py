"""Tool calls as models write them. What does not parse is text."""

import json
import re
from dataclasses import dataclass
from typing import Any

# A function's name before its arguments, as Mistral and DeepSeek write it. No quantifier gives anything back, so that
# the time to find out that there is none is linear.
_NAMED = re.compile(
    r"(?:function\s*+<｜tool▁sep｜>)?+(?P<name>[\w.-]++)\s*+(?:\[ARGS\]|<｜tool▁sep｜>|```json)?+\s*+(?={)"  # noqa: RUF001
)
# What stands between calls or around them, and carries no meaning.
_SEPARATOR = re.compile(r"(?:\s|,|;|```|</?tool_call>|<｜tool▁call▁(?:begin|end)｜>)+")  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function to call and its arguments, a JSON object."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(opening: str, body: str) -> tuple[ToolCall, ...]:
    """The calls that the text between tool-call markers spells; () unless all of it can be parsed.

    opening: the marker before it, since some hold a part of the call. Parsed are JSON objects with name and arguments
    (or parameters), alone, in a list or one after the other; a name before its JSON arguments; and <function=name>
    around JSON or <parameter=...> tags.
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
        raise ValueError("text beside the calls")
    return [ToolCall(name, _tag_arguments(body)) for name, body in calls]


def _tag_arguments(body: str) -> dict[str, Any]:
    found, between = _tags(body, "<parameter=", "</parameter>")
    rest = between.strip()
    if found and rest:
        raise ValueError("text beside the parameters")
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
