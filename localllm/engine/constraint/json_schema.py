"""JSON Schema before it becomes a grammar: its bounds, and keywords that cannot be kept, named."""

import json
from collections.abc import Iterator
from typing import Any

from localllm.errors import RequestError

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 5000

# What the grammar enforces. Everything else that restricts values is refused.
ENFORCED = {
    "$ref", "type", "const", "enum", "allOf", "anyOf", "oneOf",
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
    "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format",
}  # fmt: skip

# Notes that restrict nothing, and places where schemas are kept.
NEUTRAL = {
    "$schema", "$id", "id", "$comment", "$defs", "definitions", "$vocabulary",
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator",
}  # fmt: skip

MAPS = {"properties", "patternProperties", "$defs", "definitions"}
LISTS_OR_SCHEMAS = {"allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties"}


def check_schema(source: str) -> Any:
    """Return the parsed schema, or raise RequestError naming what is too deep, too large or not supported."""
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise RequestError(f"The JSON Schema is not JSON: {error}.") from error
    except RecursionError as error:
        raise RequestError(f"The JSON Schema is nested deeper than {MAX_DEPTH} levels; flatten it.") from error
    if not isinstance(schema, dict | bool):
        raise RequestError(f"The JSON Schema is of type {type(schema).__name__}; it must be an object, true or false.")
    unsupported: dict[str, str] = {}
    for count, (path, subschema) in enumerate(subschemas(schema)):
        if count >= MAX_SUBSCHEMAS:
            raise RequestError(f"The JSON Schema holds more than {MAX_SUBSCHEMAS} schemas; make it smaller.")
        for keyword in subschema.keys() - ENFORCED - NEUTRAL:
            unsupported.setdefault(keyword, path)
    if unsupported:
        named = ", ".join(f"{keyword} at {path}" for keyword, path in sorted(unsupported.items()))
        raise RequestError(f"The JSON Schema uses keywords that cannot be enforced: {named}. Remove them.")
    return schema


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema object with its JSON pointer. Raises RequestError where it is nested too deeply."""
    waiting: list[tuple[str, int, Any]] = [("#", 0, schema)]
    while waiting:
        path, depth, node = waiting.pop()
        if depth > MAX_DEPTH:
            raise RequestError(f"The JSON Schema is nested deeper than {MAX_DEPTH} levels; flatten it.")
        if not isinstance(node, dict):
            continue
        yield path, node
        for keyword, value in node.items():
            here = f"{path}/{keyword}"
            if keyword in MAPS and isinstance(value, dict):
                waiting += [(f"{here}/{name}", depth + 1, child) for name, child in value.items()]
            elif keyword in LISTS_OR_SCHEMAS:
                children = enumerate(value) if isinstance(value, list) else [("", value)]
                waiting += [(f"{here}/{index}" if index != "" else here, depth + 1, child) for index, child in children]
