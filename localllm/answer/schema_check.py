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
# References whose target depends on where they are reached from, which the plain form does not keep.
_DYNAMIC = ("$dynamicRef", "$recursiveRef")


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

    from localllm.engine.constraint.plain_schema import plain

    source = json.dumps(schema)
    try:
        validator = jsonschema_rs.validator_for(
            source if any(keyword in source for keyword in _DYNAMIC) else plain(schema, careless=True),
            validate_formats=True,
            offline=True,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS),
        )
    except (ValueError, jsonschema_rs.ReferencingError, RequestError) as error:
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
