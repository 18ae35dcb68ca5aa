"""Checks a JSON Schema and brings it into one form: draft 2020-12, with references only to its own `$defs`.

Schemas come from many programs. Those of older drafts are translated, also if `$schema` does not name the draft, and
so are two keywords of OpenAPI 3.0. Nothing that is merely careless is refused: null instead of a missing value,
`required: true` within a property, unknown keywords. What has no meaning is refused with its place: a value of the
wrong type, a malformed regular expression, a reference to something that is not there.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

import jsonschema_rs

from localllm.errors import RequestError
from localllm.text import shortened

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 5000
LONGEST_REASON = 200

# Keywords that contain schemas: by name, in a list, or one; then those that contain values, which may look like them.
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SINGLE = frozenset({
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties", "contentSchema",
})  # fmt: skip
VALUES = frozenset({"const", "default", "enum", "example", "examples"})

_HELD = LISTS | SINGLE | {"extends"}  # draft 3's allOf
# Keywords that only older drafts have. `definitions` alone also occurs in newer ones, so it counts without `$defs`.
OLD_KEYWORDS = ("draft-03", "draft-04", "draft-06", "draft-07")
NEW_KEYWORDS = frozenset({
    "$defs", "$anchor", "$dynamicRef", "prefixItems", "dependentRequired", "dependentSchemas", "unevaluatedItems",
    "unevaluatedProperties", "minContains", "maxContains",
})  # fmt: skip
TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})

# Notes for people, and what only OpenAPI or a program knows: their values are not checked.
NOTES = frozenset({
    "$comment", "$vocabulary", "$schema", "title", "description", "default", "example", "examples", "deprecated",
    "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "format", "$recursiveAnchor",
})  # fmt: skip
# What says where a schema is, and how it is found.
_PLACES = ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "definitions", "$defs", "$schema")
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_ECMASCRIPT = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]|\\k<(?P<again>\w+)>|\\.|\(\?<(?P<name>\w+)>", re.DOTALL)


def plain(schema: Any, careless: bool = False) -> Any:
    """A schema in the plain form. careless: leave out types that no draft knows, as tools have them.

    Raises RequestError for one that is malformed, too deep, too large or refers to something that it does not contain.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise RequestError(f"The JSON Schema is of type {type(schema).__name__}; it must be an object, true or false.")
    copied = _Copy(schema, _is_old(schema), careless)
    found = copied.read(schema, "#", "", 0)
    definitions = copied.definitions()
    if definitions:
        found["$defs"] = definitions
    _check(found)
    return found


@lru_cache(maxsize=1024)
def malformed(pattern: str) -> str:
    """Why a text is not a regular expression in any of the dialects that schemas use; "" if it is one."""
    try:
        jsonschema_rs.validator_for({"pattern": pattern})
    except ValueError:
        pass
    else:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(_ECMASCRIPT.sub(_python, pattern))
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return ""


def _python(match: re.Match[str]) -> str:
    """A part of an ECMAScript expression in Python's syntax."""
    if match["name"]:
        return f"(?P<{match['name']}>"
    if match["again"]:
        return f"(?P={match['again']})"
    return {"[]": "(?!)", "[^]": "[\\s\\S]"}.get(match[0], match[0])


