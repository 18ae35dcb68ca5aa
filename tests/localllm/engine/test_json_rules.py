"""JSON Schemas as rules of a grammar: the order of properties, and bounds on what models repeat."""

import itertools
import json
from typing import Any

import pytest

from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.constraint.compile import OVERRIDES, enforced
from localllm.engine.constraint.json_rules import DEEPEST, MOST_PROPERTIES, JsonRules, Rules
from localllm.errors import RequestError
from tests.fakes.byte_vocabulary import ByteVocabulary

VOCABULARY = ConstraintVocabulary(ByteVocabulary())
BASH: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}, "note": {"enum": ["a", "b"]}},
    "required": ["command"],
}
ITEM = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/$defs/Item"}}, "required": ["x"]}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {"list": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "maxItems": 2}, "free": {}},
    "$defs": {"Item": ITEM},
}

SLASHED = {"properties": {'a/"b': {"type": "null"}}, "additionalProperties": {"type": "integer"}}


def fits(schema: Any, text: str, any_order: bool = True) -> bool:
    rules = Rules()
    root = enforced({"a": schema})["a"]
    value = JsonRules(root, rules, "b", OVERRIDES, any_order).value(root)
    return accepts(ConstraintKind.LARK, f'start: {value}\nb: " "?\n{rules}\n', text)


def accepts(kind: ConstraintKind, source: str, text: str) -> bool:
    state = compile_constraint(kind, source, VOCABULARY)
    return state.accept_text([byte + 1 for byte in text.encode()]) and state.is_complete


def test_properties_in_any_order() -> None:
    values = {"command": '"ls"', "timeout": "1.5", "note": '"b"'}
    for size in range(4):
        for names in itertools.permutations(values, size):
            text = "{" + ", ".join(f'"{name}": {values[name]}' for name in names) + "}"
            in_order = list(names) == [name for name in values if name in names]
            assert fits(BASH, text) == ("command" in names)
            assert fits(BASH, text, any_order=False) == ("command" in names and in_order)
    assert not fits(BASH, '{"command": "ls", "command": "ls"}') and not fits(BASH, '{"command": "ls", "other": 1}')


@pytest.mark.parametrize(
    ("schema", "text", "right"),
    [
        (NESTED, '{"free": [{"b": null}], "list": [{"y": {"x": 1}, "x": 2}, {"x": 3}]}', True),
        (NESTED, '{"list": [{"y": {"y": {"x": 1}}, "x": 2}]}', False),
        (NESTED, '{"list": [{"x": 1},{"x": 1},{"x": 1}]}', False),
        ({**BASH, "additionalProperties": {"type": "null"}}, '{"n": null, "note": "a", "command": ""}', True),
        ({**BASH, "additionalProperties": {"type": "null"}}, '{"timeout": null, "command": ""}', False),
        (SLASHED, '{"a/\\"b": null, "a/b": 1}', True),
        (SLASHED, '{"a/\\"b": 1}', False),
        ({"type": "object"}, '{"a": 1, "b": [true, {}]}', True),
        ({"type": "object", "properties": {}}, "{}", True),
        ({"type": ["object", "null"], "properties": {"a": {}, "b": {}}}, '{"b": 1, "a": 2}', True),
        ({"type": ["object", "null"], "properties": {"a": {}, "b": {}}}, "null", True),
        ({"anyOf": [{"type": "string"}, BASH]}, '{"note": "a", "command": ""}', True),
        ({"type": "object", "required": ["k"], "additionalProperties": {"type": "integer"}}, '{"a": 1, "k": 2}', True),
        ({"type": "object", "required": ["k"], "additionalProperties": {"type": "integer"}}, '{"a": 1}', False),
        ({"properties": {'é "/\\': {"type": "null"}}, "required": ['é "/\\']}, '{"é \\"/\\\\": null}', True),
        ({"type": "string", "minLength": 1, "maxLength": 2}, '"\\u00e9é"', True),
        ({"type": "string", "minLength": 1, "maxLength": 2}, '""', False),
        ({"enum": ["x/y", 2, None, True]}, "true", True),
        ({"type": "integer", "enum": [1, 2]}, "2", True),
        ({"type": "array", "minItems": 2, "items": {"type": "null"}}, "[null, null]", True),
        ({"type": "array", "minItems": 2, "items": {"type": "null"}}, "[null]", False),
    ],
)
def test_values(schema: Any, text: str, right: bool) -> None:
    assert fits(schema, text) == right


