"""Writes a JSON Schema as rules of a Lark grammar.

llguidance's own grammars of JSON Schemas fix the order of properties, and let numbers, nesting and names go on for
ever. Here an object has a rule whose parameter, 64 bits, notes which properties were written (llguidance's parametric
rules). So its size grows with the number of properties, not with that of their orders. What these rules do not express
is left to llguidance, in the schema's order.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any
from urllib.parse import unquote

from localllm.engine.constraint.trial import MAX_SOURCE_CHARACTERS
from localllm.errors import RequestError

MOST_PROPERTIES = 48  # of an object with a rule of its own; the bits after them count what its schema does not list
MOST_UNLISTED = 4096  # properties of an object that its schema does not list
LONGEST_KEY = 250  # characters of such a property's name
MOST_NUMBER_TOKENS = 100  # of a number with limits of its own, whose digits llguidance does not bound
DEEPEST = 40  # levels of a value about which its schema says nothing

# Integers of 256 bits, and every 64-bit float.
_DIGITS = "(0|[1-9][0-9]{0,79})"
_NUMBERS = {
    "number": rf"/-?{_DIGITS}(\.[0-9]{{1,40}})?([eE][+-]?[0-9]{{1,3}})?/",
    "integer": rf"/-?{_DIGITS}/",
}
_CHARACTER = r'([^"\\\x00-\x1F]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))'
_WORDS = {"boolean": '("true" | "false")', "null": '"null"'}

# Keywords that say something about one kind of value only.
_OBJECT = frozenset({"properties", "required", "additionalProperties"})
_ARRAY = frozenset({"items", "minItems", "maxItems"})
_STRING = frozenset({"minLength", "maxLength"})
_OF_KIND = {
    "object": _OBJECT | {"patternProperties", "minProperties", "maxProperties"},
    "array": _ARRAY | {"prefixItems"},
    "string": _STRING | {"pattern", "format"},
    **dict.fromkeys(
        ("number", "integer"), frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
    ),
}


class Rules:
    """The rules of a Lark grammar."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}  # names by body
        self._characters = 0

    def __str__(self) -> str:
        return "\n".join(self._rules.values())

    def name(self, letter: str = "r") -> str:
        """A name for a rule to be set. letter: "T" for a terminal, "p" for a rule with a parameter."""
        name = f"{letter}{len(self._rules)}"
        self._rules[name] = ""
        return name

    def set(self, name: str, body: str, options: str = "") -> str:
        """Set a rule; returns its name. Raises RequestError if there is too much."""
        self._characters += len(body)
        if self._characters > MAX_SOURCE_CHARACTERS:
            raise RequestError(f"The grammar has more than {MAX_SOURCE_CHARACTERS} characters; make it smaller.")
        self._rules[name] = f"{name}{'::_' if name.startswith('p') else options}: {body}"
        return name

    def add(self, body: str, letter: str = "r", options: str = "") -> str:
        """Add a rule; returns its name."""
        return self.set(self.name(letter), body, options)

    def terminal(self, body: str) -> str:
        """The name of a terminal, which is added once."""
        if body not in self._terminals:
            self._terminals[body] = self.add(body, "T")
        return self._terminals[body]

    def sequence(
        self,
        pieces: Sequence[tuple[str, bool]],
        separator: str = "",
        end: str = '""',
        any_order: bool = True,
        more: str = "",
    ) -> str:
        """Pieces, each at most once, then an end. The flags say which are required. At most MOST_PROPERTIES.

        separator: between pieces. any_order: else in the given order. more: a piece that may also occur, up to
        MOST_UNLISTED times, in the given order at the end.
        """
        if not pieces and not more:
            return end
        if any_order:
            pieces = sorted(pieces, key=lambda piece: not piece[1])
        count = len(pieces)
        needed = [bit for bit, (_, is_needed) in enumerate(pieces) if is_needed]
        complete = (f"is_ones([0:{len(needed)}])" if any_order else f"bit_set({needed[-1]})") if needed else ""
        room = f"lt([{MOST_PROPERTIES}:64], {MOST_UNLISTED})"
        # Whether a piece may follow: a separator that nothing can follow would be a dead end.
        left = f"not(is_ones([0:{count}]))" if any_order else f"bit_clear({count - 1})"

        def condition(bit: int) -> str:
            if any_order:
                return f"bit_clear({bit})"
            clear = f"is_zeros([{bit}:64])"
            before = [one for one in needed if one < bit]
            return f"and({clear}, bit_set({before[-1]}))" if before else clear

        first, then, one = self.name("p"), self.name("p"), self.name("p")
        following = [f"{piece} {then}::set_bit({bit}) %if {condition(bit)}" for bit, (piece, _) in enumerate(pieces)]
        if more:
            left = f"or({room}, {left})" if pieces else room
            room = f"and({room}, {complete})" if complete and not any_order else room
            following.append(f"{more} {then}::incr([{MOST_PROPERTIES}:64]) %if {room}")
        ended = f"{end} %if {complete}" if complete else end
        self.set(first, f"{ended} | {one}::_")
        self.set(then, f"{ended} | {separator} {one}::_ %if {left}")
        self.set(one, " | ".join(following))
        return f"{first}::0x0"


