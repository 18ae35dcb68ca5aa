"""Grammars of tool calls, in llguidance's Lark: the name is a given tool's, the arguments match its schema."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.answer.tool_calls.call import ORDERED, Schema, choices_of, is_text, properties_of, resolved, values_of
from localllm.answer.tool_calls.formats import (
    BETWEEN_TAGS,
    BLANK,
    CallFormat,
    Literals,
    Maybe,
    Pattern,
    Piece,
    Slot,
    Tags,
)
from localllm.engine.constraint import ConstraintVocabulary
from localllm.engine.constraint.compile import OVERRIDES, enforced
from localllm.engine.constraint.json_rules import MOST_PROPERTIES, JsonRules, Rules, nested, other_than

MAX_DEPTH = 6  # of nested values in a spelling other than JSON; deeper ones are plain values
MAX_LENGTH = 2000  # longest text limit that is enforced

# The names of arguments that a tool's schema does not list: between tags, and in other spellings than JSON.
_KEY_IN_TAG = r'[^"<>=\/\s]([^"<>=\n]{0,248}[^"<>=\s])?'
_BARE_KEY = r"[^\s\"'=:{}\[\](),]{1,250}"
_IN_OPENING = {"\0": _KEY_IN_TAG, "\1": "(true|false)", "\2": "[a-z]*"}  # what stands for {key}, {string} and {type}

# White space between the pieces of a call and within JSON, as models lay it out: what is valid keeps its tokens.
_WHITESPACE = r"[ \t]{1,4}|[ \t]{0,4}(\r?\n[ \t]{0,40}){1,2}"
BLANKS = f"/{_WHITESPACE}/"
BLANK_RULE = "b"
OPTIONS = {**OVERRIDES, "whitespace_pattern": _WHITESPACE, "json_allow_general_unicode_escapes": True}


class CallGrammar:
    """Builds the grammar of a section of calls."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Schema], vocabulary: ConstraintVocabulary) -> None:
        self._form = form
        self._tools = tools
        self._vocabulary = vocabulary
        self._rules = Rules()
        self._any: dict[Literals, str] = {}  # rules for any value
        self._root: Schema = {}  # of the current tool, as far as a grammar can enforce it
        self._json = JsonRules(self._root, self._rules, BLANK_RULE, OPTIONS)

    @property
    def ends_answer(self) -> bool:
        """Whether the answer ends where the section does."""
        pieces = self._vocabulary.pieces(self._form.closing)
        return not pieces or pieces[0] in self._vocabulary.ends

    def section(self, before: str = "", goes_on: bool = False) -> str:
        """The grammar of what follows an opening, or of both if the call includes it.

        before: literal text in front. goes_on: the model calls by itself, so whatever the tools' schemas allow is,
        and any text after the section, unless the answer ends with it.
        """
        form = self._form
        in_order = {name for name, schema in self._tools.items() if ORDERED in schema}
        opened = self._tools.keys() - in_order if goes_on else set()
        closed = {"additionalProperties": False}
        roots = enforced(
            {
                name: {**(closed if schema.get("properties") == {} and name not in opened else {}), **schema}
                for name, schema in self._tools.items()
            },
            opened,
        )
        calls = [self._call(name, root, name in in_order) for name, root in roots.items()]
        call = self._rules.add(" | ".join(calls))
        more = "" if form.separator is None else f" ({self._text(form.separator)} {call})*"
        closing = "" if self.ends_answer else self._text(form.closing)
        blank = "" if self.ends_answer and form.end == " " else self._text(form.end)
        rest = "REST?" if goes_on and not self.ends_answer else ""
        start = f"start: {self._literal(before)} {self._text(form.begin)} {call}{more} {blank} {closing} {rest}"
        return "\n".join([start, f"blank: {BLANKS}", f"{BLANK_RULE}: blank?", "REST: /(.|\\n)+/", str(self._rules), ""])

    def _call(self, name: str, root: Schema, in_order: bool) -> str:
        self._root = root
        self._json = JsonRules(self._root, self._rules, BLANK_RULE, OPTIONS, any_order=not in_order)
        return self._rules.add(self._sequence(self._form.call, name))

    def _sequence(self, pieces: Sequence[Piece], name: str) -> str:
        return " ".join(self._piece(piece, name) for piece in pieces)

    def _piece(self, piece: Piece, name: str) -> str:
        match piece:
            case str():
                found = self._text(piece)
            case Slot.NAME:
                found = json.dumps(json.dumps(name, ensure_ascii=False)[1:-1])
            case Pattern(source):
                found = f"/{source}/"
            case Maybe():
                found = f"({self._sequence(piece, name)})?"
            case Tags():
                found = self._tags(piece)
            case Literals():
                found = self._pairs(self._root, piece, piece.assigns, 0)
            case _:
                found = self._json.value(self._root)
        return found

    def _text(self, text: str) -> str:
        """Text in which a space matches any white space or none; see formats.Piece."""
        return " blank? ".join(self._literal(part) for part in BLANK.split(text))

    def _literal(self, text: str, listed: Sequence[str] = ()) -> str:
        """Text as it is, but for what stands for patterns (_IN_OPENING). listed: names that the key is not."""
        found = []
        for piece in self._vocabulary.pieces(text) if text else []:
            is_pattern = isinstance(piece, str) and not _IN_OPENING.keys().isdisjoint(piece)
            found.append(self._rules.terminal(_of_pattern(str(piece), listed)) if is_pattern else _spelled_out([piece]))
        return " ".join(found)

    # Parameters between tags

    def _tags(self, tags: Tags) -> str:
        root = resolved(self._root, self._root)
        properties = properties_of(root, self._root)
        required, others = root.get("required") or (), root.get("additionalProperties", True)
        found = []
        for key, schema in properties.items():
            found.append((self._rules.add(self._tag(tags, key, schema)), key in required))
        # Which name a closing tag must repeat cannot be said of names by pattern.
        has_more = others is not False and "{key}" not in tags.closing
        more = self._rules.add(self._tag(tags, None, others, tuple(properties))) if has_more else ""
        if len(found) > MOST_PROPERTIES:
            return " ".join([*(rule if needed else f"{rule}?" for rule, needed in found), f"{more}*" if more else ""])
        return self._rules.sequence(found, any_order=self._json.any_order, more=more)

    def _tag(self, tags: Tags, key: str | None, schema: Any, listed: Sequence[str] = ()) -> str:
        """One parameter. key: its name; None for any but the listed."""
        is_any = schema is True or schema == {}
        text, nullable = is_text(schema, self._root)
        words = {"string": "true" if text else "false", "type": "string" if text else self._kind(schema)}
        if key is None and is_any:
            words = {"string": "\1", "type": "\2"}
        words["key"] = "\0" if key is None else key
        opening = " blank? ".join(
            self._literal(part.format(**words), listed) for part in BETWEEN_TAGS.split(tags.opening)
        )
        closing = tags.closing.format(**words)
        line = '"\\n"?'
        if key is None and is_any:
            return f"{opening} {self._raw({}, closing)} blank?"
        if not text:
            return f"{opening} {line} {self._json.value(schema)} {line} {self._literal(closing)} blank?"
        body = self._raw(schema, closing, line)
        if nullable:
            body = f'({body} | "null" {line} {self._literal(closing)})'
        return f"{opening} {line} {body} blank?"

    def _kind(self, schema: Any) -> str:
        kind = resolved(schema, self._root).get("type", "object")
        return {"integer": "number"}.get(kind, kind) if isinstance(kind, str) else "object"

    def _raw(self, schema: Any, closing: str, line: str = "") -> str:
        """A raw string and its closing. line: what may stand between them and is not part of the string."""
        schema = resolved(schema, self._root)
        for choice in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
            if is_text(choice, self._root)[0]:
                return self._raw(choice, closing, line)
        if values := values_of(schema):
            texts = " | ".join(json.dumps(value) for value in values if isinstance(value, str))
            return f"({texts}) {line} {self._literal(closing)}"
        if expression := _limits(schema, closing):
            return f"{self._rules.add(expression, 'T')} {line} {self._literal(closing)}"
        ending, *rest = self._vocabulary.pieces(closing)
        if isinstance(ending, int):
            return f"/(.|\\n)*/ {self._literal(closing)}"
        text = self._rules.add("/(.|\\n)*/", options=f"[suffix={json.dumps(ending)}]")
        return f"{text} {_spelled_out(rest)}"

    # Values in other spellings

    def _pairs(self, schema: Any, spelling: Literals, assigns: str, depth: int) -> str:
        root = resolved(schema, self._root)
        properties = properties_of(root, self._root)
        required, others = root.get("required") or (), root.get("additionalProperties", True)
        has_quotes = bool(depth) and spelling.quoted_keys
        pairs = []
        for key, value in properties.items():
            name = self._literal(json.dumps(key, ensure_ascii=False) if has_quotes else key)
            pair = self._rules.add(f"{name} {self._text(f'{assigns} ')} {self._value(value, spelling, depth)}")
            pairs.append((pair, key in required))
        more = ""
        if others is not False:
            key = self._json.key(properties) if has_quotes else self._rules.terminal(other_than(_BARE_KEY, properties))
            value = self._value({} if others is True else others, spelling, depth)
            more = self._rules.add(f"{key} {self._text(f'{assigns} ')} {value}")
        return self._joined(pairs, more)

    def _joined(self, pairs: Sequence[tuple[str, bool]], more: str) -> str:
        """Pairs with commas between those present; the flag says whether a pair is required.

        more: a pair that may also occur, any number of times, unless there are more than MOST_PROPERTIES.
        """
        comma = self._text(", ")
        if len(pairs) <= MOST_PROPERTIES:
            return self._rules.sequence(pairs, comma, any_order=self._json.any_order, more=more)
        rest = ""  # what may follow a pair
        for pair, needed in reversed(pairs[1:]):
            body = f"{comma} {pair} {rest}"
            rest = self._rules.add(body) if needed else self._rules.add(f"{body} | {rest}" if rest else f"({body})?")
        (first, needed), *others = pairs
        if needed or not others:
            return f"{first} {rest}" if needed else f"({first})?"
        return f"({first} {rest} | {self._joined(others, more)})"

    def _value(self, schema: Any, spelling: Literals, depth: int) -> str:
        schema = resolved(schema, self._root)
        if values := values_of(schema):
            return f"({' | '.join(self._spelled(value, spelling) for value in values)})"
        choices = choices_of(schema)
        if choices and depth < MAX_DEPTH:
            return f"({' | '.join(self._value(choice, spelling, depth + 1) for choice in choices)})"
        kinds = schema.get("type")
        if isinstance(kinds, str):
            return self._of_kind(kinds, schema, spelling, depth)
        if not schema:
            return f"{self._anything(spelling)}::0x0"
        kinds = kinds or ["string", "number", "boolean", "null"]
        return f"({' | '.join(self._of_kind(kind, schema, spelling, depth) for kind in kinds)})"

    def _anything(self, spelling: Literals) -> str:
        """The name of a rule for any value, whose parameter counts its levels."""
        if spelling not in self._any:
            name = self._any[spelling] = self._rules.name("p")
            scalars = [self._of_kind(kind, {}, spelling, 0) for kind in ("string", "number", "boolean", "null")]
            key = self._json.key() if spelling.quoted_keys else self._rules.terminal(f"/{_BARE_KEY}/")
            pair = f"{key} {self._text(f'{spelling.nested_assigns} ')} {name}::_ {BLANK_RULE}"
            self._rules.set(name, nested(self._rules, name, " | ".join(scalars), pair, self._text(", "), BLANK_RULE))
        return self._any[spelling]

    def _of_kind(self, kind: str, schema: Schema, spelling: Literals, depth: int) -> str:
        true, false, null = spelling.words
        if kind == "boolean":
            found = f'("{true}" | "{false}")'
        elif kind == "null":
            found = f'"{null}"'
        elif kind == "string" and spelling.quotes != '"':
            found = f"{self._literal(spelling.quotes)} {self._raw(schema, spelling.quotes)}"
        elif kind == "array":
            found = self._array(schema, spelling, depth) if depth < MAX_DEPTH else '"[]"'
        elif kind == "object":
            pairs = self._pairs(schema, spelling, spelling.nested_assigns, depth + 1) if depth < MAX_DEPTH else ""
            found = f'"{{" {pairs} "}}"'
        else:
            found = self._json.value({**schema, "type": kind})
        return found

    def _array(self, schema: Schema, spelling: Literals, depth: int) -> str:
        item = self._rules.add(self._value(schema.get("items", {}), spelling, depth + 1))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f"{item} ({self._text(', ')} {item}){times}"
        return f'"[" {items if least else f"({items})?"} "]"'

    def _spelled(self, value: Any, spelling: Literals) -> str:
        if value is None or isinstance(value, bool):
            return json.dumps(spelling.words[2 if value is None else 1 - value])
        if isinstance(value, str) and spelling.quotes != '"':
            return f"{self._literal(spelling.quotes)} {json.dumps(value)} {self._literal(spelling.quotes)}"
        return json.dumps(json.dumps(value, ensure_ascii=False))


