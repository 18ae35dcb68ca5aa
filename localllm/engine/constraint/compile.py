"""Compiles JSON mode, a schema, a regex or a grammar into a constraint, within bounds of size and time."""

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from localllm.engine.constraint.constraint import Constraint, reason
from localllm.engine.constraint.json_rules import JsonRules, Rules
from localllm.engine.constraint.json_schema import NOT_ENFORCED, enforceable
from localllm.engine.constraint.keys import Keys
from localllm.engine.constraint.trial import on_deep_stack, tried_arguments, tried_grammar
from localllm.engine.constraint.vocabulary import ConstraintVocabulary
from localllm.errors import RequestError

log = logging.getLogger(__name__)

# llguidance counts its work. With these limits, patterns such as (a{1000}){1000} and rules that double 30 times fail
# within half a second, at compilation or when reached, and a schema of 2,000 properties with patterns passes.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=10_000,  # two for each property that an open object has
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

# Whitespace that a model writes between reasoning and answer; JSON itself may not begin with it.
BLANKS = r"/[\x20\x0A\x0D\x09]{0,4}/"
ANSWER = "answer"

JSON_MARKS = b'{}[]":,'

# Between JSON's tokens: a space, or newlines and an indent, as in llama.cpp's grammars. Weak models write whitespace
# wherever it is allowed.
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
OVERRIDES = {"lenient": False, "coerce_one_of": True, "whitespace_pattern": WHITESPACE}
# GBNF: comments, literals, and character classes; escapes of code points; escapes that gbnf_to_lark understands.
GBNF_TOKEN = re.compile(r'#[^\n]*|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
CODE_POINT = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)|[&~]", re.DOTALL)
CLASS_MARKS = "[]^-&~"  # within a character class; two & or ~ are operators in llguidance
UNESCAPED = ("&", "~", "\\[", "\\]")  # the escapes of brackets are unknown within Lark's literals
ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
LONGEST_NOTE = 1000  # characters of a log line


class ConstraintKind(StrEnum):
    """The language that a constraint is written in. JSON is any object and takes no source."""

    JSON = "json"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GBNF = "gbnf"
    LARK = "lark"


def compile_constraint(
    kind: ConstraintKind, source: str, vocabulary: ConstraintVocabulary, after: tuple[str, str] | None = None
) -> Constraint:
    """Return a constraint in its initial state.

    JSON Schema is draft 2020-12, with the property order fixed by the schema; keywords that no grammar can enforce are
    left out and logged (`json_schema`), and a oneOf that cannot be enforced becomes an anyOf. after: the texts that
    open and close a section of free text that comes first, such as reasoning; an opening of "" means that the prompt
    has already opened it. Raises RequestError, saying what and where, if the source is malformed, too large, too
    complex (see `trial`) or unsatisfiable.
    """
    grammar, notes = tried_grammar(kind, source)
    for note in notes:
        note_once(note)
    if after:
        inner = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
        grammar = json.dumps({"grammars": [{"lark_grammar": _section(*after, vocabulary)}, inner | {"name": ANSWER}]})
    is_json = kind in (ConstraintKind.JSON, ConstraintKind.JSON_SCHEMA)
    keys = Keys(after[1].encode() if after else b"") if is_json else None
    return on_deep_stack(lambda: _compiled(kind, grammar, vocabulary, keys))


def _compiled(kind: ConstraintKind, grammar: str, vocabulary: ConstraintVocabulary, keys: Keys | None) -> Constraint:
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise RequestError(f"The {kind} constraint cannot be used: {reason(matcher)}")
    if warnings := matcher.get_grammar_warnings():
        note_once(f"a {kind} constraint is not enforced in full: {'; '.join(warnings)}"[:LONGEST_NOTE])
    constraint = Constraint(matcher, vocabulary, keys)
    needed = JSON_MARKS if kind in (ConstraintKind.JSON, ConstraintKind.JSON_SCHEMA) else constraint.forced_text()
    if lacking := vocabulary.unwritable(needed):
        raise RequestError(
            f"The {kind} constraint needs {' '.join(lacking)}, which no token of this model's vocabulary can write. "
            "Leave the constraint out, or choose another model."
        )
    try:
        constraint.mask()
    except RequestError as error:
        raise RequestError(f"No finite text satisfies the {kind} constraint, or it is too complex. {error}") from error
    return constraint


