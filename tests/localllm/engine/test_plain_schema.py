"""Schemas of every draft in one form, and what is refused with its place."""

import json
from typing import Any

import pytest

from localllm.engine.constraint.plain_schema import malformed, plain
from localllm.errors import RequestError


@pytest.mark.parametrize("pattern", ["(x", "x)", "[9-0]", "b{2,1}", "+b", "b|*", "[q", "q\\", "(?<n>q", "(?z)", "b**"])
def test_malformed_expressions(pattern: str) -> None:
    assert malformed(pattern)
    places: dict[str, dict[str, Any]] = {
        "#/properties/a~1b/items/0/pattern": {"properties": {"a/b": {"items": [{"pattern": pattern}]}}},
        "#/anyOf/1/additionalProperties/pattern": {"anyOf": [{}, {"additionalProperties": {"pattern": pattern}}]},
        "#/not/pattern": {"not": {"pattern": pattern}},
        "#/propertyNames/pattern": {"propertyNames": {"pattern": pattern}},
        "#/$defs/N/pattern": {"$defs": {"N": {"pattern": pattern}}},
        "#/definitions/N/if/pattern": {"definitions": {"N": {"if": {"pattern": pattern}}}},
        "#/dependencies/a/pattern": {"dependencies": {"a": {"pattern": pattern}}},
        "#/properties/pattern/patternProperties/": {"properties": {"pattern": {"patternProperties": {pattern: {}}}}},
    }
    for place, schema in places.items():
        with pytest.raises(RequestError, match="not a regular expression") as refusal:
            plain(schema)
        assert place in str(refusal.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "^hello\\!$",
        "a{",
        "]",
        "[]",
        "[^]",
        "(?=a)b(?<!c)",
        "(a)\\1",
        "(?<n>a)\\k<n>",
        "\\p{L}\\cA",
        "\\uD83D\\uDE00",
        "[[a]",
        "",
    ],
)
def test_expressions_that_only_some_dialects_know_are_not_malformed(pattern: str) -> None:
    assert not malformed(pattern)


def test_values_that_look_like_keywords_are_not_read() -> None:
    schema = {
        "properties": {"pattern": {"const": {"pattern": "("}}, "type": {"enum": [{"type": 5}]}},
        "default": {"pattern": "("},
    }
    assert plain(schema) == schema


