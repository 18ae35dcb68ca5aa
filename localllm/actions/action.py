"""Tools, and the actions planned from their calls, which can be shown before they run."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.answer.tool_calls import ToolCall
from localllm.errors import LocalLLMError

MAX_RESULT_CHARS = 16_000  # of a result that goes to the model
MAX_ROUNDS = 16  # consecutive answers with calls; then the user must continue


class ToolError(LocalLLMError):
    """A call that failed or was refused. The message goes to the model and to the user."""


class MalformedCallError(ToolError):
    """A call of an unknown tool, or with arguments that do not fit its schema."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file's content before and after an action; None if there is no file."""

    path: Path
    before: bytes | None
    after: bytes | None


@dataclass(frozen=True, slots=True)
class Action:
    """A checked call. run: executes it and returns the result's text; setting the event ends it early.

    subject: matched against approval rules' patterns, e.g. the path. preview: shown to the user, a unified diff if
    there is a change. asks: whether it needs approval. pattern: the suggested pattern of a rule for similar calls; None
    if a pattern must not cover this call. change: of the file that it would write.
    """

    tool: str
    subject: str
    preview: str
    run: Callable[[threading.Event], str]
    asks: bool = True
    pattern: str | None = None
    change: FileChange | None = None

    def result(self, stop: threading.Event) -> str:
        """Run the action and return the text for the model: the result or the error."""
        try:
            return shortened_result(self.run(stop))
        except ToolError as error:
            return failure(error)
        except OSError as error:
            return failure(ToolError(f"{self.subject}: {error.strerror or error}"))


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: the JSON Schema of the arguments. plan: checks a call's arguments; may raise ToolError or OSError."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    plan: Callable[[dict[str, Any]], Action]


def schema_of(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """The JSON Schema of a built-in tool's arguments."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


class Toolbox:
    """The tools offered to a model."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @property
    def names(self) -> list[str]:
        """The tools' names."""
        return list(self._tools)

    def offered(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's format, for AnswerRequest.tools."""
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
            for tool in self._tools.values()
        ]

    def plan(self, call: ToolCall) -> Action:
        """Check a call against its tool's schema and restrictions. Changes nothing. Raises ToolError."""
        tool = self._tools.get(call.name)
        if tool is None:
            raise MalformedCallError(f"There is no tool {call.name[:64]!r}. Available: {', '.join(self._tools)}.")
        _check(call.arguments, tool)
        try:
            return tool.plan(call.arguments)
        except OSError as error:
            raise ToolError(f"{error.filename or call.name}: {error.strerror or error}") from error

    def must_call(self, call: ToolCall) -> str | None:
        """The tool_choice that constrains the retry of a malformed call to its schema; None for an unknown tool."""
        return call.name if call.name in self._tools else None


def _check(arguments: dict[str, Any], tool: Tool) -> None:
    import jsonschema_rs

    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise MalformedCallError(
            f"The arguments of {tool.name} have characters that cannot be written as UTF-8."
        ) from error
    try:  # offline: a server's schema must not fetch anything
        validator = jsonschema_rs.validator_for(dict(tool.parameters), offline=True)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise ToolError(f"{tool.name}: its schema cannot be used: {str(error).partition(chr(10))[0]}") from error
    wrong = next(validator.iter_errors(arguments), None)
    if wrong is not None:
        raise MalformedCallError(f"The arguments do not fit the schema of {tool.name}: {wrong.message[:300]}")


def failure(error: ToolError) -> str:
    """The text that a model gets for a failed call."""
    return shortened_result(f"Error: {error}")


def shortened_result(text: str) -> str:
    """The start and the end of a long text, with a line between them that says how much was left out."""
    if len(text) <= MAX_RESULT_CHARS:
        return text
    half = MAX_RESULT_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
