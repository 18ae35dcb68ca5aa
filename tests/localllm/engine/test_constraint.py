"""Constraints of every kind on real vocabularies: masks, state, forced text and refusals."""

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from constraint_walk import Walker

from gguf_io import load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.errors import RequestError
from tests.fakes.byte_vocabulary import ByteVocabulary

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Vocabulary:
    """A tokenizer with the parts that constraints need."""

    def __init__(self, path: Path) -> None:
        with open_model(path) as file:
            self.tokenizer: Tokenizer = load_tokenizer(file)
        self.constraints = ConstraintVocabulary(self.tokenizer)
        self.walker = Walker(self.tokenizer)

    def compile(self, kind: str, source: object = "") -> Constraint:
        text = source if isinstance(source, str) else json.dumps(source)
        return compile_constraint(ConstraintKind(kind), text, self.constraints)

    def accept(self, constraint: Constraint, text: str) -> None:
        lead = len(self.tokenizer.encode("\n", add_special=False))
        for token in self.tokenizer.encode("\n" + text, add_special=False)[lead:]:
            constraint.accept(token)

    def text(self, tokens: list[int]) -> bytes:
        return b"".join(self.tokenizer.token_bytes(token) for token in tokens)


@pytest.fixture(scope="module", params=["gpt-2", "llama-spm"])
def vocabulary(data_dir: Path, request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(data_dir / "vocab" / f"ggml-vocab-{request.param}.gguf")


@pytest.mark.parametrize("seed", range(6))
def test_masks_are_those_of_the_enumerated_language(vocabulary: Vocabulary, seed: int) -> None:
    numbers = ["".join(digits) for count in (1, 2) for digits in product("0123456789", repeat=count)]
    language = {(number + word).encode() for number in numbers for word in ("cat", "dogs", "é")}
    prefixes = {text[:length] for text in language for length in range(len(text) + 1)}
    constraint = vocabulary.compile("regex", "[0-9]{1,2}(cat|dogs|é)")
    tokenizer = vocabulary.tokenizer
    text = b""
    rng = np.random.default_rng(seed)
    for _ in range(12):
        expected = [
            (text in language) if token in tokenizer.eog_ids
            else bool(piece := tokenizer.token_bytes(token, skip_special=True)) and text + piece in prefixes
            for token in range(tokenizer.vocab_size)
        ]  # fmt: skip
        forced = constraint.forced_tokens()
        if forced:  # of all tokenizations of a forced text, the tokenizer's own
            assert expected[forced[0]]
            expected = [token == forced[0] for token in range(tokenizer.vocab_size)]
        np.testing.assert_array_equal(constraint.mask(), expected)
        assert constraint.is_complete == (text in language)
        if text in language:
            break
        token = int(rng.choice(np.flatnonzero(expected)))
        constraint.accept(token)
        text += tokenizer.token_bytes(token)
    assert text in language


GBNF = 'root ::= item ("," item)*\nitem ::= [a-c]+ "=" [0-9]{1,3}'
LARK = 'start: item ("," item)*\nitem: /[a-c]+/ "=" /[0-9]{1,3}/'
ITEMS = r"[a-c]+=[0-9]{1,3}(,[a-c]+=[0-9]{1,3})*"


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", r"[A-Z][a-z]{2,5} \d{4}", r"[A-Z][a-z]{2,5} \d{4}"),
        ("regex", r"(yes|no)!?", r"(yes|no)!?"),
        ("gbnf", GBNF, ITEMS),
        ("lark", LARK, ITEMS),
    ],
)
def test_what_is_sampled_belongs_to_the_language(vocabulary: Vocabulary, kind: str, source: str, pattern: str) -> None:
    constraint = vocabulary.compile(kind, source)
    texts = [vocabulary.walker.text(constraint.fork(), seed) for seed in range(6)]
    finished = [text for text in texts if text is not None]
    assert finished
    for text in finished:
        assert re.fullmatch(pattern, text), text


def test_json_mode_gives_objects(vocabulary: Vocabulary) -> None:
    constraint = vocabulary.compile("json")
    values = [vocabulary.walker.text(constraint.fork(), seed) for seed in range(8)]
    finished = [json.loads(value) for value in values if value is not None]
    assert finished
    assert all(isinstance(value, dict) for value in finished)