def test_large_objects() -> None:
    def schema(size: int) -> dict[str, Any]:
        names = [f"p{number}" for number in range(size)]
        return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}

    def written(numbers: Any) -> str:
        return json.dumps({f"p{number}": number for number in numbers})

    most = MOST_PROPERTIES
    assert fits(schema(most), written(reversed(range(most)))) and fits(schema(most), written(range(most)), False)
    assert not fits(schema(most), written(range(most - 1)))
    assert fits(schema(most + 1), written(range(most + 1)))
    assert not fits(schema(most + 1), written(reversed(range(most + 1)))), "in the schema's order"


ENDLESS = [
    ({"type": "number"}, "1e999", "1e9999"),
    ({"type": "number"}, "9" * 80, "9" * 81),
    ({"type": "number"}, f"-0.{'3' * 40}", f"0.{'3' * 41}"),
    ({"type": "integer"}, f"-{'9' * 80}", "9" * 81),
    ({"type": "number", "minimum": 0, "maximum": 1}, "0.123456789012345678", f"0.{'3' * 200}"),
    ({"type": "integer", "minimum": 5}, str(2**256), "7" * 200),
    ({}, f"{'[' * DEEPEST}1{']' * DEEPEST}", f"{'[' * 50}1{']' * 50}"),
    ({}, '{"a":' * DEEPEST + "1" + "}" * DEEPEST, '{"a":' * 50 + "1" + "}" * 50),
    ({"type": "object"}, json.dumps({"k" * 250: 1}), json.dumps({"k" * 251: 1})),
    ({"additionalProperties": {"type": "null"}, "type": "object"}, '{"a":null}', json.dumps({"k" * 251: None})),
]


@pytest.mark.parametrize(("schema", "right", "endless"), ENDLESS)
def test_what_a_model_could_repeat_has_a_bound(schema: Any, right: str, endless: str) -> None:
    source = json.dumps(schema)
    assert accepts(ConstraintKind.JSON_SCHEMA, source, right)
    assert not accepts(ConstraintKind.JSON_SCHEMA, source, endless)


def test_json_mode_is_an_object_with_bounds() -> None:
    assert accepts(ConstraintKind.JSON, "", '{"a": [1, {"b": "c"}],\n  "d": null}')
    for text in ("[]", '"x"', f'{{"a": {"[" * 60}', f'{{"a": {"1" * 100}'):
        assert not accepts(ConstraintKind.JSON, "", text)


def test_long_strings_and_lists_are_possible() -> None:
    schema = {"type": "object", "properties": {"t": {"type": "string"}, "l": {"type": "array"}}, "required": ["t"]}
    text = json.dumps({"t": "x" * 60_000, "l": list(range(3000))})
    assert accepts(ConstraintKind.JSON_SCHEMA, json.dumps(schema), text)
    many = json.dumps({f"key {number}": number for number in range(1000)})
    assert accepts(ConstraintKind.JSON, "", many)


def test_an_unsatisfiable_part_is_reported_without_the_grammar() -> None:
    schema = {"properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}, "required": ["a"]}
    with pytest.raises(RequestError, match=r"cannot be used: Unsatisfiable schema: minItems \(3\)[^\n]*$"):
        compile_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), VOCABULARY)


def written(schema: Any, wanted: str) -> str:
    """What a model writes that prefers this text, byte by byte, and otherwise the letters of the alphabet."""
    state = compile_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), VOCABULARY)
    text = b""
    while not state.is_finished and len(text) < 80:
        mask = state.mask()
        options = [*wanted.encode()[len(text) : len(text) + 1], *b'b"}:1,', *range(32, 127)]
        byte = next(byte for byte in options if mask[byte + 1])
        state = state.fork()
        state.accept(byte + 1)
        text += bytes([byte])
    return text.decode()


def test_names_are_not_repeated() -> None:
    by_pattern = {
        "type": "object",
        "propertyNames": {"pattern": "^[ab]+$"},
        "additionalProperties": {"type": "integer"},
    }
    assert written(by_pattern, '{"a":1,"a":1,"a":1}').startswith('{"a":1,"ab')
    assert written({"type": "object"}, '{"a":{"a":1},"a":2}').startswith('{"a":{"a":1},"ab')
    assert written({"type": "object"}, '{"k":[{"k":1},{"k":2}]}') == '{"k":[{"k":1},{"k":2}]}'
    only_one = {"type": "object", "propertyNames": {"pattern": "^a$"}, "additionalProperties": {"type": "integer"}}
    assert written(only_one, '{"a":1,"a":1}') == '{"a":1,"a":1}'
    after = compile_constraint(ConstraintKind.JSON, "", VOCABULARY, ("<t>", "</t>"))
    for byte in b'<t>{"a": {"a"</t>{"a":1,"':
        after.accept(byte + 1)
    assert after.mask()[ord("a") + 1]
    after.accept(ord("a") + 1)
    assert not after.mask()[ord('"') + 1] and after.mask()[ord("b") + 1]
