"""Checks a complete answer against its JSON Schemas.

A grammar enforces most of a schema while the answer is written (localllm.engine.constraint.json_schema); here another
library checks all of it. Nothing is fetched, and the work of patterns is bounded.
"""

import json
from collections.abc import Mapping
from typing import Any

from localllm.answer.event import Answer
from localllm.answer.request import AnswerRequest
from localllm.answer.tool_calls.call import parameters_of
from localllm.errors import RequestError
from localllm.text import shortened

BACKTRACKS = 100_000  # of a pattern with look-ahead or look-behind
MOST_PLACES = 5
LONGEST_REASON = 300
# Keywords that contain values rather than schemas, and those that contain schemas by name.
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def is_checked(request: AnswerRequest) -> bool:
    """Whether the answers to a request must match a schema."""
    return isinstance(request.format, Mapping) or bool(request.tools)


def unmet(request: AnswerRequest, answer: Answer) -> tuple[str, ...]:
    """Sentences on how a complete answer violates its schemas, without any of its text; none if it matches them."""
    if isinstance(request.format, Mapping):
        try:
            value = json.loads(answer.content)
        except ValueError:
            return ("The answer is not valid JSON.",)
        return _lacking("The answer", request.format, value)
    parameters = parameters_of(request.tools)
    found: list[str] = []
    for number, call in enumerate(answer.calls, start=1):
        if call.name in parameters:
            found += _lacking(f"Tool call {number}", parameters[call.name], call.arguments)
    return tuple(found)


def _lacking(what: str, schema: Mapping[str, Any], value: Any) -> tuple[str, ...]:
    import jsonschema_rs  # not above: most answers have no schema

    try:
        validator = jsonschema_rs.validator_for(
            _standard(schema),
            validate_formats=True,
            offline=True,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS),
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        why = shortened(str(error).partition("\n")[0], LONGEST_REASON)
        return (f"{what} cannot be checked against its JSON Schema: {why}",)
    if validator.is_valid(value):
        return ()
    places = _not_enforced(schema)
    named = f": {', '.join(places[:MOST_PLACES])}" if places else ""
    return (f"{what} does not fit its JSON Schema, which is not fully enforced{named}.",)


def _not_enforced(schema: Mapping[str, Any]) -> list[str]:
    from localllm.engine.constraint.json_schema import enforceable

    try:
        return enforceable(json.dumps(schema))[1]
    except RequestError:  # too large, so no grammar was made of it either
        return []


def _standard(schema: Any) -> Any:
    """A schema in standard keywords: `nullable` and boolean exclusive bounds, from OpenAPI 3.0, are rewritten."""
    if isinstance(schema, list):
        return [_standard(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _standard(child) for name, child in value.items()}
        else:
            found[key] = value if key in _VALUES else _standard(value)
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    return {"anyOf": [found, {"type": "null"}]} if found.pop("nullable", False) is True else found
