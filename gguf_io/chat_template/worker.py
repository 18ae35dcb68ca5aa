"""The confined child process that runs templates, which are programs from untrusted files.

Kind "renders" takes {"source": text, "renders": [variables, ...]} and replies {"outcomes": [{"text": text} or
{"error": text, "line": number or null}, ...]}; kind "variables" takes {"source": text} and replies {"variables":
[names]}. Either may reply {"syntax": text, "line": number or null}.
"""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from gguf_io.chat_template.environment import ENVIRONMENT, compile_template
from gguf_io.chat_template.sandbox import MAX_MEMORY_BYTES, MAX_OUTPUT_CHARS
from gguf_io.confined import Reply, answer_requests


def main() -> None:
    """Answer requests until stdin closes."""
    answer_requests(_answer, MAX_MEMORY_BYTES)


def _answer(kind: str, data: bytes) -> Reply:
    request = json.loads(data)
    source = request["source"]
    try:
        if kind == "variables":
            return {"variables": sorted(find_undeclared_variables(ENVIRONMENT.parse(source)))}
        compile_template(source)
    except TemplateSyntaxError as error:
        return {"syntax": error.message, "line": error.lineno}
    except (RecursionError, SyntaxError, ValueError, TypeError, ArithmeticError) as error:
        # Python's compiler raises these for absurd nesting, and for constant expressions that fail when folded.
        return {"syntax": f"{type(error).__name__}: {error}", "line": None}
    return {"outcomes": [_render(source, variables) for variables in request["renders"]]}


def _render(source: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    pieces: list[str] = []
    room = MAX_OUTPUT_CHARS
    try:
        for piece in compile_template(source).generate(**variables):
            room -= len(piece)
            if room < 0:
                return {"error": f"the output exceeds {MAX_OUTPUT_CHARS} characters", "line": None}
            pieces.append(piece)
    except MemoryError:
        raise
    except Exception as error:  # whatever a template raises is a refusal, which the parent reports
        return {"error": str(error) or type(error).__name__, "line": _template_line(error.__traceback__)}
    return {"text": "".join(pieces)}


def _template_line(traceback: TracebackType | None) -> int | None:
    """The innermost line of the template in a traceback that Jinja has rewritten."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
