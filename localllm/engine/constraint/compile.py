"""From a user's JSON mode, schema, regex or grammar to a constraint, within bounds of size and time."""

import json
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from localllm.engine.constraint.constraint import Constraint, reason
from localllm.engine.constraint.json_schema import NOT_ENFORCED, enforceable
from localllm.engine.constraint.vocabulary import ConstraintVocabulary
from localllm.errors import RequestError

log = logging.getLogger(__name__)

MAX_SOURCE_CHARACTERS = 256 * 1024

# llguidance counts its work. With these, patterns such as (a{1000}){1000} and rules that double 30 times are refused
# within half a second, at compilation or where they are met, and a schema of 2,000 properties with patterns passes.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

# What a model writes between its reasoning and its answer, which JSON itself may not begin with.
BLANKS = r"/[\x20\x0A\x0D\x09]{0,4}/"
ANSWER = "answer"

JSON_MARKS = b'{}[]":,'

# Between JSON's tokens: a space, or new lines and an indent, as llama.cpp's grammars have it. Weak models write blanks
# wherever they may.
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
OVERRIDES = {"lenient": False, "coerce_one_of": True, "whitespace_pattern": WHITESPACE}
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
    """Return a constraint at its beginning.

    JSON Schema is that of draft 2020-12, with a property order fixed by the schema; keywords that no grammar can keep
    are left out and logged (`json_schema`), and a oneOf that cannot be kept is an anyOf. after: the texts that open and
    close a section of free text, such as reasoning, which comes first; an opening of "" means that the prompt has
    opened it already. Raises RequestError, saying what and where, on a source that is malformed, too large or
    unsatisfiable.
    """
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise RequestError(
            f"The {kind} constraint has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are allowed."
        )
    grammar = _grammar(kind, source)
    if after:
        inner = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
        grammar = json.dumps({"grammars": [{"lark_grammar": _section(*after, vocabulary)}, inner | {"name": ANSWER}]})
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise RequestError(f"The {kind} constraint cannot be used: {reason(matcher)}")
    if warnings := matcher.get_grammar_warnings():
        note_once(f"a {kind} constraint is not enforced in full: {'; '.join(warnings)}"[:LONGEST_NOTE])
    constraint = Constraint(matcher, vocabulary.vocab_size)
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


def embedded(schema: Mapping[str, Any]) -> Any:
    """A JSON Schema as it may stand after %json in a Lark grammar, without what cannot be enforced.

    Raises RequestError.
    """
    found, _ = enforceable(json.dumps(schema))
    found = {} if found is True else {"enum": []} if found is False else found
    return {**found, "x-guidance": OVERRIDES}


@lru_cache(maxsize=256)
def note_once(text: str) -> None:
    """Log a warning, once as long as it is among the last ones."""
    log.warning(text)


def _grammar(kind: ConstraintKind, source: str) -> str:
    if kind == ConstraintKind.REGEX:
        return str(LLMatcher.grammar_from_regex(source))
    if kind == ConstraintKind.LARK:
        return str(LLMatcher.grammar_from_lark(source))
    if kind == ConstraintKind.GBNF:
        return str(LLMatcher.grammar_from_lark(_lark_from_gbnf(source)))
    schema, loosened = ({"type": "object"}, []) if kind == ConstraintKind.JSON else enforceable(source)
    if loosened:
        keywords = sorted({place.split()[0] for place in loosened if place.split()[0] in NOT_ENFORCED})
        note_once(f"a JSON Schema has keywords that are not enforced: {', '.join(keywords) or 'unknown ones'}")
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=OVERRIDES))
    except ValueError as error:
        raise RequestError(f"The JSON Schema cannot be used: {error}") from error


def _section(opening: str, closing: str, vocabulary: ConstraintVocabulary) -> str:
    """A grammar of free text between markers, and the answer. Markers are text and control tokens, which never are."""
    ending, *rest = vocabulary.pieces(closing)
    # A suffix ends the text where it first stands; a control token ends it because it is no text.
    stops = f"[suffix={json.dumps(ending)}]" if isinstance(ending, str) else ""
    end = _written(rest if stops else [ending, *rest])
    start = _written(vocabulary.pieces(opening))
    return f"start: {start} section {end} {BLANKS} @{ANSWER}\nsection{stops}: /(.|\\n)*/\n"


def _written(pieces: Sequence[int | str]) -> str:
    return " ".join(json.dumps(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in pieces)


def _lark_from_gbnf(source: str) -> str:
    try:
        return str(any_to_lark(source))
    except Exception as error:  # the converter raises what its parts raise, whatever the fault in the source
        raise RequestError(f"The gbnf constraint is not a grammar: {error}") from error