def _children(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key, value in schema.items():
        if (key in MAPS or key == "dependencies") and isinstance(value, Mapping):
            yield from value.values()
        elif key in _HELD:
            yield from value if isinstance(value, list) else [value]


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas within it."""
    waiting: list[Any] = [schema]
    count = 0
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            count += 1
            if count > MAX_SUBSCHEMAS:
                raise RequestError(f"The JSON Schema holds more than {MAX_SUBSCHEMAS} schemas; make it smaller.")
            yield node
            waiting += _children(node)


def _is_old(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is of draft 7 or before, by its name or else by its keywords."""
    named = schema.get("$schema")
    if isinstance(named, str):
        return any(draft in named for draft in OLD_KEYWORDS)
    is_new, has_definitions = False, False
    for node in _subschemas(schema):
        exclusive = (node.get("exclusiveMinimum"), node.get("exclusiveMaximum"))
        if isinstance(node.get("items"), list) or any(isinstance(v, bool) for v in exclusive):
            return True
        if not {"dependencies", "divisibleBy", "disallow"}.isdisjoint(node) or isinstance(node.get("extends"), Mapping):
            return True
        is_new = is_new or not NEW_KEYWORDS.isdisjoint(node)
        has_definitions = has_definitions or "definitions" in node or "additionalItems" in node
    return has_definitions and not is_new


@dataclass(slots=True)
class _Copy:
    """Copies a schema into the plain form. root: the schema."""

    root: Mapping[str, Any]
    is_old: bool
    careless: bool
    _places: dict[str, tuple[Any, str]] = field(default_factory=dict)  # by URI: a schema, and its base URI
    _names: dict[int, str] = field(default_factory=dict)  # of referenced schemas, by id
    _waiting: list[tuple[str, Any, str]] = field(default_factory=list)
    _count: int = 0
    _anchors: Counter[str | bool] | None = None  # how many schemas have a dynamic anchor of this name

    def read(self, schema: Any, path: str, base: str, depth: int) -> Any:
        """A copy of a schema. path: for messages. base: the URI that its references are relative to."""
        if not isinstance(schema, Mapping):
            return schema
        self._count += 1
        if depth > MAX_DEPTH:
            raise RequestError(f"The JSON Schema is nested deeper than {MAX_DEPTH} levels; flatten it.")
        if self._count > MAX_SUBSCHEMAS:
            raise RequestError(f"The JSON Schema holds more than {MAX_SUBSCHEMAS} schemas; make it smaller.")
        base = self._base(schema, base)
        given = {key: value for key, value in schema.items() if value is not None or key in ("const", "default")}
        self._fix_dynamic(given, base)
        reference = given.pop("$ref", None)
        if isinstance(reference, str):
            reference = self._reference(reference, path, base)
            if self.is_old:
                return {"$ref": reference}
        found = {key: self._value(key, value, f"{path}/{_step(key)}", base, depth + 1) for key, value in given.items()}
        if reference is not None:
            found["$ref"] = reference
        self._translate(found, given)
        is_nullable = found.pop("nullable", False) is True  # OpenAPI 3.0
        return {"anyOf": [found, {"type": "null"}]} if is_nullable else found

    def _fix_dynamic(self, given: dict[str, Any], base: str) -> None:
        """Replace references that depend on the way to them, where there is one schema that they can mean."""
        names: dict[str, str | bool] = {
            "$recursiveRef": True,
            "$dynamicRef": str(given.get("$dynamicRef")).rpartition("#")[2],
        }
        for key, name in names.items():
            if key not in given:
                continue
            if self._anchors is None:
                nodes = list(_subschemas(self.root))
                found = [node.get(anchor) for node in nodes for anchor in ("$recursiveAnchor", "$dynamicAnchor")]
                self._anchors = Counter(anchor for anchor in found if isinstance(anchor, str | bool))
            if self._anchors[name] < 2 and isinstance(given[key], str) and self._find(given[key], base) is not None:
                given.setdefault("$ref", given.pop(key))

    def definitions(self) -> dict[str, Any]:
        """The schemas that are referred to, by name."""
        found: dict[str, Any] = {}
        while self._waiting:
            name, schema, base = self._waiting.pop()
            found[name] = self.read(schema, f"#/$defs/{name}", base, 1)
        return found

    def _base(self, schema: Mapping[str, Any], base: str) -> str:
        own = schema.get("$id", schema.get("id") if self.is_old else None)
        is_place = isinstance(own, str) and (not self.is_old or "$ref" not in schema)
        return _resolved(base, own)[0] if is_place and not own.startswith("#") else base

    def _value(self, key: str, value: Any, path: str, base: str, depth: int) -> Any:
        if key == "patternProperties" and isinstance(value, Mapping):
            for pattern in value:
                _check_pattern(pattern, f"{path}/{_step(pattern)}")
        if key == "pattern":
            _check_pattern(value, path)
        if (key in MAPS or key == "dependencies") and isinstance(value, Mapping):
            return {
                name: self.read({} if child is None else child, f"{path}/{_step(name)}", base, depth)
                for name, child in value.items()
            }
        if key in _HELD | {"type", "disallow"} and isinstance(value, list):
            return [self.read(child, f"{path}/{index}", base, depth) for index, child in enumerate(value)]
        if key in _HELD:
            return self.read(value, path, base, depth)
        if key in _COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    def _translate(self, found: dict[str, Any], given: Mapping[str, Any]) -> None:
        """Replace keywords of older drafts and of OpenAPI, and careless values."""
        for key in (*_PLACES, *(("id",) if self.is_old else ())):
            found.pop(key, None)
        if self.is_old:
            _translate_draft_3(found)
        if isinstance(found.get("items"), list):
            found["prefixItems"] = found.pop("items")
            if "additionalItems" in found:
                found["items"] = found.pop("additionalItems")
        found.pop("additionalItems", None)
        for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
                found[exclusive] = found.pop(bound)
        dependencies = found.pop("dependencies", None)
        if isinstance(dependencies, Mapping):
            for name, needed in dependencies.items():
                kind = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
                found.setdefault(kind, {})[name] = needed
        self._require(found, given)
        _translate_types(found)
        if self.careless and "type" in found:
            kinds = found["type"] if isinstance(found["type"], list) else [found["type"]]
            known = [_kind(kind) for kind in kinds]
            if all(isinstance(kind, str) for kind in known) and not TYPES.issuperset(known):
                del found["type"]
            else:
                found["type"] = known if isinstance(found["type"], list) else known[0]

    def _require(self, found: dict[str, Any], given: Mapping[str, Any]) -> None:
        """Names of required properties once each; draft 3 says so within the property."""
        if isinstance(found.get("required"), bool):
            del found["required"]
        properties = given.get("properties")
        within = (
            [name for name, one in properties.items() if isinstance(one, Mapping) and one.get("required") is True]
            if isinstance(properties, Mapping)
            else []
        )
        required = found.get("required", [])
        if isinstance(required, list) and (required or within) and all(isinstance(name, str) for name in required):
            found["required"] = list(dict.fromkeys([*required, *within]))

    def _reference(self, reference: str, path: str, base: str) -> str:
        """A reference to a schema within the root, by its name in `$defs`."""
        found = self._find(reference, base)
        if found is None:
            raise RequestError(
                f"The JSON Schema refers to {shortened(reference)!r} at {path}/$ref, which it does not contain. "
                "Nothing is fetched: put that schema into $defs."
            )
        schema, base = found
        if id(schema) not in self._names:
            name = unquote(reference).rpartition("/")[2].rpartition("#")[2] or "root"
            name = name if name not in self._names.values() else f"{name}-{len(self._names)}"
            self._names[id(schema)] = name
            self._waiting.append((name, schema, base))
        return f"#/$defs/{quote(_step(self._names[id(schema)]))}"

    def _find(self, reference: str, base: str) -> tuple[Any, str] | None:
        """The schema at a reference, and its base URI."""
        if not self._places:
            self._index(self.root, "")
        uri, fragment = _resolved(base, reference)
        if not fragment.startswith("/"):
            return self._places.get(f"{uri}#{unquote(fragment)}")
        found = self._places.get(f"{uri}#")
        if found is None:
            return None
        node, base = found
        for step in unquote(fragment).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")  # noqa: PLW2901
            if isinstance(node, list) and step.isdigit() and int(step) < len(node):
                node = node[int(step)]
            elif isinstance(node, Mapping) and step in node:
                node = node[step]
            else:
                return None
            base = self._base(node, base) if isinstance(node, Mapping) else base
        return (node, base) if isinstance(node, Mapping | bool) else None

    def _index(self, root: Mapping[str, Any], base: str) -> None:
        """Note where the schemas with an identifier or an anchor are."""
        self._places["#"] = root, base
        waiting: list[tuple[Any, str]] = [(root, base)]
        while waiting:
            node, base = waiting.pop()
            if not isinstance(node, Mapping):
                continue
            own = node.get("$id", node.get("id") if self.is_old else None)
            inner = self._base(node, base)
            if inner != base or node is root:
                self._places[f"{inner}#"] = node, inner
            anchors = [node.get("$anchor"), node.get("$dynamicAnchor"), own]
            for anchor in anchors:
                if isinstance(anchor, str) and (anchor is not own or anchor.startswith("#")):
                    self._places[f"{inner}#{anchor.removeprefix('#')}"] = node, inner
            waiting += [(child, inner) for child in _children(node)]


def _translate_draft_3(found: dict[str, Any]) -> None:
    """Replace what only draft 3 has, in a schema whose subschemas are plain."""
    if "divisibleBy" in found:
        found.setdefault("multipleOf", found.pop("divisibleBy"))
    extended = found.pop("extends", None)
    if isinstance(extended, Mapping | list):
        found["allOf"] = [*found.get("allOf", []), *(extended if isinstance(extended, list) else [extended])]
    if "disallow" in found:
        kinds = found.pop("disallow")
        refused = {"type": [kinds] if isinstance(kinds, Mapping) else kinds}
        _translate_types(refused)
        found["allOf"] = [*found.get("allOf", []), {"not": refused}]


def _translate_types(found: dict[str, Any]) -> None:
    """Draft 3's types: "any", and schemas in a list."""
    kinds = found.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    if "any" in listed:
        del found["type"]
    elif isinstance(kinds, list) and any(isinstance(kind, Mapping) for kind in kinds):
        del found["type"]
        choices = [kind if isinstance(kind, Mapping) else {"type": kind} for kind in listed]
        found["allOf"] = [*found.get("allOf", []), {"anyOf": choices}]


def _resolved(base: str, reference: str) -> tuple[str, str]:
    """The URI and the fragment of a reference relative to a base URI. Raises RequestError if it is malformed."""
    try:
        if reference.startswith("#") or not reference:
            return urldefrag(base + reference)
        whole = urljoin(base, reference) if base else reference
        urlsplit(whole)  # the other functions do not check every text
        return urldefrag(whole)
    except ValueError as error:
        raise RequestError(
            f"The JSON Schema has {shortened(reference)!r} as an $id or reference, which is not a valid URI: {error}. "
            "Correct it."
        ) from error


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _kind(kind: Any) -> Any:
    """A type in lower case, as Google's programs do not write it, and null by its name."""
    return "null" if kind is None else kind.lower() if isinstance(kind, str) and kind.isupper() else kind


def _check_pattern(pattern: Any, path: str) -> None:
    why = malformed(pattern) if isinstance(pattern, str) else ""
    if why:
        raise RequestError(
            f"The JSON Schema has {shortened(pattern)!r} at {path}, which is not a regular expression: {why}."
        )


def _check(schema: Mapping[str, Any]) -> None:
    """Raise RequestError for a keyword with a value of the wrong type."""
    try:
        jsonschema_rs.meta.validate(_without_notes(schema))
    except jsonschema_rs.ValidationError as error:
        place = "/".join(["#", *(_step(str(step)) for step in error.instance_path)])
        why = str(error.message).partition(" is not valid under any")[0]
        if place.endswith("/type"):
            why = f"{why} is not one of the types {', '.join(sorted(TYPES))}"
        raise RequestError(f"The JSON Schema is malformed at {place}: {shortened(why, LONGEST_REASON)}.") from error


def _without_notes(schema: Any) -> Any:
    """A plain schema without what is not checked."""
    if isinstance(schema, list):
        return [_without_notes(child) for child in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, Mapping):
            found[key] = {name: _without_notes(child) for name, child in value.items()}
        elif key in LISTS | SINGLE:
            found[key] = _without_notes(value)
        elif key not in NOTES:
            found[key] = value
    return found
