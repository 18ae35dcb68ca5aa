"""Reads a section of tool calls while it is being written."""

import json
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from localllm.answer.tool_calls.call import CallDelta, Schema, ToolCall, fits, is_text, properties_of
from localllm.answer.tool_calls.formats import (
    BETWEEN_TAGS,
    BLANK,
    LOOSE,
    CallFormat,
    Literals,
    Maybe,
    Pattern,
    Piece,
    Slot,
    Tags,
)
from localllm.bounded_json import parsed

LONGEST_BLANK = 200
LONGEST_WORD = 40  # in a tag
LANGUAGES = ("", "json", "tool", "tool_call", "tool_calls", "function_call", "xml", "text")  # of a code fence
LOOSE_KEYS = ("name", "arguments", "parameters", "function", "type", "id")
LONGEST_MARKUP = 2000  # characters around names and arguments; with more it is not a call
# The part of JSON that is certain, up to the next mark or the end of the text.
_OUTSIDE = re.compile(r'[^"{}]*+(?P<mark>["{}]?)')
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*+(?P<mark>"?)', re.DOTALL)
_KEY = r'(?P<key>[^"<>=/\n][^"<>=\n]{0,255})'

# Arguments in other spellings than JSON: Python's literals and Gemma's.
_BARE_KEY = r"(?P<key>[^\s\"'=:{}\[\](),]++)\s*+"
_NUMBER = r"(?P<number>-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?=[^0-9.eE+-])"
_MARK = r"(?P<mark>[\[\]{},])|(?P<blank>\s++)"

NOTHING = "\0"  # begins no text

# Yields to wait for text; there is more of it on each resumption.
Reading = Generator[None, None, Any]


class BrokenCallError(Exception):
    """The text is not a call."""


class CallReader:
    """Reads the calls of one section. tools: the schemas of their arguments by name.

    closed: the section has ended; `rest` is the text after it. broken: what follows the calls so far is not a call;
    `rest` is the text after what was understood of it. named: whether a tool's name has been read.
    """

    def __init__(self, form: CallFormat, tools: Mapping[str, Schema], opening: str) -> None:
        """opening: the text that opened the section."""
        self.opening = opening
        self.closed = self.broken = self.named = False
        self.rest = ""
        self.form = form
        self._tools = tools
        self._text = opening if form.starts else ""  # from where the next piece is read
        self._at = 0
        self._source = [opening]
        self._found: list[CallDelta | ToolCall] = []
        self._reading = self._read_loose() if form is LOOSE else self._read()
        next(self._reading)

    @property
    def source(self) -> str:
        """The section's text so far, since the last complete call."""
        return "".join(self._source)

    def read(self, text: str) -> list[CallDelta | ToolCall]:
        """Add text; return the new deltas and calls, each call after all of its deltas."""
        self._text += text
        self._source.append(text)
        try:
            next(self._reading)
        except StopIteration:
            self.closed, self.rest = True, self._text[self._at :]
        except (BrokenCallError, ValueError):
            self.broken, self.rest = True, self._text[self._at :]
        found, self._found = self._found, []
        return found

    def _read(self) -> Reading:
        form = self.form
        names = tuple(sorted(self._tools, key=len, reverse=True))
        head, tail, following, end = _expressions(form, names)
        match = yield from self._match(_blanks(form.begin) + head, _beginnings(form, names, form.begin))
        more = _continuations(form, names)
        while True:
            name = json.loads(f'"{match["name"]}"')
            self._found.append(CallDelta(name))
            self.named = True
            arguments = yield from self._arguments(self._tools[name], tail if tail.strip(r"\s*+") else end)
            yield from self._match(tail)
            self._complete(ToolCall(name, arguments))
            match = yield from self._match(f"(?:{following})|(?P<end>{end})" if following else f"(?P<end>{end})", more)
            if match["end"] is not None:
                return

    def _complete(self, call: ToolCall) -> None:
        self._found.append(call)
        self._text, self._at = self._text[self._at :], 0
        self._source = [self._text]

    # Calls without a template's markers. Each waits no longer than the text may become a call.

    def _read_loose(self) -> Reading:
        """Objects, or lists of them, between a frame's opening and its closing."""
        mark = yield from self._mark("`<{[")
        closing = ""
        if mark == "`":
            yield from self._expect("```")
            yield from self._while(r"\w*", LANGUAGES)
            yield from self._while(r"[ \t]*")
            yield from self._expect("\n")
            closing = "```"
        elif mark == "<":
            self._at += 1
            yield from self._while(r"[\w|:.-]+")
            closing = f"</{self._text[self._text.index('<') + 1 : self._at]}>"
            yield from self._expect(">")
        mark = yield from self._mark("{[")
        ends = "]" if mark == "[" else ""
        self._at += mark == "["
        while True:
            yield from self._mark("{")
            yield from self._loose_call()
            mark = yield from self._mark("")
            if mark == ",":
                self._at += 1
            elif mark != "{":
                break
        for end in (ends, closing):
            if end and end.startswith(mark):
                yield from self._expect(end)
                mark = "" if end == closing else (yield from self._mark(""))

    def _loose_call(self) -> Reading:
        """An object with a tool's name and arguments that fit the tool's schema, perhaps in one of OpenAI's form."""
        name, arguments, depth = "", None, 1
        self._at += 1
        while depth:
            yield from self._mark('"')
            key = yield from self._quoted(LOOSE_KEYS)
            yield from self._mark(":")
            self._at += 1
            mark = yield from self._mark('{"')
            if mark == "{" and key == "function" and depth == 1:
                self._at += 1
                depth += 1
                continue
            if mark == "{" and key in ("arguments", "parameters") and arguments is None:
                first = self._at
                arguments = yield from self._json(streams=False)
                written = self._text[first : self._at].strip()
            elif mark == '"' and key in ("name", "function") and not name:
                name = yield from self._quoted(self._tools)
                self.named = True
            elif mark == '"' and key in ("type", "id"):
                yield from self._quoted(["function"] if key == "type" else None)
            else:
                raise BrokenCallError
            mark = "}"
            while depth and mark == "}":
                mark = yield from self._mark(",}")
                self._at += 1
                depth -= mark == "}"
        if not name or arguments is None or not fits(self._tools[name], arguments):
            raise BrokenCallError
        self._found += [CallDelta(name), CallDelta(arguments=written)]
        self._complete(ToolCall(name, arguments))

    def _mark(self, wanted: str) -> Generator[None, None, str]:
        """Wait for the next character that is no white space; it must be one of those wanted, if any are."""
        first = self._at
        while True:
            self._at += len(self._text[self._at :]) - len(self._text[self._at :].lstrip())
            if self._at < len(self._text):
                break
            if self._at - first > LONGEST_BLANK:
                raise BrokenCallError
            yield
        if wanted and self._text[self._at] not in wanted:
            raise BrokenCallError
        return self._text[self._at]

    def _expect(self, wanted: str) -> Reading:
        while not self._text.startswith(wanted, self._at):
            if not wanted.startswith(self._text[self._at :]):
                raise BrokenCallError
            yield
        self._at += len(wanted)

    def _while(self, expression: str, known: Collection[str] | None = None) -> Reading:
        """Wait for the end of what matches; it must be one of the texts known, if they are given."""
        compiled = re.compile(expression)
        while True:
            match = compiled.match(self._text, self._at)
            if match is not None and match.end() < len(self._text):
                break
            begun = self._text[self._at :]
            is_known = known is None or any(one.startswith(begun) for one in known)
            if (match is None and begun) or not is_known or len(begun) > LONGEST_WORD:
                raise BrokenCallError
            yield
        if match.end() - self._at > LONGEST_WORD or not (known is None or match[0] in known):
            raise BrokenCallError
        self._at = match.end()

    def _quoted(self, known: Collection[str] | None) -> Generator[None, None, str]:
        """A string of JSON; one of those known, if they are given."""
        while True:
            match = _IN_STRING.match(self._text, self._at + 1)
            assert match is not None  # it may be empty
            written = self._text[self._at + 1 : match.end() - len(match["mark"])]
            if match["mark"]:
                break
            if len(written) > LONGEST_MARKUP or (
                known is not None and "\\" not in written and not any(one.startswith(written) for one in known)
            ):
                raise BrokenCallError
            yield
        self._at = match.end()
        text = str(json.loads(f'"{written}"'))
        if known is not None and text not in known:
            raise BrokenCallError
        return text

    def _match(self, expression: str, beginnings: Sequence[str] = ("",)) -> Generator[None, None, "re.Match[str]"]:
        """Wait until the text continues as expected. beginnings: what it begins with, but for white space."""
        compiled = re.compile(expression)
        while (match := compiled.match(self._text, self._at)) is None:
            written = "".join(self._text[self._at :].split())
            is_begun = any(one.startswith(written) or written.startswith(one) for one in beginnings)
            if not is_begun or len(self._text) - self._at > LONGEST_MARKUP:
                raise BrokenCallError
            yield
        self._at = match.end()
        return match

    def _arguments(self, schema: Schema, tail: str) -> Generator[None, None, dict[str, Any]]:
        style = self.form.arguments
        if isinstance(style, Tags):
            return (yield from self._tags(style, schema, tail))
        if isinstance(style, Literals):
            return (yield from self._literals(style))
        return (yield from self._json())

    def _json(self, streams: bool = True) -> Generator[None, None, dict[str, Any]]:
        yield from self._match(r"\s*+(?=\{)")
        first = sent = self._at
        depth, in_string = 0, False
        while True:
            while match := (_IN_STRING if in_string else _OUTSIDE).match(self._text, self._at):
                if in_string and not streams and "\n" in match[0]:
                    raise BrokenCallError  # JSON has none in strings
                self._at = match.end()
                if match["mark"] == '"':
                    in_string = not in_string
                elif match["mark"]:
                    depth += 1 if match["mark"] == "{" else -1
                if not match["mark"] or not depth:
                    break
            if streams and self._text[sent : self._at]:
                self._found.append(CallDelta(arguments=self._text[sent : self._at]))
            sent = self._at
            if sent > first and not depth:
                break
            yield
        value = parsed(self._text[first:sent])
        if not isinstance(value, dict):
            raise BrokenCallError
        return value

    def _tags(self, tags: Tags, schema: Schema, tail: str) -> Generator[None, None, dict[str, Any]]:
        found: dict[str, Any] = {}
        opening = _tag_opening(tags)
        properties = properties_of(schema, schema)
        while True:
            match = yield from self._match(rf"\s*+(?:{opening}|(?={tail}))")
            if match["key"] is None:
                self._found.append(CallDelta(arguments="}" if found else "{}"))
                return found
            key = match["key"]
            closing = tags.closing.format(key=key)
            before = f"{', ' if found else '{'}{json.dumps(key, ensure_ascii=False)}: "
            if is_text(properties.get(key, {}), schema) == (True, False):
                found[key] = yield from self._written_text(closing, before)
                continue
            scanned = self._at
            while (end := self._text.find(closing, scanned)) < 0:
                scanned = max(len(self._text) - len(closing), self._at)
                yield
            text = self._text[self._at : end].removeprefix("\n").removesuffix("\n")
            self._at = end + len(closing)
            found[key] = value = _value(text, properties.get(key, {}), schema)
            self._found.append(CallDelta(arguments=before + json.dumps(value, ensure_ascii=False)))

    def _written_text(self, closing: str, before: str) -> Generator[None, None, str]:
        """A string up to its closing tag, emitted piece by piece as soon as certain. before: precedes the first piece.

        The newlines that models write after the opening and before the closing tag are not part of it.
        """
        while len(self._text) <= self._at:
            yield
        first = sent = self._at + self._text.startswith("\n", self._at)
        piece = before + '"'
        while (end := self._text.find(closing, sent)) < 0:
            certain = len(self._text) - len(closing)  # neither part of the tag nor the newline before it
            if certain > sent:
                self._found.append(CallDelta(arguments=piece + _escaped(self._text[sent:certain])))
                piece, sent = "", certain
            yield
        stop = end - (end > first and self._text[end - 1] == "\n")
        self._found.append(CallDelta(arguments=f'{piece}{_escaped(self._text[sent:stop])}"'))
        self._at = end + len(closing)
        return self._text[first:stop]

    def _literals(self, spelling: Literals) -> Generator[None, None, dict[str, Any]]:
        """Key and value pairs, rewritten as JSON token by token, and strings as they are written."""
        words = dict(zip(spelling.words, ("true", "false", "null"), strict=True))
        outer, nested = _tokens(spelling)
        written: list[str] = []
        self._write("{", written)
        depth = 0
        while depth or not self._text.startswith(spelling.closing, self._at):
            match = (nested if depth else outer).match(self._text, self._at)
            if match is None:
                if len(self._text) - self._at > LONGEST_MARKUP:
                    raise BrokenCallError
                yield
                continue
            self._at = match.end()
            kind, token = match.lastgroup, match[match.lastgroup or 0]
            if kind == "quotes":
                yield from self._string(token, written)
                continue
            if kind == "mark":
                depth += (token in "{[") - (token in "}]")
            elif kind == "key":
                token = f"{json.dumps(token, ensure_ascii=False)}: "
            elif kind == "word":
                token = words[token]
            elif kind == "blank":
                token = " "  # JSON knows fewer kinds
            self._write(token, written)
            if depth < 0:
                raise BrokenCallError
        self._write("}", written)
        found: dict[str, Any] = parsed("".join(written))
        return found

    def _string(self, quotes: str, written: list[str]) -> Reading:
        """The rest of a string: escaped as in JSON between double quotes, else not at all."""
        self._write('"', written)
        is_open = True
        while is_open:
            if quotes == '"':
                match = _IN_STRING.match(self._text, self._at)
                assert match is not None  # it may be empty
                is_open, piece, self._at = not match["mark"], match[0], match.end()
            else:
                end = self._text.find(quotes, self._at)
                is_open = end < 0
                stop = max(len(self._text) - len(quotes) + 1, self._at) if is_open else end
                piece = _escaped(self._text[self._at : stop]) + ("" if is_open else '"')
                self._at = stop if is_open else stop + len(quotes)
            self._write(piece, written)
            if is_open:
                yield

    def _write(self, piece: str, written: list[str]) -> None:
        """Emit a piece of arguments, as one delta with what was emitted since the last wait."""
        written.append(piece)
        if self._found and isinstance(last := self._found[-1], CallDelta) and not last.name:
            self._found[-1] = CallDelta(arguments=last.arguments + piece)
        elif piece:
            self._found.append(CallDelta(arguments=piece))


def _escaped(text: str) -> str:
    """A text as written between JSON's quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value(text: str, schema: Any, root: Schema) -> Any:
    """A parameter's value: raw text if its schema says string, else parsed as JSON if possible."""
    is_string, nullable = is_text(schema, root)
    if is_string and not (nullable and text == "null"):
        return text
    try:
        return parsed(text)
    except ValueError:
        return text


@lru_cache(maxsize=64)
def _expressions(form: CallFormat, names: Sequence[str]) -> tuple[str, str, str, str]:
    """Expressions for the text before a call's arguments, after them, up to the next call's, and the section's end."""
    at = form.call.index(form.arguments)
    name = f"(?P<name>{'|'.join(re.escape(json.dumps(name, ensure_ascii=False)[1:-1]) for name in names)})"
    head, tail = _expression(form.call[:at], name), _expression(form.call[at + 1 :], name)
    following = "" if form.separator is None else _blanks(form.separator) + head
    return head, tail, following, _blanks(form.end) + re.escape(form.closing) if form.closing else "(?!)"


@lru_cache(maxsize=64)
def _beginnings(form: CallFormat, names: Sequence[str], begun: str) -> tuple[str, ...]:
    """What a call may begin with after this text, up to its name at most, without white space."""
    for piece in form.call:
        if piece is Slot.NAME:
            written = [json.dumps(name, ensure_ascii=False)[1:-1] for name in names]
            return tuple("".join(f"{begun}{name}".split()) for name in written)
        if not isinstance(piece, str):
            break
        begun += piece
    return ("".join(begun.split()),)


@lru_cache(maxsize=64)
def _continuations(form: CallFormat, names: Sequence[str]) -> tuple[str, ...]:
    """What may follow a call: what ends the section, or begins the next call; without white space."""
    end = "".join(f"{form.end}{form.closing}".split()) or NOTHING
    return (end, *(_beginnings(form, names, form.separator) if form.separator is not None else ()))


def _expression(pieces: Sequence[Piece], name: str) -> str:
    found = []
    for piece in pieces:
        if isinstance(piece, str):
            found.append(_blanks(piece))
        elif isinstance(piece, Slot):
            found.append(name)
        elif isinstance(piece, Pattern):
            found.append(f"(?:{piece.source})")
        elif isinstance(piece, Maybe):
            found.append(f"(?:{_expression(piece, name)})?")
    return "".join(found)


def _blanks(text: str) -> str:
    return r"\s*+".join(re.escape(part) for part in BLANK.split(text))


def _tag_opening(tags: Tags) -> str:
    """An expression for a parameter's opening; its group is the key."""
    words = {"{key}": _KEY, "{type}": "[a-z]*", "{string}": "(?:true|false)"}
    parts = []
    for part in BETWEEN_TAGS.split(tags.opening):
        parts.append("".join(words.get(piece) or re.escape(piece) for piece in re.split(r"(\{[a-z]+\})", part)))
    return r"\s*+".join(parts)


@lru_cache
def _tokens(spelling: Literals) -> tuple["re.Pattern[str]", "re.Pattern[str]"]:
    """Expressions for a token among the arguments, and for one within a value; the group is its kind."""
    values = f"{_NUMBER}|(?P<word>{'|'.join(spelling.words)})|{_MARK}"
    quotes = f"(?P<quotes>{re.escape(spelling.quotes)})"
    outer = f"{quotes}|{_BARE_KEY}{spelling.assigns}|{values}"
    key = "(?P<assigns>" if spelling.quoted_keys else f"(?:{_BARE_KEY}"
    nested = f"{quotes}|{key}{spelling.nested_assigns})|{values}"
    return re.compile(outer), re.compile(nested)
