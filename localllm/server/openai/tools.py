"""Tools of OpenAI's requests as functions, the only kind of tool that chat templates support.

A custom tool, whose input is free text, is offered as a function with one string argument. A namespace is flattened
into its tools. Tools that the client runs have known arguments (client_tools.py). Tools that OpenAI runs itself, such
as web search, are left out, logged once, and named in the answer's warnings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.answer.tool_calls import ToolCall
from localllm.server.bodies import Object, note_ignored, shown
from localllm.server.errors import ApiError
from localllm.server.openai.client_tools import KINDS, function_of, runs_on_client

INPUT = "input"  # the argument of a custom tool
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_KEPT = ("description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool under the client's name for it. kind: "function", "custom" or one of KINDS. is_deferred: see toolbox."""

    name: str
    namespace: str | None = None
    kind: str = "function"
    is_deferred: bool = False

    @property
    def is_custom(self) -> bool:
        return self.kind == "custom"


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a request. functions: for chat templates, in the request's order. known: by function name.

    described: the names of functions that the conversation defines.
    """

    functions: Sequence[Object]
    known: Mapping[str, ClientTool]
    described: Sequence[str] = ()

    def client_tool(self, name: str) -> ClientTool:
        """The tool that a model has called by this name, whether or not it exists."""
        return self.known.get(name) or ClientTool(name)


def toolbox(tools: Sequence[Object], loaded: Sequence[Object] = ()) -> RequestTools:
    """The tools of /v1/responses, or of chat completions, whose definitions are one level deeper.

    loaded: those that the client's search for tools has found, which the conversation defines. If the client searches,
    deferred tools are offered only once they are loaded.
    """
    functions: list[Object] = []
    known: dict[str, ClientTool] = {}
    flat = list(_flattened(tools, None))
    searches = any(tool.kind == "tool_search" for tool, _ in flat)
    listed = [(tool, function) for tool, function in flat if not (searches and tool.is_deferred)]
    for tool, function in [*listed, *_flattened(loaded, None)]:
        name = function["function"]["name"]
        if name not in known:
            known[name] = tool
            functions.append(function)
    names = {function["function"]["name"] for _, function in listed}
    return RequestTools(functions, known, [name for name in known if name not in names])


def full_name(name: str, namespace: Any) -> str:
    """A function's name for the model, including its namespace. Raises ApiError 400."""
    if not namespace:
        return name
    if not isinstance(namespace, str):
        raise ApiError(400, "namespace must be a text")
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def custom_input(call: ToolCall) -> str:
    """The input text of a custom tool; all arguments' values, one a line, if the model named the argument otherwise."""
    value = call.arguments.get(INPUT, "\n".join(map(str, call.arguments.values())))
    return value if isinstance(value, str) else str(value)


def with_choice(box: RequestTools, choice: str | Object | None) -> Object:
    """The fields of an AnswerRequest about tools. Raises ApiError 400.

    Tools that are not allowed stay in the prompt, so that another choice does not change it.
    """
    fields: Object = {"tools": list(box.functions), "described": box.described}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        entries = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(entries, list):
            raise ApiError(400, "tool_choice of type allowed_tools needs a list of tools")
        fields["allowed"] = {name for entry in entries if isinstance(entry, dict) and (name := _chosen_name(entry))}
        choice = allowed.get("mode", "auto")
    if choice in (None, "auto"):
        return fields
    if choice == "none":
        return {**fields, "allowed": ()}
    if choice == "required":
        return {**fields, "tool_choice": ""}
    name = _chosen_name(choice) if isinstance(choice, dict) else None
    if name is None:
        raise ApiError(400, 'tool_choice must be "none", "auto", "required", allowed_tools or name a tool')
    return {**fields, "tool_choice": name}


def _chosen_name(choice: Object) -> str | None:
    if (kind := str(choice.get("type"))) in KINDS:
        return kind
    inner = choice.get("function") or choice.get("custom") or choice
    name = inner.get("name") if isinstance(inner, dict) else None
    return full_name(name, choice.get("namespace")) if isinstance(name, str) else None


def _flattened(tools: Any, namespace: str | None) -> Iterator[tuple[ClientTool, Object]]:
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, "tools must be a list of objects")
    for tool in tools:
        kind = str(tool.get("type") or "function")
        inner = tool.get(kind) if kind in ("function", "custom") else None
        about: Object = inner if isinstance(inner, dict) else tool
        if kind == "namespace":
            yield from _flattened(tool.get("tools") or [], _name_of(tool))
            continue
        if kind == "custom":
            fields: Object = {"description": _custom_description(about), "parameters": _INPUT_SCHEMA}
        elif kind == "function":
            fields = {key: about[key] for key in about if key not in ("type", "name")} if about is not tool else {}
            fields = fields or {key: about[key] for key in _KEPT if about.get(key)}
        elif kind in KINDS and runs_on_client(tool):
            fields = function_of(tool)
        else:
            note_ignored(f"tool of type {shown(kind)}, which only OpenAI runs")
            continue
        name = kind if kind in KINDS else _name_of(about)
        function = {"name": full_name(name, namespace), **fields}
        found = ClientTool(name, namespace, kind, is_deferred=tool.get("defer_loading") is True)
        yield found, {"type": "function", "function": function}


def _custom_description(about: Mapping[str, Any]) -> str:
    """The tool's description, with the grammar of its input if it has one."""
    text = str(about.get("description") or "")
    given = about.get("format")
    form = given.get("grammar", given) if isinstance(given, dict) else {}
    if not isinstance(form, dict) or not isinstance(form.get("definition"), str):
        return text
    return f"{text}\n\nThe input must fit this {form.get('syntax', 'lark')} grammar:\n{form['definition']}".strip()


def _name_of(tool: Mapping[str, Any]) -> str:
    name = tool.get("name")
    if not name or not isinstance(name, str):
        raise ApiError(400, f"a tool of type {str(tool.get('type', 'function'))[:32]} needs a name")
    return name
