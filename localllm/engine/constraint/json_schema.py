"""JSON Schema before it becomes a grammar: its bounds, keywords in other words, and those that cannot be kept.

Libraries write keywords that no grammar can enforce into ordinary schemas, and patterns and numbers that llguidance
cannot follow. Those are left out and named, so that the answer fits the rest; whoever reads the answer checks them. As
in llama.cpp's grammars, an object that lists its properties gets no others, and what has properties or items is an
object or an array: the standard allows everything else too, and weak models write it without end.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from localllm.errors import RequestError

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 5000

# What the grammar enforces, and where schemas are kept.
KEPT = {
    "$ref", "type", "const", "enum", "allOf", "anyOf", "oneOf",
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
    "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format",
    "$schema", "$id", "id", "$defs", "definitions",
}  # fmt: skip

# Notes that restrict nothing, or nothing by themselves, and `nullable`, which is said in other words. So does whatever
# begins with "x-". All other keywords are named, also unknown ones: they may be misspelt.
NEUTRAL = {
    "$comment", "$vocabulary", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "title", "description", "default",
    "example", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
    "contentSchema", "discriminator", "nullable", "then", "else", "minContains", "maxContains", "xml", "externalDocs",
    "markdownDescription", "strict",
}  # fmt: skip

# Keywords of the standard that restrict values and cannot be enforced, everywhere or in some places.
NOT_ENFORCED = {
    "not", "if", "uniqueItems", "contains", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "format", "minProperties",
    "maxProperties",
}  # fmt: skip

FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip

# Keywords that llguidance supports for most values, and of which those are left out that it cannot follow.
TRIED_TOGETHER = (
    ("pattern",),
    ("patternProperties",),
    ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")  # where a $ref is all of its schema

MAPS = {"properties", "patternProperties", "$defs", "definitions"}
LISTS_OR_SCHEMAS = {"allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties"}


def enforceable(source: str) -> tuple[Any, list[str]]:
    """Parse a schema; return what of it can be enforced, and the places of what cannot.

    Raises RequestError for a schema that is malformed, too deep or too large.
    """
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise RequestError(f"The JSON Schema is not JSON: {error}.") from error
    except RecursionError as error:
        raise RequestError(f"The JSON Schema is nested deeper than {MAX_DEPTH} levels; flatten it.") from error
    if not isinstance(schema, dict | bool):
        raise RequestError(f"The JSON Schema is of type {type(schema).__name__}; it must be an object, true or false.")
    named = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    reader = _Reader(schema, _stand_alone(schema), any(draft in named for draft in OLD_DRAFTS))
    return reader.read(schema, "#", 0), reader.loosened


@dataclass(slots=True)
class _Reader:
    """Copies a schema, counting its parts. loosened: keywords that were left out, with their places.

    closes: whether objects get no properties but those that they list. is_old: whether the schema is of OLD_DRAFTS.
    """

    root: Any
    closes: bool
    is_old: bool
    loosened: list[str] = field(default_factory=list)
    count: int = 0

    def read(self, schema: Any, path: str, depth: int) -> Any:
        """What of a schema can be enforced."""
        if depth > MAX_DEPTH:
            raise RequestError(f"The JSON Schema is nested deeper than {MAX_DEPTH} levels; flatten it.")
        if not isinstance(schema, dict):
            return schema
        self.count += 1
        if self.count > MAX_SUBSCHEMAS:
            raise RequestError(f"The JSON Schema holds more than {MAX_SUBSCHEMAS} schemas; make it smaller.")
        if schema.get("not") in ({}, True):  # zod's z.never()
            return False
        if self.is_old and isinstance(schema.get("$ref"), str):
            schema = {key: value for key, value in schema.items() if key in {"$ref", "$defs", "definitions"}}
        given = self._without_names(schema)
        found = {
            key: self._value(key, value, f"{path}/{key}", depth + 1) for key, value in given.items() if key in KEPT
        }
        for key in _lost(given):
            self.loosened.append(f"{key} at {path}")
            found.pop(key, None)
        for key in _beyond_grammars(found):
            self.loosened.append(f"{key} at {path}")
            del found[key]
        if self.closes and (kind := _meant(found)):
            found["type"] = kind
        if self.closes and _lists_all(found):
            found["additionalProperties"] = False
        if given.get("nullable") is True:  # OpenAPI 3.0
            return {"anyOf": [found, {"type": "null"}]}
        return found

    def _value(self, keyword: str, value: Any, path: str, depth: int) -> Any:
        if keyword in MAPS and isinstance(value, dict):
            return {name: self.read(child, f"{path}/{name}", depth) for name, child in value.items()}
        if keyword in COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        if keyword not in LISTS_OR_SCHEMAS:
            return value
        if isinstance(value, list):
            return [self.read(child, f"{path}/{index}", depth) for index, child in enumerate(value)]
        return self.read(value, path, depth)

    def _without_names(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The schema with propertyNames said by other keywords where they can."""
        rest = {key: value for key, value in schema.items() if key != "propertyNames"}
        names = self._resolved(schema.get("propertyNames", True))
        if not isinstance(names, dict):
            return rest if names is True else dict(schema)
        other = names.keys() & KEPT - {"type", "enum", "const", "pattern", "$schema", "$id"}
        listed = names.get("enum", [names["const"]] if "const" in names else None)
        value = schema.get("additionalProperties", True)
        if not other and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
            own = schema.get("properties", {})
            return rest | {"properties": {name: own.get(name, value) for name in listed}, "additionalProperties": False}
        if not other and "pattern" in names and not schema.keys() & {"properties", "patternProperties"}:
            return rest | {"patternProperties": {names["pattern"]: value}, "additionalProperties": False}
        return rest if not other and "pattern" not in names else dict(schema)

    def _resolved(self, schema: Any) -> Any:
        """What a schema that is only a reference into the root's definitions refers to."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found = self.root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        return schema if found is None else found


def _stand_alone(schema: Any) -> bool:
    """Whether no object of a schema has to fit two lists of properties at once."""
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
    """The type that a schema without one means by what else it says; the standard allows all others too."""
    if schema.keys() & {"type", "const", "enum", "$ref", "anyOf", "oneOf"}:
        return None
    if schema.keys() & {"properties", "patternProperties", "required"}:
        return "object"
    return "array" if schema.keys() & {"items", "prefixItems"} else None


def _lists_all(schema: Mapping[str, Any]) -> bool:
    """Whether a schema lists properties, and none but these are needed or described."""
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
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference[:1] == "#" and reference[1:2] not in ("", "/"):
        found.append("$ref")  # to an $anchor
    if "format" in schema and schema["format"] not in FORMATS:
        found.append("format")
    properties = schema.get("properties")
    optional = isinstance(properties, dict) and properties.keys() - set(schema.get("required") or ())
    return found + [key for key in ("minProperties", "maxProperties") if optional and schema.get(key)]


def _beyond_grammars(schema: Mapping[str, Any]) -> list[str]:
    """The keywords whose values llguidance cannot follow, such as a pattern that looks ahead."""
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
    """Whether llguidance can make a grammar of a schema; one that contradicts itself counts."""
    try:
        told = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(source))
    except ValueError:
        return False
    return not told or "Unsatisfiable" in told
