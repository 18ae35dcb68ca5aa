"""The confined child process that reads the grammars and schemas of requests; see `trial`.

Kind "schema" takes a JSON Schema and replies {"schema": JSON, "loosened": [text, ...]}. Kind "tools" takes JSON Schemas
by name and replies {"tools": JSON}; kind "arguments" takes the same, and a list of names whose objects are open (see
json_schema.enforceable), and replies {"arguments": JSON}. The other kinds are those of ConstraintKind and reply
{"grammar": llguidance's, "notes": [text, ...]}. Any may reply {"error": text}.
"""

import json
from typing import Any

from llguidance import LLMatcher

from gguf_io.confined import Reply, answer_requests
from localllm.engine.constraint.compile import LIMITS, ConstraintKind, grammar_of
from localllm.engine.constraint.constraint import reworded
from localllm.engine.constraint.json_schema import enforceable
from localllm.engine.constraint.plain_schema import plain
from localllm.engine.constraint.trial import MAX_MEMORY_BYTES, MAX_SOURCE_CHARACTERS, STACK_BYTES, started_with_stack
from localllm.errors import RequestError
from localllm.text import shortened


def main() -> None:
    """Answer requests until stdin closes."""
    started_with_stack(lambda: answer_requests(_answer, MAX_MEMORY_BYTES), STACK_BYTES).join()


def _answer(kind: str, data: bytes) -> Reply:
    source = json.loads(data)
    try:
        if kind == "schema":
            schema, loosened = enforceable(source)
            return {"schema": json.dumps(schema), "loosened": loosened}
        if kind == "tools":
            return {"tools": json.dumps({name: _parameters(name, one) for name, one in json.loads(source).items()})}
        if kind == "arguments":
            tools, opened = json.loads(source)
            return {"arguments": json.dumps({name: _enforceable(one, name in opened) for name, one in tools.items()})}
        grammar, notes = grammar_of(ConstraintKind(kind), source)
    except RequestError as error:
        return {"error": str(error)}
    problem = str(LLMatcher.validate_grammar(grammar, None, limits=LIMITS))
    return (
        {"error": f"The {kind} constraint cannot be used: {reworded(problem)}"}
        if problem
        else {"grammar": grammar, "notes": notes}
    )


def _enforceable(schema: Any, is_open: bool) -> Any:
    source = json.dumps(schema)
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise RequestError(
            f"A tool's JSON Schema has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are allowed."
        )
    return enforceable(source, is_open)[0]


def _parameters(name: str, schema: Any) -> Any:
    try:
        return plain(schema, careless=True)
    except RequestError as error:
        raise RequestError(f"The tool {shortened(name)!r} cannot be offered. {error}") from error
