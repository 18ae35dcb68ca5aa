"""Tool calls, complete and as deltas, and the schemas of tools."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
ORDERED = "x-localllm-ordered"
MAX_CHECKS = 20_000  # of a value against a schema
MAX_REFERENCES = 16  # followed in a row
MAX_CHOICES = 256  # schemas among which those of texts are looked for


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function to call and its arguments, a JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A new piece of a call. name: only on the first delta of a call. arguments: a piece of their JSON text."""

    name: str = ""
    arguments: str = ""


def parameters_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, Schema]:
    """The JSON Schemas of the tools' arguments, by tool name. A tool without parameters takes any object.

    Those of strict tools, whose arguments follow the schema's order, have the keyword ORDERED.
    """
    functions = [tool["function"] for tool in tools]
    return {
        one["name"]: {**_object_schema(one.get("parameters")), **({ORDERED: True} if one.get("strict") is True else {})}
        for one in functions
    }


def _object_schema(schema: Any) -> Schema:
    if not isinstance(schema, Mapping) or not schema:
        return {"type": "object"}
    return {"type": "object", **{key: value for key, value in schema.items() if value is not None}}


def resolved(schema: Any, root: Schema) -> Schema:
    """A schema, or the target of its reference within the root; {}, which allows everything, if that is missing."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root
        for step in unquote(reference.removeprefix("#")).split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else {}


def properties_of(schema: Any, root: Schema) -> Schema:
    """The schemas of an object's properties by name; {} if it lists none."""
    properties = resolved(schema, root).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def values_of(schema: Schema) -> list[Any]:
    """The values that a schema lists; [] if it lists none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else []


def choices_of(schema: Schema) -> list[Any]:
    """The schemas of which a value must match one; [] if there are none."""
    choices = schema.get("anyOf") or schema.get("oneOf")
    return choices if isinstance(choices, list) else []


def fits(schema: Schema, arguments: Mapping[str, Any]) -> bool:
    """Whether arguments fit a tool's schema, which is in plain form, as far as MAX_CHECKS tell.

    Patterns, formats and conditions are not checked: nothing here may take long. See schema_check for all keywords.
    """
    return _Fit(schema).fits(schema, arguments)


class _Fit:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = MAX_CHECKS

    def fits(self, schema: Any, value: Any) -> bool:
        self._left -= 1
        if self._left < 0 or isinstance(schema, bool):
            return schema is True
        if "$ref" in schema and not self.fits(resolved(schema, self._root), value):
            return False
        if "const" in schema and schema["const"] != value:
            return False
        choices = [schema[key] for key in ("anyOf", "oneOf") if key in schema]
        return (
            _has_type(schema.get("type"), value)
            and ("enum" not in schema or value in schema["enum"])
            and all(any(self.fits(one, value) for one in some) for some in choices)
            and all(self.fits(one, value) for one in schema.get("allOf", ()))
            and _is_within(schema, value)
            and self._parts_fit(schema, value)
        )

    def _parts_fit(self, schema: Schema, value: Any) -> bool:
        if isinstance(value, dict):
            own, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
            if "patternProperties" in schema:
                rest = True
            required = all(name in value for name in schema.get("required", ()))
            return required and all(self.fits(own.get(name, rest), one) for name, one in value.items())
        if isinstance(value, list):
            first, rest = schema.get("prefixItems", []), schema.get("items", True)
            return all(self.fits(first[at] if at < len(first) else rest, one) for at, one in enumerate(value))
        return True


def _has_type(kinds: Any, value: Any) -> bool:
    if kinds is None:
        return True
    known = {str: "string", dict: "object", list: "array", bool: "boolean", int: "integer", float: "number"}
    kind = known.get(type(value), "null")
    wanted = kinds if isinstance(kinds, list) else [kinds]
    is_whole = kind == "integer" or (kind == "number" and value.is_integer())
    return kind in wanted or ("number" in wanted and is_whole) or ("integer" in wanted and is_whole)


def _is_within(schema: Schema, value: Any) -> bool:
    """Whether a number, or a length, is within the schema's bounds."""
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int | float):
        return (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and not schema.get("exclusiveMinimum", -math.inf) >= value
            and not schema.get("exclusiveMaximum", math.inf) <= value
        )
    unit = "Length" if isinstance(value, str) else "Items" if isinstance(value, list) else "Properties"
    return bool(schema.get(f"min{unit}", 0) <= len(value) <= schema.get(f"max{unit}", len(value)))


def is_text(schema: Any, root: Schema) -> tuple[bool, bool]:
    """Whether all values of a schema other than null are strings, and whether it allows null."""
    return _is_text(resolved(schema, root), root, {})


def _is_text(schema: Schema, root: Schema, known: dict[int, tuple[bool, bool]]) -> tuple[bool, bool]:
    """known: by the schemas' ids, since each may be referred to many times, also by itself."""
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = False, False
    known[id(schema)] = found = _is_text_by_keywords(schema, root, known)
    return found


def _is_text_by_keywords(schema: Schema, root: Schema, known: dict[int, tuple[bool, bool]]) -> tuple[bool, bool]:
    if values := values_of(schema):
        return all(isinstance(value, str) or value is None for value in values), None in values
    if (choices := choices_of(schema)) and "type" not in schema:
        others = [choice for choice in choices if not _is_null(choice)]
        if len(known) > MAX_CHOICES:
            return False, False
        texts = [_is_text(resolved(choice, root), root, known) for choice in others]
        null = len(others) < len(choices) or any(nullable for _, nullable in texts)
        return bool(others) and all(text for text, _ in texts), null
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    is_string = "string" in kinds and all(kind in ("string", "null") for kind in kinds)
    return is_string, "null" in kinds or schema.get("nullable") is True


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"