def _spelled_out(pieces: Sequence[int | str]) -> str:
    """Control tokens and the text between them."""
    return " ".join(json.dumps(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in pieces)


def _of_pattern(text: str, listed: Sequence[str]) -> str:
    """A terminal's body for text with characters that stand for patterns (_IN_OPENING)."""
    before, mark, after = (
        "".join(_IN_OPENING.get(one) or re.escape(one).replace("/", "\\/") for one in part)
        for part in text.partition("\0")
    )
    return other_than(mark, listed, before, after)


def _limits(schema: Schema, closing: str) -> str | None:
    """A terminal for a text with a pattern or bounded length, on one line and without the closing's first character."""
    least, most, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
    if most is not None and most > MAX_LENGTH:
        most = None
    least = min(least, MAX_LENGTH)
    if not least and most is None and not pattern:
        return None
    free = f"[^\\n{re.escape(closing[0])}]".replace("/", "\\/")
    found = [f"/{free}{{{least},{'' if most is None else most}}}/"]
    if pattern:
        inner = pattern.replace("\\/", "/").replace("/", "\\/")
        before = "" if inner.startswith("^") else f"{free}*"
        after = "" if inner.endswith("$") and not inner.endswith("\\$") else f"{free}*"
        found.append(
            f"/{before}({inner.removeprefix('^').removesuffix('$') if not after else inner.removeprefix('^')}){after}/"
        )
    return " & ".join(found)
