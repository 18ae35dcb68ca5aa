"""The parent's side of the template worker: a template's limits, and the errors for its refusals and crashes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf_io.confined import ChildEndedError, ConfinedChild
from gguf_io.errors import TemplateError, shortened

# Real templates stay far below: 17 kB of source, 40 ms to compile, 0.2 ms for a short conversation and 60 ms for one of
# 2000 messages. One that rescans all messages for each of them (Gemma 4's) takes 6 s, hence the time per message.
# Memory is bounded on Linux only; elsewhere just by time and output. Windows has only the wall-clock limit.
MAX_SOURCE_CHARS = 128 * 1024
MAX_OUTPUT_CHARS = 8 * 1024 * 1024
MAX_MEMORY_BYTES = 512 * 1024 * 1024  # address space of the worker, the interpreter's own 40 MB included
CPU_SECONDS = 1.0  # per request, of the worker's own CPU time, so that no honest template fails on a busy machine
CPU_SECONDS_PER_MESSAGE = 0.01
MAX_CPU_SECONDS = 30.0  # for any number of messages
WALL_GRACE_SECONDS = 9.0  # added to the CPU time: for waiting, and for systems without CPU timers

MOST_OF_A_REFUSAL = 1000  # characters: a template's error may quote a whole conversation
_MAX_REPLY_BYTES = 12 * MAX_OUTPUT_CHARS + 4096  # JSON writes a character beyond U+FFFF as \uXXXX\uXXXX


@dataclass(frozen=True, slots=True)
class RenderOutcome:
    """One rendering: the text, or "" and the error that the template raised."""

    text: str
    refusal: str | None = None


class TemplateSandbox:
    """Runs one template's source in a confined child process, within the bounds above. Thread-safe."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._child = ConfinedChild("gguf_io.chat_template.worker", MAX_MEMORY_BYTES, _MAX_REPLY_BYTES)

    def render(self, renders: Sequence[Mapping[str, Any]]) -> list[RenderOutcome]:
        """A rendering for each set of variables, all within the limits of one request. TemplateError beyond them."""
        messages = sum(len(variables["messages"]) for variables in renders)
        seconds = min(CPU_SECONDS + CPU_SECONDS_PER_MESSAGE * messages, MAX_CPU_SECONDS)
        reply = self._ask("renders", {"renders": renders}, seconds)
        return [
            RenderOutcome(outcome["text"])
            if "text" in outcome
            else RenderOutcome("", _located(outcome["error"], outcome["line"]))
            for outcome in reply["outcomes"]
        ]

    def variables(self) -> frozenset[str]:
        """The template's undeclared variables; it may set some of them on some paths."""
        return frozenset(self._ask("variables", {}, CPU_SECONDS)["variables"])

    def _ask(self, kind: str, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        try:
            data = json.dumps({"source": self._source, **question}, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(
                f"messages and tools hold plain JSON values (text, numbers, lists, dictionaries): {error}"
            ) from None
        try:
            reply = self._child.ask(kind, data, seconds, seconds + WALL_GRACE_SECONDS)
        except ChildEndedError as error:
            raise TemplateError(f"chat template: {error}") from None
        except OSError as error:
            raise TemplateError(f"cannot start the process that renders chat templates: {error}") from error
        if "syntax" in reply:
            raise TemplateError(_located(reply["syntax"], reply["line"]))
        return reply


def _located(message: str, line: int | None) -> str:
    place = "chat template" if line is None else f"chat template, line {line}"
    return f"{place}: {shortened(message, MOST_OF_A_REFUSAL)}"