class JsonRules:
    """The values of one schema. root: as json_schema.enforceable returns it."""

    def __init__(
        self, root: Any, rules: Rules, blank: str, options: Mapping[str, Any], any_order: bool = False
    ) -> None:
        """rules: where the rules go. blank: what may stand between tokens. options: llguidance's."""
        self._root = root
        self._rules = rules
        self._blank = blank
        self._options = options
        self.any_order = any_order
        self._known: dict[str, str] = {}  # names of rules by what they are for
        self._waiting: list[tuple[str, Any]] = []  # definitions whose rules are not set yet, with the rules' names

    def value(self, schema: Any) -> str:
        """A value that fits a schema."""
        found = self._value(schema)
        while self._waiting:
            name, definition = self._waiting.pop()
            self._rules.set(name, self._value(definition))
        return found

    def _value(self, schema: Any) -> str:
        if schema is True or schema == {}:
            found = f"{self._anything()}::0x0"
        elif not isinstance(schema, Mapping):
            found = self._leaf(schema)
        elif schema.keys() - {"$defs"} == {"$ref"}:
            found = self._definition(schema["$ref"])
        elif choices := self._choices(schema):
            found = f"({' | '.join(map(self._value, choices))})"
        else:
            found = self._of_kind(schema, schema.get("type"), schema.keys() - {"type", "$defs"})
        return found

    @staticmethod
    def _choices(schema: Mapping[str, Any]) -> list[Any]:
        """The schemas of which a value must match one, if the schema says nothing else."""
        keys, kinds = schema.keys() - {"$defs"}, schema.get("type")
        if len(keys) == 1 and keys <= {"anyOf", "oneOf"}:
            return list(next(iter(schema[key] for key in keys)))
        if isinstance(kinds, list) and keys <= {"type"}.union(*_OF_KIND.values()):
            return [{"type": kind, **_only(schema, _OF_KIND.get(kind, frozenset()))} for kind in kinds]
        return []

    def _of_kind(self, schema: Mapping[str, Any], kind: Any, about: Set[str]) -> str:
        """A value of one type. about: the other keywords."""
        values = schema.get("enum", [schema.get("const")])
        if kind == "object" and about <= _OBJECT:
            found = self._object(schema)
        elif kind == "array" and about <= _ARRAY:
            found = self._array(schema)
        elif kind == "string" and about <= _STRING:
            found = self._string(schema.get("minLength", 0), schema.get("maxLength"))
        elif about in ({"enum"}, {"const"}) and values and all(_is_a(kind, one) for one in values):
            found = f"({' | '.join(map(_quoted, values))})"
        elif kind in _NUMBERS and not about:
            found = self._rules.terminal(_NUMBERS[kind])
        else:
            found = _WORDS[kind] if kind in _WORDS and not about else self._leaf(schema)
        return found

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, needed = schema.get("properties", {}), schema.get("required", ())
        others = schema.get("additionalProperties", True)
        everything = {**properties, **{name: others for name in needed if name not in properties}}
        if len(everything) > MOST_PROPERTIES or any(everything[name] is False for name in needed):
            return self._leaf(schema)
        blank, assigns = self._blank, f'{self._blank} ":" {self._blank}'
        pieces = [
            (self._rules.add(f"{_quoted(name)} {assigns} {self._value(value)} {blank}"), name in needed)
            for name, value in everything.items()
            if value is not False
        ]
        more = ""
        if others is not False:
            more = self._rules.add(f"{self.key(everything)} {assigns} {self._value(others)} {blank}")
        members = self._rules.sequence(pieces, f'"," {blank}', '"}"', self.any_order, more)
        return self._rules.add(f'"{{" {blank} {members}')

    def key(self, listed: Iterable[str] = ()) -> str:
        """A name in an object that is none of those listed."""
        written = [json.dumps(name, ensure_ascii=False)[1:-1] for name in listed]
        return self._rules.terminal(other_than(f"{_CHARACTER}{{0,{LONGEST_KEY}}}", written, '"', '"'))

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items, blank = schema.get("items", True), self._blank
        if items is False or (most is not None and most < max(least, 1)):
            return self._leaf(schema)
        item = self._rules.add(f"{self._value(items)} {blank}")
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        listed = item if most == 1 else f'{item} ("," {blank} {item}){times}'
        return self._rules.add(f'"[" {blank} {listed if least else f"({listed})?"} "]"')

    def _anything(self) -> str:
        """The name of a rule for any value, whose parameter counts its levels."""
        if "" not in self._known:
            name = self._known[""] = self._rules.name("p")
            blank = self._blank
            pair = f'{self.key()} {blank} ":" {blank} {name}::_ {blank}'
            scalar = f'{self._string(0, None)} | {self._rules.terminal(_NUMBERS["number"])} | "true" | "false" | "null"'
            self._rules.set(name, nested(self._rules, name, scalar, pair, f'"," {blank}', blank))
        return self._known[""]

    def _definition(self, reference: str) -> str:
        if reference not in self._known:
            name = self._known[reference] = self._rules.name()
            key = unquote(reference.removeprefix("#/$defs/")).replace("~1", "/").replace("~0", "~")
            self._waiting.append((name, self._root["$defs"][key]))
        return self._known[reference]

    def _string(self, least: int, most: int | None) -> str:
        times = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
        return self._rules.terminal(f'/"{_CHARACTER}{times}"/')

    def _leaf(self, schema: Any) -> str:
        """A value as llguidance's grammar describes it."""
        found = {"enum": []} if schema is False else schema
        needs = isinstance(self._root, Mapping) and '"$ref"' in json.dumps(found)
        kept = _only(self._root, frozenset({"$defs"})) if needs else {}
        is_number = found.get("type") in _NUMBERS
        bound = f"[max_tokens={MOST_NUMBER_TOKENS}]" if is_number else ""
        return self._rules.add(f"%json {json.dumps({**kept, **found, 'x-guidance': self._options})}", options=bound)