def enforced(schemas: Mapping[str, Mapping[str, Any]], opened: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """The parts of objects' JSON Schemas that a grammar can enforce, by the schemas' names. Raises RequestError.

    opened: the names of those whose objects allow unlisted properties too; see json_schema.enforceable.
    """
    found = json.loads(tried_arguments(json.dumps([schemas, sorted(opened)])))
    return {name: {} if one is True else {"enum": []} if one is False else one for name, one in found.items()}


@lru_cache(maxsize=256)
def note_once(text: str) -> None:
    """Log a warning unless it is among the last 256."""
    log.warning(text)


def grammar_of(kind: ConstraintKind, source: str) -> tuple[str, list[str]]:
    """llguidance's grammar for a constraint, and sentences on what it does not enforce. Runs in a child (`trial`).

    Raises RequestError.
    """
    if kind == ConstraintKind.REGEX:
        return str(LLMatcher.grammar_from_regex(source)), []
    if kind == ConstraintKind.LARK:
        return str(LLMatcher.grammar_from_lark(source)), []
    if kind == ConstraintKind.GBNF:
        return str(LLMatcher.grammar_from_lark(_lark_from_gbnf(source))), []
    schema, loosened = ({"type": "object"}, []) if kind == ConstraintKind.JSON else enforceable(source)
    notes = []
    if loosened:
        keywords = sorted({place.split()[0] for place in loosened if place.split()[0] in NOT_ENFORCED})
        notes = [f"a JSON Schema has keywords that are not enforced: {', '.join(keywords) or 'unknown ones'}"]
    if '"oneOf"' in source:
        whole = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=OVERRIDES)
        is_error, problems = LLMatcher.validate_grammar_with_warnings(whole, None, limits=LIMITS)
        notes += [] if is_error else [f"a JSON Schema is not enforced in full: {one}" for one in problems]
    rules = Rules()
    value = JsonRules(schema, rules, "b", OVERRIDES).value(schema)
    return str(LLMatcher.grammar_from_lark(f"start: {value}\nblank: /{WHITESPACE}/\nb: blank?\n{rules}\n")), notes


def _section(opening: str, closing: str, vocabulary: ConstraintVocabulary) -> str:
    """A grammar of free text between markers, then the answer. Markers are made of text and control tokens."""
    ending, *rest = vocabulary.pieces(closing)
    # A suffix ends the text at its first occurrence; a control token ends it because it is not text.
    stops = f"[suffix={json.dumps(ending)}]" if isinstance(ending, str) else ""
    end = _written(rest if stops else [ending, *rest])
    start = _written(vocabulary.pieces(opening))
    return f"start: {start} section {end} {BLANKS} @{ANSWER}\nsection{stops}: /(.|\\n)*/\n"


def _written(pieces: Sequence[int | str]) -> str:
    return " ".join(json.dumps(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in pieces)


def _respelled(token: re.Match[str]) -> str:
    """A token of a GBNF grammar with the characters that it gives by their code points, as gbnf_to_lark needs it."""
    if token[0].startswith("#"):
        return token[0]
    special = CLASS_MARKS if token[0].startswith("[") else ""

    def spelled(match: re.Match[str]) -> str:
        if digits := match[1] or match[2] or match[3]:
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise ValueError(f"{match[0]} is not a character")
            character = chr(code)
        elif (special and match[0].startswith("\\")) or match[0] not in UNESCAPED:
            return match[0]
        else:
            character = match[0][-1]
        is_plain = character not in special and (character.isprintable() or character > "\x7f")
        return ESCAPES.get(character) or (character if is_plain else f"\\x{ord(character):02x}")

    return CODE_POINT.sub(spelled, token[0])


def _lark_from_gbnf(source: str) -> str:
    try:
        written = source if is_lark_syntax(source) else GBNF_TOKEN.sub(_respelled, source)
        return str(any_to_lark(written))
    except Exception as error:  # the converter has no error class of its own
        raise RequestError(f"The gbnf constraint is not a grammar: {error}") from error
