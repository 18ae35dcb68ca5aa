"""Tool calls, complete and as deltas, and the schemas of tools."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
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
    """The JSON Schemas of the tools' arguments, by tool name. A tool without parameters takes any object."""
    return {tool["function"]["name"]: _object_schema(tool["function"].get("parameters")) for tool in tools}


def _object_schema(schema: Any) -> Schema:
    if not isinstance(schema, Mapping) or not schema:
        return {"type": "object"}
    given = {key: value for key, value in schema.items() if value is not None}
    closed = {"additionalProperties": False} if given.get("properties") == {} else {}
    return {"type": "object", **closed, **given}


def resolved(schema: Any, root: Schema) -> Schema:
    """A schema, or the target of its reference within the root; {}, which allows everything, if that is missing."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
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