def other_than(key: str, listed: Iterable[str], before: str = "", after: str = "") -> str:
    """A terminal's body: a key by a pattern that is none of those listed, and patterns around it."""
    names = "|".join(re.escape(name).replace("/", "\\/") for name in listed)
    return f"/{before}{key}{after}/" + (f" & ~/{before}({names}){after}/" if names else "")


def nested(rules: Rules, name: str, scalar: str, pair: str, comma: str, blank: str) -> str:
    """The body of a rule for any value, whose parameter counts its levels, at most DEEPEST.

    name: the rule's. pair: of an object, with the rule, and the blank after it. comma: between pairs and items. blank:
    a rule.
    """
    pairs, items = rules.name("p"), rules.name("p")
    rules.set(pairs, f"{pair} | {pairs}::_ {comma} {pair}")
    rules.set(items, f"{name}::_ {blank} | {items}::_ {comma} {name}::_ {blank}")
    # Not within pairs and items: llguidance takes no rule that only renames another.
    bound, deeper = f"%if lt([0:7], {DEEPEST})", "::incr([0:7])"
    within = f'"{{" {blank} {pairs}{deeper} "}}" {bound} | "[" {blank} {items}{deeper} "]" {bound}'
    return f'{scalar} | "{{" {blank} "}}" | "[" {blank} "]" | {within}'


def _only(schema: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key in keys}


def _quoted(value: Any) -> str:
    """JSON in a literal of Lark."""
    return json.dumps(json.dumps(value, ensure_ascii=False))


def _is_a(kind: Any, value: Any) -> bool:
    """Whether a value is a text, an integer, a boolean or null, and of a type; None is any."""
    own = {str: ("string",), bool: ("boolean",), int: ("integer", "number"), type(None): ("null",)}.get(type(value), ())
    return bool(own) and (kind is None or kind in own)
