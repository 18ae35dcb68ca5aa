"""Prepares a JSON Schema for a grammar: bounds it, rewrites keywords, and drops those that cannot be enforced.

Ordinary schemas contain keywords that no grammar can enforce, and patterns and numbers that llguidance does not
support. Those are left out and reported, so that the answer matches the rest; the caller must check them on the answer.
As in llama.cpp's grammars, an object that lists its properties allows no others, unless the caller wants them, and a
schema with properties or items means an object or an array: the standard also allows everything else, which weak models
write without end.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from localllm.bounded_json import parsed
from localllm.engine.constraint.plain_schema import LISTS, MAPS, SINGLE, plain
from localllm.errors import RequestError

# Keywords that the grammar enforces, and keywords that contain schemas.
KEPT = {
    "$ref", "type", "const", "enum", "allOf", "anyOf", "oneOf",
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
    "items", "prefixItems", "minItems", "maxItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format",
    "$defs",
}  # fmt: skip

# Keywords that restrict nothing, or nothing by themselves. Keywords that begin with "x-" are neutral too. All others
# are reported, also unknown ones: they may be misspelt.
NEUTRAL = {
    "$comment", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor", "title", "description", "default",
    "example", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
    "contentSchema", "discriminator", "then", "else", "minContains", "maxContains", "xml", "externalDocs",
    "markdownDescription", "strict",
}  # fmt: skip

# Standard keywords that restrict values and cannot be enforced, at least in some places.
NOT_ENFORCED = {
    "not", "if", "uniqueItems", "contains", "dependentRequired", "dependentSchemas", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "format", "minProperties",
    "maxProperties",
}  # fmt: skip

FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip

# Keywords that llguidance supports for most values; they are left out where it does not.
TRIED_TOGETHER = (
    ("pattern",),
    ("patternProperties",),
    ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)


def enforceable(source: str, is_open: bool = False) -> tuple[Any, list[str]]:
    """Parse a schema; return its enforceable part, and the keywords that are not enforced, with their places.

    is_open: objects that list properties allow others too, as the standard says.
    Raises RequestError for a schema that is malformed, too deep or too large.
    """
    try:
        schema = parsed(source)
    except ValueError as error:
        raise RequestError(f"The JSON Schema cannot be read as JSON: {error}.") from error
    schema = plain(schema)
    stands_alone = _stand_alone(schema)
    reader = _Reader(schema, names_types=stands_alone, closes=stands_alone and not is_open)
    return reader.read(schema, "#"), reader.loosened


@dataclass(slots=True)
class _Reader:
    """Copies a plain schema. loosened: keywords that were left out, with their places.

    names_types: whether to add the types that are meant. closes: whether objects allow only the properties that they
    list.
    """

    root: Any
    names_types: bool
    closes: bool
    loosened: list[str] = field(default_factory=list)

    def read(self, schema: Any, path: str) -> Any:
        """The enforceable part of a schema."""
        if not isinstance(schema, dict):
            return schema
        if schema.get("not") in ({}, True):  # zod's z.never()
            return False
        given = self._without_names(schema)
        found = {key: self._value(key, value, f"{path}/{key}") for key, value in given.items() if key in KEPT}
        for key in _lost(given):
            self.loosened.append(f"{key} at {path}")
            found.pop(key, None)
        for key in _beyond_grammars(found):
            self.loosened.append(f"{key} at {path}")
            del found[key]
        if self.names_types and (kind := _meant(found)):
            found["type"] = kind
        if self.closes and _lists_all(found):
            found["additionalProperties"] = False
        return found

    def _value(self, keyword: str, value: Any, path: str) -> Any:
        if keyword in MAPS:
            return {name: self.read(child, f"{path}/{name}") for name, child in value.items()}
        if keyword in LISTS:
            return [self.read(child, f"{path}/{index}") for index, child in enumerate(value)]
        return self.read(value, path) if keyword in SINGLE else value

    def _without_names(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The schema with propertyNames expressed by other keywords where possible."""
        rest = {key: value for key, value in schema.items() if key != "propertyNames"}
        names = self._resolved(schema.get("propertyNames", True))
        if not isinstance(names, dict):
            return rest if names is True else dict(schema)
        other = names.keys() & KEPT - {"type", "enum", "const", "pattern"}
        listed = names.get("enum", [names["const"]] if "const" in names else None)
        value = schema.get("additionalProperties", True)
        own = schema.get("properties", {})
        texts = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else None
        if not other and texts is not None and texts == listed and isinstance(own, dict):
            return rest | {"properties": {name: own.get(name, value) for name in texts}, "additionalProperties": False}
        pattern = names.get("pattern")
        if not other and isinstance(pattern, str) and not schema.keys() & {"properties", "patternProperties"}:
            return rest | {"patternProperties": {pattern: value}, "additionalProperties": False}
        return rest if not other and "pattern" not in names else dict(schema)

    def _resolved(self, schema: Any) -> Any:
        """The target of a schema that is a reference into the root; any other schema unchanged."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found = self.root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        return schema if found is None else found


def _stand_alone(schema: Any) -> bool:
    """Whether no object of a schema has to match two lists of properties at once."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if "allOf" in node or ("properties" in node and node.keys() & {"anyOf", "oneOf", "$ref"}):
                return False
            waiting += node.values()
    return True


