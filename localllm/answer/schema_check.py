"""Checks a complete answer against its JSON Schemas.

A grammar enforces most of a schema while the answer is written (localllm.engine.constraint.json_schema); here another
library checks all of it, in a confined child process: two references in each of 40 nested schemas would take years.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gguf_io.confined import ChildEndedError, ConfinedChildren
from localllm.answer.event import Answer
from localllm.answer.request import AnswerRequest
from localllm.answer.tool_calls.call import parameters_of
from localllm.bounded_json import parsed
from localllm.errors import RequestError
from localllm.text import shortened

CPU_SECONDS = 5.0
WALL_SECONDS = 20.0
MAX_MEMORY_BYTES = 2**30
MOST_AT_ONCE = 4  # children
MOST_PLACES = 5
LONGEST_REASON = 300

_CHILDREN = ConfinedChildren("localllm.answer.schema_worker", MAX_MEMORY_BYTES, MOST_AT_ONCE)


def is_checked(request: AnswerRequest) -> bool:
    """Whether the answers to a request must match a schema."""
    return isinstance(request.format, Mapping) or bool(request.offered_tools)


def unmet(request: AnswerRequest, answer: Answer) -> tuple[str, ...]:
    """Sentences on how a complete answer violates its schemas, without any of its text; none if it matches them."""
    if isinstance(request.format, Mapping):
        try:
            value = parsed(answer.content)
        except ValueError as error:
            return (f"The answer cannot be read as JSON: {error}.",)
        return _lacking("The answer", request.format, value)
    parameters = parameters_of(request.offered_tools)
    found: list[str] = []
    for number, call in enumerate(answer.calls, start=1):
        if call.name in parameters:
            found += _lacking(f"Tool call {number}", parameters[call.name], call.arguments, careless=True)
    return tuple(found)


def _lacking(what: str, schema: Mapping[str, Any], value: Any, careless: bool = False) -> tuple[str, ...]:
    """careless: see plain_schema.plain."""
    try:
        reply = _CHILDREN.ask("check", json.dumps([schema, value, careless]).encode(), CPU_SECONDS, WALL_SECONDS)
        problem = reply["problem"]
    except (ChildEndedError, OSError) as error:
        reply, problem = {}, str(error)
    if problem:
        return (f"{what} cannot be checked against its JSON Schema: {shortened(problem, LONGEST_REASON)}",)
    if reply["fits"]:
        return ()
    places = _not_enforced(schema)
    named = f": {', '.join(places[:MOST_PLACES])}" if places else ""
    return (f"{what} does not fit its JSON Schema, which is not fully enforced{named}.",)


def _not_enforced(schema: Mapping[str, Any]) -> Sequence[str]:
    from localllm.engine.constraint.trial import tried_schema

    try:
        return tried_schema(json.dumps(schema))[1]
    except RequestError:  # too large, so no grammar was made of it either
        return ()
