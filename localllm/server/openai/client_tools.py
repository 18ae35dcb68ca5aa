"""Tools of /v1/responses that have a type of their own, and that the client runs: shells, patches, a search for tools.

The model gets each as a function with the tool's known arguments. https://platform.openai.com/docs/api-reference/responses
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.server.bodies import Object
from localllm.server.contents import left_out

_TEXT: Object = {"type": "string"}
_WHOLE: Object = {"type": "integer"}


@dataclass(frozen=True, slots=True)
class ClientKind:
    """A type of tools. function: their description and parameters. prefix: of a call's id.

    field: where a call's item has the arguments. fixed: further fields of a call; inside: further fields beside the
    arguments. told: what a result's item says to the model.
    """

    function: Object
    prefix: str
    field: str
    told: Callable[[Object], str]
    fixed: Object
    inside: Object

    def call(self, arguments: Mapping[str, Any]) -> Object:
        """The fields of a call's item that depend on the arguments."""
        return {self.field: {**self.inside, **arguments}}

    def arguments(self, item: Object) -> Object:
        """The arguments of a call's item."""
        given = item.get(self.field)
        fields = given if isinstance(given, dict) else {}
        return {key: value for key, value in fields.items() if value is not None and self.inside.get(key) != value}


def _schema(required: list[str], **properties: Object) -> Object:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _output(item: Object) -> str:
    """A result that is text, as local shells and patches send it."""
    output = item.get("output")
    return output if isinstance(output, str) and output else f"The status is {item.get('status') or 'completed'}."


def _of_commands(item: Object) -> str:
    """The result of shell commands, one after the other."""
    found = []
    output = item.get("output") or ()
    for one in output if isinstance(output, list | tuple) else [output]:
        if not isinstance(one, dict):
            return left_out(str(item["type"])[:64])
        outcome = one.get("outcome")
        ended = outcome if isinstance(outcome, dict) else {}
        found += [text for text in (one.get("stdout"), one.get("stderr")) if isinstance(text, str) and text]
        found.append("It timed out." if ended.get("type") == "timeout" else f"Exit code {ended.get('exit_code', 0)}.")
    return "\n".join(found)


_PATCH = (
    "Create, update or delete a file. diff: for create_file each line of the file after a plus sign; for update_file "
    "hunks that begin with @@, with lines that are kept (after a space), removed (-) and added (+)."
)
KINDS: Mapping[str, ClientKind] = {
    "local_shell": ClientKind(
        {
            "description": "Run a command, a program and its arguments, on this computer.",
            "parameters": _schema(
                ["command"],
                command={"type": "array", "items": _TEXT, "minItems": 1},
                working_directory=_TEXT,
                timeout_ms=_WHOLE,
                env={"type": "object", "additionalProperties": _TEXT},
            ),
        },
        "lsh",
        "action",
        _output,
        {},
        {"type": "exec", "env": {}},
    ),
    "shell": ClientKind(
        {
            "description": "Run commands in a shell on this computer.",
            "parameters": _schema(
                ["commands"],
                commands={"type": "array", "items": _TEXT, "minItems": 1},
                timeout_ms=_WHOLE,
                max_output_length=_WHOLE,
            ),
        },
        "sh",
        "action",
        _of_commands,
        {},
        {"timeout_ms": None, "max_output_length": None},
    ),
    "apply_patch": ClientKind(
        {
            "description": _PATCH,
            "parameters": _schema(
                ["type", "path"],
                type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                path=_TEXT,
                diff=_TEXT,
            ),
        },
        "apc",
        "operation",
        _output,
        {},
        {},
    ),
    "tool_search": ClientKind(
        {
            "description": "Search for tools that can be loaded.",
            "parameters": _schema(["query"], query=_TEXT),
        },
        "tsc",
        "arguments",
        lambda _item: "No tools were found.",
        {"execution": "client"},
        {},
    ),
}


def runs_on_client(tool: Object) -> bool:
    """Whether the client runs a tool of one of KINDS, and not OpenAI."""
    environment = tool.get("environment")
    if isinstance(environment, dict) and environment.get("type") != "local":
        return False
    return tool.get("type") != "tool_search" or tool.get("execution") == "client"


def function_of(tool: Object) -> Object:
    """The description and the parameters of such a tool; the client's own, if it has any."""
    own = {key: tool[key] for key in ("description", "parameters") if tool.get(key)}
    return KINDS[tool["type"]].function | own
