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
from localllm.engine.constraint.json_rules import MOST_PROPERTIES, JsonRules, Rules

MAX_DEPTH = 6  # of nested values in a spelling other than JSON; deeper ones are plain values
MAX_LENGTH = 2000  # longest text limit that is enforced
FREE_PARAMETERS = 16  # most parameters of a tool that lists none

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
        self._root: Schema = {}  # of the current tool, as far as a grammar can enforce it
        self._json = JsonRules(self._root, self._rules, BLANK_RULE, OPTIONS)

    @property
    def ends_answer(self) -> bool:
        """Whether the answer ends where the section does."""
        pieces = self._vocabulary.pieces(self._form.closing)
        return not pieces or pieces[0] in self._vocabulary.ends

    def section(self, before: str = "", goes_on: bool = False) -> str:
        """The grammar of what follows an opening, or of both if the call includes it.

        before: literal text in front. goes_on: allow any text after the section, unless the answer ends with it.
        """
        form = self._form
        roots = enforced(self._tools)
        calls = [self._call(name, roots[name], ORDERED in schema) for name, schema in self._tools.items()]
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

    def _literal(self, text: str) -> str:
        return _spelled_out(self._vocabulary.pieces(text)) if text else ""

    # Parameters between tags

    def _tags(self, tags: Tags) -> str:
        root = resolved(self._root, self._root)
        properties = properties_of(root, self._root)
        if not properties:
            return self._free_tags(tags) if root.get("additionalProperties", root.get("properties") is None) else ""
        required = root.get("required") or ()
        found = []
        for key, schema in properties.items():
            found.append((self._rules.add(self._tag(tags, key, schema)), key in required))
        if len(found) > MOST_PROPERTIES:
            return " ".join(rule if needed else f"{rule}?" for rule, needed in found)
        return self._rules.sequence(found, any_order=self._json.any_order)

    def _tag(self, tags: Tags, key: str, schema: Any) -> str:
        text, nullable = is_text(schema, self._root)
        kind = "string" if text else self._kind(schema)
        words = {"key": key, "string": "true" if text else "false", "type": kind}
        opening = " blank? ".join(self._literal(part.format(**words)) for part in BETWEEN_TAGS.split(tags.opening))
        closing = tags.closing.format(**words)
        line = '"\\n"?'
        if not text:
            return f"{opening} {line} {self._json.value(schema)} {line} {self._literal(closing)} blank?"
        body = self._raw(schema, closing, line)
        if nullable:
            body = f'({body} | "null" {line} {self._literal(closing)})'
        return f"{opening} {line} {body} blank?"

    def _free_tags(self, tags: Tags) -> str:
        """Any parameters, for a tool that lists none."""
        words = {"key": "\0", "string": "false", "type": "object"}
        opening = " blank? ".join(
            " ".join(
                "/[A-Za-z_][A-Za-z0-9_]{0,63}/" if at % 2 else self._literal(piece)
                for at, piece in enumerate(re.split("(\0)", part.format(**words)))
            )
            for part in BETWEEN_TAGS.split(tags.opening)
        )
        if "{key}" in tags.closing:
            return ""
        value = self._json.value({"type": ["string", "number", "boolean", "null"]})
        rule = self._rules.add(f'{opening} "\\n"? {value} "\\n"? {self._literal(tags.closing)} blank?')
        return f"{rule}{{0,{FREE_PARAMETERS}}}"

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
        if not properties:
            return ""
        required = root.get("required") or ()
        pairs = []
        for key, value in properties.items():
            name = json.dumps(key, ensure_ascii=False) if depth and spelling.quoted_keys else key
            pair = self._rules.add(
                f"{self._literal(name)} {self._text(f'{assigns} ')} {self._value(value, spelling, depth)}"
            )
            pairs.append((pair, key in required))
        return self._joined(pairs)

    def _joined(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Pairs with commas between those present; the flag says whether a pair is required."""
        comma = self._text(", ")
        if len(pairs) <= MOST_PROPERTIES:
            return self._rules.sequence(pairs, comma, any_order=self._json.any_order)
        rest = ""  # what may follow a pair
        for pair, needed in reversed(pairs[1:]):
            body = f"{comma} {pair} {rest}"
            rest = self._rules.add(body) if needed else self._rules.add(f"{body} | {rest}" if rest else f"({body})?")
        (first, needed), *others = pairs
        if needed or not others:
            return f"{first} {rest}" if needed else f"({first})?"
        return f"({first} {rest} | {self._joined(others)})"

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
        kinds = kinds or ["string", "number", "boolean", "null"]
        return f"({' | '.join(self._of_kind(kind, schema, spelling, depth) for kind in kinds)})"

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