def _meant(schema: Mapping[str, Any]) -> str | None:
    """The type that a schema implies by its keywords if it names none; the standard would allow any type."""
    if schema.keys() & {"type", "const", "enum", "$ref", "anyOf", "oneOf"}:
        return None
    if schema.keys() & {"properties", "patternProperties", "required"}:
        return "object"
    return "array" if schema.keys() & {"items", "prefixItems"} else None


def _lists_all(schema: Mapping[str, Any]) -> bool:
    """Whether a schema lists properties, and requires or describes no others."""
    properties, required = schema.get("properties"), schema.get("required") or []
    if not properties or not isinstance(properties, dict) or not isinstance(required, list):
        return False
    others = {"additionalProperties", "patternProperties", "minProperties"}
    return not schema.keys() & others and all(name in properties for name in required if isinstance(name, str))


def _lost(schema: Mapping[str, Any]) -> list[str]:
    """The keywords that restrict values here and cannot be enforced."""
    found = sorted(key for key in schema.keys() - KEPT - NEUTRAL if not key.startswith("x-"))
    if not schema.get("uniqueItems") or schema.get("maxItems", 2) in (0, 1):
        found = [key for key in found if key != "uniqueItems"]
    if "format" in schema and str(schema["format"]) not in FORMATS:
        found.append("format")
    properties, required = schema.get("properties"), schema.get("required")
    listed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    optional = isinstance(properties, dict) and properties.keys() - set(listed)
    return found + [key for key in ("minProperties", "maxProperties") if optional and schema.get(key)]


def _beyond_grammars(schema: Mapping[str, Any]) -> list[str]:
    """The keywords whose values llguidance does not support, such as a pattern with look-ahead."""
    found: list[str] = []
    for keywords in TRIED_TOGETHER:
        given = {key: schema[key] for key in keywords if key in schema}
        if not given.keys() - {"type"}:
            continue
        if "patternProperties" in given and isinstance(given["patternProperties"], dict):
            given["patternProperties"] = dict.fromkeys(given["patternProperties"], True)
        if _is_followed(json.dumps(given)):
            continue
        others = given.keys() - {"type"}
        found += [key for key in others if not _is_followed(json.dumps({key: given[key]}))] or others
    return sorted(found)


@lru_cache(maxsize=4096)
def _is_followed(source: str) -> bool:
    """Whether llguidance can compile a schema; an unsatisfiable one counts as supported."""
    try:
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(source))
    except ValueError:
        return False
    return not problem or "Unsatisfiable" in problem
