"""Schemas as pydantic and zod write them, and white space, which weak models repeat endlessly."""

import json
import logging
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest
from constraint_walk import Walker
from pydantic import BaseModel, Field, TypeAdapter

from gguf_io import load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.constraint.compile import note_once
from localllm.engine.constraint.json_schema import enforceable

jsonschema = pytest.importorskip("jsonschema", reason="the validator that serves as oracle is not installed")


class Leaf(BaseModel):
    kind: Literal["leaf"]
    size: int = Field(ge=0, le=9)


class Branch(BaseModel):
    kind: Literal["branch"]
    parts: list["Leaf | Branch"] = Field(max_length=1)


class Everything(BaseModel):
    tags: set[Literal["a", "b"]] = Field(max_length=2)
    scores: dict[Literal["x", "y"], int]
    node: Leaf | Branch = Field(discriminator="kind")
    code: str = Field(pattern="^[A-Z]{2}$")
    key: UUID | None


# As z.toJSONSchema and zod-to-json-schema write z.record, z.never, z.set and z.nullable.
ZOD: dict[str, Any] = {
    "record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 2,
    },
    "record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "boolean"},
        "required": ["a", "b"],
    },
    "record of a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^k[0-9]$"},
        "additionalProperties": {"type": "boolean"},
    },
    "never": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"not": {}}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "set": {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "maxItems": 1},
    "nullable": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
}


@pytest.fixture(scope="module")
def tokenizer(data_dir: Path) -> Tokenizer:
    with open_model(data_dir / "vocab" / "ggml-vocab-gpt-2.gguf") as file:
        return load_tokenizer(file)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> ConstraintVocabulary:
    return ConstraintVocabulary(tokenizer)


@pytest.mark.parametrize("name", ZOD)
def test_zod(name: str, vocabulary: ConstraintVocabulary, tokenizer: Tokenizer) -> None:
    constraint = compile_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(ZOD[name]), vocabulary)
    texts = [text for seed in range(8) if (text := Walker(tokenizer).text(constraint.fork(), seed))]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), ZOD[name])


def test_pydantic(vocabulary: ConstraintVocabulary, tokenizer: Tokenizer) -> None:
    adapter = TypeAdapter(Everything)
    source = json.dumps(adapter.json_schema())
    assert enforceable(source)[1] == ["uniqueItems at #/properties/tags"]
    constraint = compile_constraint(ConstraintKind.JSON_SCHEMA, source, vocabulary)
    texts = [text for seed in range(12) if (text := Walker(tokenizer).text(constraint.fork(), seed))]
    assert texts
    for text in texts:
        adapter.validate_json(text)


@pytest.mark.parametrize(
    ("schema", "left", "lost"),
    [
        ({"type": "string", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, []),
        ({"type": "string", "format": "binary"}, {"type": "string"}, ["format at #"]),
        ({"minLenght": 3}, {}, ["minLenght at #"]),
        ({"x-order": 1, "title": "T"}, {}, []),
        ({"items": {"not": {"type": "null"}}}, {"type": "array", "items": {}}, ["not at #/items"]),
        (
            {"$defs": {"K": {"enum": ["a"]}}, "propertyNames": {"$ref": "#/$defs/K"}},
            {
                "$defs": {"K": {"enum": ["a"]}},
                "type": "object",
                "properties": {"a": True},
                "additionalProperties": False,
            },
            [],
        ),
        ({"propertyNames": {"minLength": 2}}, {}, ["propertyNames at #"]),
        (
            {"properties": {"a": {}}},
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
            [],
        ),
        ({"type": "string", "pattern": "^(?=.*[0-9])a"}, {"type": "string"}, ["pattern at #"]),
        (
            {"format": "duration", "pattern": "^P(?!$)"},  # z.iso.duration
            {"format": "duration"},
            ["pattern at #"],
        ),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e30}, {"exclusiveMinimum": 0}, ["exclusiveMaximum at #"]),
        ({"multipleOf": 0.123456789, "maximum": 9}, {"maximum": 9}, ["multipleOf at #"]),
        ({"patternProperties": {"a*": {}, "aa*": {}}}, {}, ["patternProperties at #"]),
        ({"maxItems": 2.0}, {"maxItems": 2}, []),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": {"$ref": "#", "$id": "u", "minItems": 1}},
            {
                "type": "array",
                "items": {"$ref": "#/$defs/root"},
                "$defs": {"root": {"type": "array", "items": {"$ref": "#/$defs/root"}}},
            },
            [],
        ),
        (
            {"properties": {"a": {}}, "required": ["b"]},
            {"type": "object", "properties": {"a": {}}, "required": ["b"]},
            [],
        ),
        ({"allOf": [{"properties": {"a": {}}}]}, {"allOf": [{"properties": {"a": {}}}]}, []),
    ],
)
def test_what_is_left_of_a_schema(schema: Any, left: Any, lost: list[str]) -> None:
    assert enforceable(json.dumps(schema)) == (left, lost)


def test_what_is_not_enforced_is_logged(vocabulary: ConstraintVocabulary, caplog: pytest.LogCaptureFixture) -> None:
    note_once.cache_clear()
    with caplog.at_level(logging.INFO, "localllm"):
        compile_constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', vocabulary)
        compile_constraint(ConstraintKind.JSON_SCHEMA, '{"oneOf": [{"type": "number"}, {"minimum": 2}]}', vocabulary)
    assert "not enforced: uniqueItems" in caplog.text and "anyOf" in caplog.text


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{\n  "a": 1,\n  "b": [\n    1\n  ]\n}', True),
        ('{"a":  1,"b":[]}', False),
        ('{"a":\n\n\n1,"b":[]}', False),
        ("{\n" + " " * 21 + '"a":1,"b":[]}', False),
        ('{"a":\t1,"b":[]}', False),
    ],
)
def test_white_space_is_bounded(vocabulary: ConstraintVocabulary, tokenizer: Tokenizer, text: str, fits: bool) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": numbers}, "required": ["a", "b"]}
    constraint = compile_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), vocabulary)
    single = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    for at, byte in enumerate(text.encode()):
        token = single[bytes([byte])]
        if not constraint.mask()[token]:
            assert not fits, text[:at]
            return
        constraint.accept(token)
    assert fits and constraint.is_complete