DRAFT_7: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        (
            {"definitions": {"A": {"type": "string"}}, "items": {"$ref": "#/definitions/A", "maxLength": 2}},
            {"items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"type": "string"}}},
        ),
        (
            {"$defs": {"A": {"type": "string"}}, "items": {"$ref": "#/$defs/A", "maxLength": 2}},
            {"items": {"$ref": "#/$defs/A", "maxLength": 2}, "$defs": {"A": {"type": "string"}}},
        ),
        ({"items": [{"type": "null"}], "additionalItems": False}, {"prefixItems": [{"type": "null"}], "items": False}),
        ({"items": {"type": "null"}, "additionalItems": False}, {"items": {"type": "null"}}),
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        ({"type": "integer", "divisibleBy": 7}, {"type": "integer", "multipleOf": 7}),
        ({"divisibleBy": 2, "type": "any"}, {"multipleOf": 2}),
        ({"extends": {"type": "object"}, "title": "x"}, {"allOf": [{"type": "object"}], "title": "x"}),
        (
            {"extends": [{"divisibleBy": 2}, {"minimum": 1}], "disallow": "string"},
            {"allOf": [{"multipleOf": 2}, {"minimum": 1}, {"not": {"type": "string"}}]},
        ),
        (
            {"disallow": ["null", {"divisibleBy": 3}]},
            {"allOf": [{"not": {"allOf": [{"anyOf": [{"type": "null"}, {"multipleOf": 3}]}]}}]},
        ),
        (
            {"type": ["string", {"type": "object", "dependencies": {"a": ["b"]}}]},
            {"allOf": [{"anyOf": [{"type": "string"}, {"type": "object", "dependentRequired": {"a": ["b"]}}]}]},
        ),
        (
            {"$recursiveAnchor": True, "items": {"$recursiveRef": "#"}},
            {"items": {"$ref": "#/$defs/root"}, "$defs": {"root": {"items": {"$ref": "#/$defs/root"}}}},
        ),
        (
            {"$defs": {"N": {"$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}}}, "$ref": "#/$defs/N"},
            {"$ref": "#/$defs/N", "$defs": {"N": {"items": {"$ref": "#/$defs/N"}}}},
        ),
        (
            {
                "$defs": {"N": {"$dynamicAnchor": "n"}, "M": {"$id": "m", "$dynamicAnchor": "n"}},
                "items": {"$dynamicRef": "#n"},
            },
            {"items": {"$dynamicRef": "#n"}},
        ),
        ({"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}),
        (
            {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
            {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"required": ["d"]}}},
        ),
        (
            {"id": "http://a.b/c", "definitions": {"q": {"id": "#q", "type": "null"}}, "items": [{"$ref": "#q"}]},
            {"prefixItems": [{"$ref": "#/$defs/q"}], "$defs": {"q": {"type": "null"}}},
        ),
        (
            {**DRAFT_7, "items": {"$ref": "#/definitions/A", "$id": "u"}, "definitions": {"A": True}},
            {"items": {"$ref": "#/$defs/A"}, "$defs": {"A": True}},
        ),
        ({"type": "string", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (
            {"properties": {"a": {"required": True}, "b": None}, "required": None},
            {"properties": {"a": {}, "b": {}}, "required": ["a"]},
        ),
        ({"maxItems": 2.0, "minLength": None}, {"maxItems": 2}),
    ],
)
def test_older_drafts_and_careless_values(schema: dict[str, Any], meant: dict[str, Any]) -> None:
    assert plain(schema) == meant
    assert plain(meant) == meant


@pytest.mark.parametrize(
    "reference",
    [
        "#here",
        "http://x.y/root.json#here",
        "root.json#here",
        "#/$defs/f",
        "part.json",
        "http://x.y/part.json#inner",
        "#/if/properties/k",
    ],
)
def test_references_within_the_schema(reference: str) -> None:
    schema = {
        "$id": "http://x.y/root.json",
        "$defs": {
            "f": {"$anchor": "here", "type": "integer"},
            "g": {"$id": "part.json", "type": "integer", "$defs": {"z": {"$anchor": "inner", "type": "integer"}}},
        },
        "if": {"properties": {"k": {"type": "integer"}}},
        "items": {"$ref": reference},
    }
    found = plain(schema)
    (target,) = found["$defs"].values()
    assert target == {"type": "integer"} and found["items"]["$ref"].startswith("#/$defs/")


def test_relative_references_follow_the_schema_that_holds_them() -> None:
    inner = {"$id": "http://x.y/b/", "properties": {"k": {"$ref": "c"}}, "$defs": {"c": {"$id": "c", "type": "null"}}}
    schema = {"$id": "http://x.y/a/", "$defs": {"c": {"$id": "c", "const": 1}, "b": inner}, "items": {"$ref": "../b/"}}
    found = plain(schema)["$defs"]
    assert {"type": "null"} in found.values() and {"const": 1} not in found.values()


@pytest.mark.parametrize("reference", ["https://example.com/s.json", "#gone", "#/$defs/gone", "#/properties/a/enum/0"])
def test_references_to_what_is_not_there_are_refused(reference: str) -> None:
    with pytest.raises(RequestError, match=r"refers to .* at #/properties/b/\$ref"):
        plain({"properties": {"a": {"enum": ["x"]}, "b": {"$ref": reference}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "http://[x", "properties": {"a": {"$ref": "b"}}},
        {"$id": "http://a.b/", "properties": {"a": {"$ref": "http://[x"}}},
        {"$id": "http://a.b/", "properties": {"a": {"$dynamicRef": "http://[x#b"}}},
        {"properties": {"a": {"$ref": "http://[x#/b"}}},
        {"$id": "http://a.b/", "properties": {"a": {"$id": "//[x", "$ref": "#"}}},
    ],
)
def test_malformed_uris_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"\[x.*is not a valid URI"):
        plain(schema)


def test_draft_3_is_not_read_into_a_newer_draft() -> None:
    schema = {"extends": "a word", "divisibleBy": 2, "disallow": ["null"]}
    assert plain({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}) == schema


def test_a_schema_that_refers_to_itself() -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    found = plain(schema)
    assert found["properties"]["next"] == {"$ref": "#/$defs/root"} and found["$defs"]["root"]["required"] == ["next"]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "strnig"}, "#/type"),
        ({"properties": {"a": {"minLength": "3"}}}, "#/properties/a/minLength"),
        ({"allOf": [{"required": "a"}]}, "#/allOf/0/required"),
        ({"not": {"type": ["string", 5]}}, "#/not/type"),
        ({"anyOf": []}, "#/anyOf"),
    ],
)
def test_values_of_the_wrong_type_are_refused(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError, match="malformed") as refusal:
        plain(schema)
    assert f"{place}:" in str(refusal.value)


@pytest.mark.parametrize(
    "schema", [{"title": 5, "examples": "x", "x-y": 1, "description": None}, {"format": 3}, {"unknown": "k"}]
)
def test_notes_are_not_checked(schema: dict[str, Any]) -> None:
    plain(schema)
    with pytest.raises(RequestError, match="deeper"):
        deep: Any = schema
        for _ in range(70):
            deep = {"items": deep}
        plain(json.loads(json.dumps(deep)))