def test_the_end_is_allowed_only_where_the_text_is_complete(vocabulary: Vocabulary) -> None:
    constraint = vocabulary.compile("json_schema", PERSON)
    ends = sorted(vocabulary.tokenizer.eog_ids)
    vocabulary.accept(constraint, '{"name": "Bob", "age": 3')
    assert not constraint.mask()[ends].any() and not constraint.is_complete
    vocabulary.accept(constraint, "}")
    assert constraint.is_complete and constraint.is_finished
    assert np.flatnonzero(constraint.mask()).tolist() == ends
    constraint.accept(ends[0])
    assert constraint.is_finished


def test_tokens_that_are_not_text_are_never_allowed(vocabulary: Vocabulary) -> None:
    constraint = vocabulary.compile("regex", "(?s:.*)")
    tokenizer = vocabulary.tokenizer
    silent = [token for token in range(tokenizer.vocab_size) if not tokenizer.token_bytes(token, skip_special=True)]
    allowed = [token for token in silent if constraint.mask()[token]]
    assert set(allowed) <= tokenizer.eog_ids


def test_a_fork_has_a_separate_state(vocabulary: Vocabulary) -> None:
    constraint = vocabulary.compile("json_schema", PERSON)
    vocabulary.accept(constraint, '{"name": "B')
    before = constraint.mask().copy()
    copy = constraint.fork()
    tokens = np.flatnonzero(before)[[10, 500]]
    constraint.accept(int(tokens[0]))
    np.testing.assert_array_equal(copy.mask(), before)
    after = constraint.mask().copy()
    copy.accept(int(tokens[1]))
    np.testing.assert_array_equal(constraint.mask(), after)


def test_forced_text_is_what_must_follow(vocabulary: Vocabulary) -> None:
    constraint = vocabulary.compile("regex", "(left|right) hand side, of course[.!]")
    assert constraint.forced_tokens() == []
    vocabulary.accept(constraint, "lef")
    forced = constraint.forced_tokens()
    assert forced
    assert b"t hand side, of course".startswith(vocabulary.text(forced))
    for token in forced:
        assert np.flatnonzero(constraint.mask()).tolist() == [token]
        constraint.accept(token)


def test_a_forbidden_token_is_refused(vocabulary: Vocabulary) -> None:
    constraint = vocabulary.compile("regex", "a+")
    with pytest.raises(RequestError, match="cannot accept token"):
        vocabulary.accept(constraint, "b")


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{", "The JSON Schema cannot be read as JSON: Expecting"),
        ("json_schema", "[]", "The JSON Schema is of type list"),
        ("json_schema", "false", "Unsatisfiable"),
        ("json_schema", {"enum": []}, "Unsatisfiable"),
        ("json_schema", {"$ref": "#"}, "No finite text satisfies the json_schema constraint"),
        ("json_schema", {"$ref": "http://example.com/x"}, "http://example.com/x"),
        ("json_schema", {"not": {}}, "Unsatisfiable schema"),
        ("json_schema", '{"items":' * 65 + "{}" + "}" * 65, "deeper than 64 levels"),
        ("json_schema", '{"items":' * 20000 + "{}" + "}" * 20000, "deeper than 128 levels"),
        ("json_schema", {"anyOf": [{"const": number} for number in range(6000)]}, "more than 5000 schemas"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: nowhere", "unknown name"),
        ("lark", "start: start", "No finite text satisfies the lark constraint"),
        ("gbnf", "root ::= nowhere", "The gbnf constraint is not a grammar: Rule 'nowhere' not found"),
        ("gbnf", "root ::= " + "(" * 5000, "The gbnf constraint is not a grammar"),
        ("regex", "a" * 300_000, "has 300000 characters"),
    ],
)
def test_refusals_say_what_and_where(vocabulary: Vocabulary, kind: str, source: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        vocabulary.compile(kind, source)


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("regex", "x|y((a{1000}){1000}){100}", "yaaaa"),
        ("lark", 'start: "x" | "y" A\nA: /((a{1000}){1000}){100}/', "yaaaa"),
        (
            "json_schema",
            {"items": {"pattern": "^((a{1000}){1000}){100}$", "type": "string"}, "type": "array"},
            '["aaaa',
        ),
        ("lark", "start: R0\n" + "".join(f"R{n}: R{n + 1} R{n + 1}\n" for n in range(28)) + 'R28: "a"', "a"),
    ],
)
def test_exploding_patterns_are_refused_at_once_or_where_they_are_met(
    vocabulary: Vocabulary, kind: str, source: object, text: str
) -> None:
    with pytest.raises(RequestError, match=r"too many states|too big"):
        constraint = vocabulary.compile(kind, source)
        for character in text:
            vocabulary.accept(constraint, character)
            constraint.mask()
            constraint.forced_tokens()


