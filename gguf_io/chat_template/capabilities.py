"""What a template supports, found by rendering small probe conversations and searching the output for their words."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gguf_io.chat_template.sandbox import RenderOutcome, TemplateSandbox

# An opening and a closing marker; a closing "" is the end of the answer.
Marker = tuple[str, str]
# Markers around reasoning, as models' templates write them.
_REASONING: tuple[Marker, ...] = (
    ("<think>", "</think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|begin|>assistant<|think|>", "<|end|>"),
)

Message = dict[str, Any]

_USER: Message = {"role": "user", "content": "quince"}
_TYPED_USER: Message = {"role": "user", "content": [{"type": "text", "text": "quince"}]}
_SYSTEM: Message = {"role": "system", "content": "medlar"}
_LAST: Message = {"role": "user", "content": "sloe"}
_REPLY: Message = {"role": "assistant", "content": "rowan", "reasoning_content": "damson", "thinking": "damson"}
_RESULT: Message = {"role": "tool", "name": "bullace", "tool_call_id": "call00001", "content": "sorb"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bullace",
        "description": "Finds fruit.",
        "parameters": {
            "type": "object",
            "properties": {"orchard": {"type": "string", "description": "Where."}},
            "required": ["orchard"],
        },
    },
}


def _call(arguments: object, content: str | None = "") -> Message:
    function = {"name": "bullace", "arguments": arguments}
    calls = [{"type": "function", "id": "call00001", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


_OBJECT = {"tree": "service"}
_TEXT = json.dumps(_OBJECT)
_PROBES: dict[str, tuple[list[Message], bool]] = {
    # name: the messages, and whether to offer a tool
    "user": ([_USER], False),
    "typed user": ([_TYPED_USER], False),
    "system": ([_SYSTEM, _USER], False),
    "developer": ([{**_SYSTEM, "role": "developer"}, _USER], False),
    "reply": ([_USER, _REPLY], False),
    "late system": ([_SYSTEM, _USER, _REPLY, {"role": "system", "content": "lingon"}, _LAST], False),
    "late developer": ([_SYSTEM, _USER, _REPLY, {"role": "developer", "content": "lingon"}, _LAST], False),
    "tools": ([_USER], True),
    "tools and system": ([_SYSTEM, _USER], True),
    "object in call": ([_USER, _call(_OBJECT), _RESULT], True),
    "text in call": ([_USER, _call(_TEXT), _RESULT], True),
    "object in null call": ([_USER, _call(_OBJECT, None), _RESULT], True),
    "text in null call": ([_USER, _call(_TEXT, None), _RESULT], True),
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one template accepts unchanged. For the rest, `messages.py` reshapes the conversation."""

    variables: frozenset[str]  # its undeclared variables
    null_tools: bool  # pass `tools` as null when there are none, not as an empty list
    tools: bool
    system: bool
    developer: bool  # a role of its own
    late_roles: frozenset[str]  # of "system" and "developer", those whose later messages it writes where they stand
    text_content: bool  # content as a string
    typed_content: bool  # content as a list of {"type": "text", "text": ...}
    tool_calls: bool
    empty_calls: bool  # tool calls with content ""
    null_calls: bool  # tool calls with content null
    text_arguments: bool  # arguments of tool calls as JSON text
    object_arguments: bool  # arguments of tool calls as objects
    tool_results: bool
    reasoning_markers: tuple[Marker, ...]
    shown: str  # the source and the rendered probes


def probe(sandbox: TemplateSandbox, source: str, special_tokens: Mapping[str, str]) -> Capabilities:
    """Render the probes in at most four sandbox requests. Raises TemplateError if the template does not compile."""
    variables = sandbox.variables()
    outcomes = _render_probes(sandbox, special_tokens, variables, null_tools=True)
    null_tools = outcomes["user"].refusal is None
    if not null_tools:
        outcomes = _render_probes(sandbox, special_tokens, variables, null_tools=False)
    text = {name: outcome.text for name, outcome in outcomes.items()}
    takes_text = "quince" in text["user"]
    takes_typed = text["typed user"] == text["user"] if takes_text else "quince" in text["typed user"]
    if takes_typed and not takes_text:
        outcomes = _render_probes(sandbox, special_tokens, variables, null_tools, typed=True)
        text = {name: outcome.text for name, outcome in outcomes.items()}
    shown = source + "".join(text.values())
    empty_calls = any(_shows_arguments(text[name]) for name in ("object in call", "text in call"))
    call = "call" if empty_calls else "null call"
    with_object, with_text = text[f"object in {call}"], text[f"text in {call}"]
    takes_object, takes_json = _shows_arguments(with_object), _shows_arguments(with_text)
    null_call = max(text["object in null call"], text["text in null call"], key=_shows_arguments)
    return Capabilities(
        variables=variables,
        null_tools=null_tools,
        tools="bullace" in text["tools"] or "bullace" in text["tools and system"],
        system="medlar" in text["system"],
        developer="developer" in source and "medlar" in text["developer"],
        late_roles=frozenset(role for role in ("system", "developer") if _keeps_place(text[f"late {role}"])),
        text_content=takes_text or not takes_typed,
        typed_content=takes_typed,
        tool_calls=takes_object or takes_json,
        empty_calls=empty_calls,
        null_calls=_shows_arguments(null_call) and null_call.count("None") <= with_object.count("None"),
        text_arguments=takes_json and (with_text == with_object or not takes_object),
        object_arguments=takes_object,
        tool_results=any("sorb" in text[name] for name in text if name.endswith("call")),
        reasoning_markers=find_markers(shown),
        shown=shown,
    )


def tool_variables(tools: list[Any], variables: frozenset[str], null_tools: bool) -> dict[str, Any]:
    """The variables that carry the tools: `tools`, and for Firefunction `functions` and `datetime`.

    Firefunction writes `datetime` after "Today is". It gets the date only: with the time of day, every turn's prompt
    would begin differently and no prefix could be reused.
    """
    values: dict[str, Any] = {"tools": None if null_tools and not tools else tools}
    if "tools" not in variables and "functions" in variables:
        values["functions"] = json.dumps(tools, indent=2) if tools else ""
        values["datetime"] = datetime.now(UTC).strftime("%b %d %Y")
    return values


def _render_probes(
    sandbox: TemplateSandbox,
    special_tokens: Mapping[str, str],
    variables: frozenset[str],
    null_tools: bool,
    typed: bool = False,
) -> dict[str, RenderOutcome]:
    """typed: write all contents as parts."""
    renders = [
        {
            **special_tokens,
            **tool_variables([_TOOL] if offered else [], variables, null_tools),
            "messages": [_with_parts(message) for message in messages] if typed else messages,
            "add_generation_prompt": messages[-1]["role"] != "assistant",
        }
        for messages, offered in _PROBES.values()
    ]
    return dict(zip(_PROBES, sandbox.render(renders), strict=True))


def _with_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _keeps_place(text: str) -> bool:
    """Whether the late message of a probe is written once, between the messages around it."""
    return text.count("lingon") == 1 and text.find("quince") < text.find("lingon") < text.find("sloe")


def _shows_arguments(text: str) -> bool:
    """Whether the text has the arguments, neither as a Python repr nor as JSON quoted twice."""
    return "service" in text and "{'tree'" not in text and '\\"tree' not in text


def find_markers(text: str) -> tuple[Marker, ...]:
    """The markers of _REASONING whose opening and closing both occur in the text, enclosing ones first."""
    return tuple((opening, closing) for opening, closing in _REASONING if opening in text and closing in text)
