"""The child process that runs templates: one JSON request a line on stdin, one JSON reply a line on stdout.

A template is a program from a stranger's file. No check of its source bounds what it may compute, so the operating
system does: the worker may use so much CPU time per request and so much memory in all, and may write no file and start
no process. Exceeding the time ends it by signal, exceeding memory by an exit status; `sandbox.py` tells them apart.

Request: {"source": text, "seconds": of CPU time, "renders": [variables, ...] or "variables": true}.
Reply: {"outcomes": [{"text": text} or {"error": text, "line": number or null}, ...]}, {"variables": [names]},
or {"syntax": text, "line": number or null}.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from gguf_io.chat_template.environment import ENVIRONMENT, compile_template
from gguf_io.chat_template.limits import EXIT_MEMORY, MAX_MEMORY_BYTES, MAX_OUTPUT_CHARS


def main() -> None:
    """Answer requests until stdin closes."""
    _give_up_rights()
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            _set_cpu_timer(request["seconds"])
            reply = json.dumps(_answer(request)).encode()
        except MemoryError:
            os._exit(EXIT_MEMORY)
        _set_cpu_timer(0.0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


def _give_up_rights() -> None:
    if sys.platform == "win32":  # no such limits; the parent's clock is then the only one
        return
    import resource

    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0}
    if sys.platform == "linux":  # macOS reserves more address space than any bound, and refuses to set one
        bounds[resource.RLIMIT_AS] = MAX_MEMORY_BYTES
    for limit, bound in bounds.items():
        _, hard = resource.getrlimit(limit)
        lowest = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(limit, (lowest, lowest))


def _set_cpu_timer(seconds: float) -> None:
    # SIGPROF keeps its default action, which ends the process even inside one long C call such as 9**9**9.
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    source = request["source"]
    try:
        if "variables" in request:
            return {"variables": sorted(find_undeclared_variables(ENVIRONMENT.parse(source)))}
        compile_template(source)
    except TemplateSyntaxError as error:
        return {"syntax": error.message, "line": error.lineno}
    except (RecursionError, SyntaxError, ValueError, TypeError, ArithmeticError) as error:
        # What Python's compiler says of absurd nesting, and constant expressions that fail while they are folded.
        return {"syntax": f"{type(error).__name__}: {error}", "line": None}
    return {"outcomes": [_render(source, variables) for variables in request["renders"]]}


def _render(source: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    pieces: list[str] = []
    room = MAX_OUTPUT_CHARS
    try:
        for piece in compile_template(source).generate(**variables):
            room -= len(piece)
            if room < 0:
                return {"error": f"the text grew beyond {MAX_OUTPUT_CHARS} characters", "line": None}
            pieces.append(piece)
    except MemoryError:
        raise
    except Exception as error:  # whatever a template raises is its answer, and the parent's to report
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