PERSON_GBNF = 'root ::= "{" [a-z]+ "}"'


@pytest.mark.parametrize(
    ("lacking", "kind", "source", "message"),
    [
        (b"{", "json", "", r"json constraint needs \{, which no token"),
        (b'":', "json_schema", PERSON, 'json_schema constraint needs " :, which'),
        (b"{", "gbnf", PERSON_GBNF, r"gbnf constraint needs \{, which"),
        ("é".encode(), "regex", "café!", "regex constraint needs é, which"),
        (b"0123456789", "json_schema", {"type": "integer", "minimum": 0}, "no token of this model's vocabulary"),
    ],
)
def test_what_the_vocabulary_cannot_write_is_refused(lacking: bytes, kind: str, source: object, message: str) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(RequestError, match=message):
        compile_constraint(ConstraintKind(kind), text, ConstraintVocabulary(ByteVocabulary(lacking=lacking)))


def test_what_the_vocabulary_cannot_write_is_never_skipped() -> None:
    tokenizer = ByteVocabulary(lacking=b"}")
    constraint = compile_constraint(ConstraintKind.GBNF, PERSON_GBNF, ConstraintVocabulary(tokenizer))
    for character in "{a":
        constraint.accept(tokenizer.encode(character)[0])
    assert tokenizer.encode("z")[0] in np.flatnonzero(constraint.mask())
    ending = compile_constraint(ConstraintKind.REGEX, "[ab]{2}[}]c", ConstraintVocabulary(tokenizer))
    for character in "ab":
        assert ending.forced_tokens() == []
        ending.accept(tokenizer.encode(character)[0])
    with pytest.raises(RequestError, match="no token of this model's vocabulary"):
        ending.mask()


@pytest.mark.parametrize(
    ("grammar", "text", "wrong"),
    [
        (r'root ::= "\x41\u0042\U00000043"', "ABC", "B"),
        (r'root ::= "\u00e9\U0001F600\xe9"', "é😀é", "e"),
        (r'root ::= "\u0022\x5c\u000a\[\u005D"', '"\\\n[]', "["),
        (r"root ::= [\u00e9-\u00FF]+", "éÿ", "z"),
        (r"root ::= [\x5d\u005b\u002d\x5e&&a~\U00000020]+", "][-^&a~ ", "b"),
        (r"root ::= [^\x00-\x1f\u0041]+", "B é", "A"),
        ('root ::= "a" # "\\u0062\\u"', "a", "b"),
    ],
)
def test_gbnf_gives_characters_by_their_code_points(grammar: str, text: str, wrong: str) -> None:
    vocabulary = ConstraintVocabulary(ByteVocabulary())
    for written, fits in ((text, True), (wrong, False)):
        state = compile_constraint(ConstraintKind.GBNF, grammar, vocabulary)
        assert (state.accept_text(vocabulary.tokens_of(written)) and state.is_complete) == fits


@pytest.mark.parametrize("grammar", [r'root ::= "\ud83d"', r'root ::= "\U00110000"', r'root ::= "\u12"', 'root ::= "a'])
def test_gbnf_without_such_characters_is_refused(grammar: str) -> None:
    with pytest.raises(RequestError, match="not a grammar"):
        compile_constraint(ConstraintKind.GBNF, grammar, ConstraintVocabulary(ByteVocabulary()))
