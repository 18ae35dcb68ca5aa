"""The confined child process that checks values against JSON Schemas; see `schema_check`.

Kind "check" takes [schema, value, careless (see plain_schema.plain)] and replies {"fits": whether the value does,
"problem": why the schema cannot be used, or ""}. Nothing is fetched, and the work of patterns is bounded.
"""

import json

import jsonschema_rs

from gguf_io.confined import Reply, answer_requests
from localllm.answer.schema_check import MAX_MEMORY_BYTES
from localllm.engine.constraint.plain_schema import plain
from localllm.errors import RequestError

BACKTRACKS = 100_000  # of a pattern with look-ahead or look-behind
# References whose target depends on where they are reached from, which the plain form does not keep.
DYNAMIC = ("$dynamicRef", "$recursiveRef")


def main() -> None:
    """Answer requests until stdin closes."""
    answer_requests(_answer, MAX_MEMORY_BYTES)


def _answer(_kind: str, data: bytes) -> Reply:
    schema, value, careless = json.loads(data)
    try:
        found = plain(schema, careless)
        is_dynamic = any(f'"{keyword}"' in json.dumps(found) for keyword in DYNAMIC)
        validator = jsonschema_rs.validator_for(
            schema if is_dynamic else found,
            validate_formats=True,
            offline=True,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS),
        )
    except (ValueError, jsonschema_rs.ReferencingError, RequestError) as error:
        return {"fits": False, "problem": str(error).partition("\n")[0] or type(error).__name__}
    return {"fits": validator.is_valid(value), "problem": ""}
