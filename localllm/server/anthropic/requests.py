"""Bodies of Anthropic's requests, and their conversion to conversations.

Features that only the cloud has (its own tools, files stored there) are left out and logged once. Message content that
cannot reach the model is replaced by a note that the model reads.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any

from pydantic import Field, ValidationError

from localllm.answer.late_tools import definitions, name_of, withdrawn
from localllm.answer.request import AnswerRequest, PinnedStart
from localllm.server.anthropic.client_tools import known
from localllm.server.bodies import Body, Extensions, NamedBody, Object, Objects, note_ignored, shown
from localllm.server.contents import (
    Part,
    file_parts,
    image_part,
    image_part_of_url,
    left_out,
    noted_image,
    plain,
    text_field,
    text_part,
)
from localllm.server.errors import ApiError
from localllm.server.limits import MAX_INT, MAX_MESSAGES, MAX_STOPS, MAX_TOOLS

_string = partial(text_field, "a block")

# Prefix of Claude Code's first system block, which changes from session to session and means nothing to a model.
BILLING = "x-anthropic-billing-header:"

# A tool of Claude Code's that is never to be called: it stands for deferred tools that are not there yet.
PLACEHOLDER = "DeferredToolPlaceholder"

_HOSTED_SEARCH = "tool_search_tool_"

MOST_PINS = 4
LIFETIMES_S = {"5m": 300.0, "1h": 3600.0}


class AnthropicMessage(Body):
    """A message. content: text or blocks. role: also "system", in place."""

    role: str
    content: str | Objects


class AnthropicTool(Body):
    """A tool that the model may call. type: other than "custom" for tools that Anthropic defines.

    defer_loading: the model knows it only once a tool_reference names it. cache_control: pins the tools.
    """

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: Object | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: Object | None = None


class OutputConfig(Body):
    """format: a JSON Schema that the answer must fit. effort: how much to reason."""

    parameter = "output_config"
    format: Object | None = None
    effort: Annotated[str, Field(max_length=32)] | None = None


class Thinking(Body):
    """type: enabled, adaptive or disabled; any other is the model's default."""

    parameter = "thinking"
    type: Any = None


class CountBody(NamedBody):
    """/v1/messages/count_tokens; also a part of /v1/messages."""

    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: str | Objects | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Object | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Object | None = None


class MessagesBody(CountBody, Extensions):
    """/v1/messages. output_format: the former name of output_config.format. cache_control: pins the whole prompt."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    cache_control: Object | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None


def messages_request(body: MessagesBody) -> AnswerRequest:
    """Convert a body. Decodes images: call it off the event loop. Raises ApiError 400, PictureError."""
    fields = body.request_fields(body.stop_sequences) | {"max_tokens": body.max_tokens}
    choice = body.tool_choice or {}
    found = conversation(body)
    if choice.get("type") == "none":
        found["allowed"] = ()  # the prompt stays as it is
    return AnswerRequest(
        **found,
        **fields | {"pins": _pins(body)},
        tool_choice=_tool_choice(choice),
        one_call=bool(choice.get("disable_parallel_tool_use")),
        format=_format(body),
    )


def _pins(body: MessagesBody) -> tuple[PinnedStart, ...]:
    """What cache_control pins: all up to the block that has it. Raises ApiError 400."""
    system = body.system if isinstance(body.system, list) else []
    before = [*(tool.cache_control for tool in body.tools or []), *(block.get("cache_control") for block in system)]
    times = [_seconds(control) for control in before if control is not None]
    found = [PinnedStart(max(times), _beginning(body, []))] if times else []
    for at, message in enumerate(body.messages):
        blocks = message.content if isinstance(message.content, list) else []
        for end, block in enumerate(blocks, 1):
            if (control := block.get("cache_control")) is not None:
                is_last = at == len(body.messages) - 1 and end == len(blocks)
                cut = message.model_copy(update={"content": blocks[:end]})
                messages = None if is_last else _beginning(body, [*body.messages[:at], cut])
                found.append(PinnedStart(_seconds(control), messages))
    if (marks := len(found) - bool(times) + len(times)) > MOST_PINS:
        raise ApiError(400, f"cache_control may end at most {MOST_PINS} parts of a request (got {marks})")
    if body.cache_control is not None:
        found.append(PinnedStart(_seconds(body.cache_control)))
    return tuple(found)


def _seconds(control: Any) -> float:
    """How long a cache_control pins. Raises ApiError 400."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise ApiError(400, 'cache_control must be an object of type "ephemeral"')
    ttl = control.get("ttl", "5m")
    if not isinstance(ttl, str) or ttl not in LIFETIMES_S:
        raise ApiError(400, f"cache_control: ttl must be {' or '.join(LIFETIMES_S)}")
    return LIFETIMES_S[ttl]


def _beginning(body: MessagesBody, messages: list[AnthropicMessage]) -> list[Object]:
    found: list[Object] = conversation(body.model_copy(update={"messages": messages}))["messages"]
    return found


def conversation(body: CountBody) -> Object:
    """The fields of an AnswerRequest that messages and count_tokens share."""
    system = _system(body.system)
    found: list[Object] = [{"role": "system", "content": system}] if system else []
    listed, deferred = _tools(body)
    loading = _Loading(listed, deferred, {tool.name for tool in body.tools or []})
    for message in body.messages:
        found += _messages(message, loading)
    tools, removed = [*listed, *loading.added.values()], loading.removed
    return {
        "messages": found,
        "tools": tools,
        "described": list(loading.added),
        "allowed": {name_of(tool) for tool in tools} - removed if removed else None,
        **_thinking(body),
    }


def _tools(body: CountBody) -> tuple[list[Object], dict[str, Object]]:
    """The tools to list at the beginning of the prompt, and the deferred ones by name.

    A tool that must be called is listed. If Anthropic's own search is to find the deferred ones, which cannot run here,
    all are.
    """
    choice = body.tool_choice or {}
    offered = [tool for tool in body.tools or [] if tool.name != PLACEHOLDER]
    searched = any((tool.type or "").startswith(_HOSTED_SEARCH) for tool in offered)
    listed: list[Object] = []
    deferred: dict[str, Object] = {}
    for tool in map(_named, filter(_is_described, offered)):
        if tool.defer_loading and not searched and tool.name != choice.get("name"):
            deferred[tool.name] = _tool(tool)
        else:
            listed.append(_tool(tool))
    return listed, deferred


class _Loading:
    """Follows which tools a conversation offers, and writes what changes where it changes.

    Deferred tools are defined where the conversation first refers to them, adds them, or has the result of a call.
    added: tools that are not in the prompt's list, by name. removed: names of tools that are offered no longer.
    """

    def __init__(self, listed: Sequence[Object], deferred: Mapping[str, Object], known: Collection[str]) -> None:
        """known: the names of all tools."""
        self._tools = {**deferred, **{name_of(tool): tool for tool in listed}}
        self._waiting = {*deferred}
        self._known = known
        self._called: dict[str, str] = {}  # names of tools by ids of calls
        self.added: dict[str, Object] = {}
        self.removed: set[str] = set()

    def block(self, block: Object) -> Object:
        """A block with the references in it as text. A further reference to the same tool is only its name."""
        kind, content = block.get("type"), block.get("content")
        if kind == "tool_reference":
            return text_part(self._referred(block.get("tool_name")))
        if kind in ("tool_addition", "tool_removal") and (told := self._changed(kind, block.get("tool"))):
            return text_part(told)
        if kind == "tool_use":
            self._called[str(block.get("id"))] = str(block.get("name"))
        if isinstance(content, list):
            block = {**block, "content": [self.block(one) if isinstance(one, dict) else one for one in content]}
        if kind == "tool_result" and (defined := self._definition(self._called.get(str(block.get("tool_use_id")), ""))):
            block = {**block, "content": [*_blocks(block.get("content")), text_part(defined)]}
        return block

    def _changed(self, kind: str, tool: Any) -> str:
        """What the model reads of a tool_addition or tool_removal; "" for tools that only Anthropic can offer."""
        told = tool if isinstance(tool, dict) else {}
        if told.get("type") == "tool_reference" and kind == "tool_addition":
            return self._referred(told.get("name"))
        if told.get("type") == "tool_reference":
            name = str(told.get("name"))
            self.removed |= {name} & (self._tools.keys() - self._waiting)
            return withdrawn([name])
        if told.get("type") == "tool_definition" and kind == "tool_addition":
            defined = _defined(told.get("definition"))
            if _is_described(defined):
                if defined.name not in self._tools:
                    self._tools[defined.name] = _tool(defined)
                    self._waiting.add(defined.name)
                return self._definition(defined.name) or defined.name
        return ""

    def _referred(self, given: Any) -> str:
        name = str(given or "")
        if name not in self._known and name not in self._tools:
            note_ignored(f"reference to the tool {shown(name)}, which the request does not have")
        return self._definition(name) or name

    def _definition(self, name: str) -> str:
        """The definition of a tool that is offered from here on; "" if it is already, or there is none."""
        if name in self._waiting:
            self._waiting.discard(name)
            self.added[name] = self._tools[name]
        elif name in self.removed:
            self.removed.discard(name)
        else:
            return ""
        return definitions([self._tools[name]])


def _defined(given: Any) -> AnthropicTool:
    """The tool of a tool_definition. Raises ApiError 400."""
    try:
        tool = AnthropicTool.model_validate(given)
    except ValidationError as error:
        raise ApiError(400, "a tool_definition needs a definition as tools have it") from error
    return _named(tool)


def _named(tool: AnthropicTool) -> AnthropicTool:
    if not tool.name:
        raise ApiError(400, "a tool needs a name")
    return tool


def _thinking(body: CountBody) -> Object:
    """The fields about thinking. Models that cannot think may skip it, since clients ask every model to think."""
    kind = body.thinking and body.thinking.type
    if kind == "disabled":
        return {"think": False}
    effort = body.output_config.effort if body.output_config else None
    think = effort or (True if kind in ("enabled", "adaptive") else None)
    return {"think": think, "may_skip_thinking": True}


def _format(body: MessagesBody) -> Any:
    given = (body.output_config.format if body.output_config else None) or body.output_format
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise ApiError(400, "output_config.format must be of type json_schema with a schema")
    return given["schema"]


def _system(system: str | Objects | None) -> str:
    """The system text, without Claude Code's billing header."""
    blocks = [text_part(system)] if isinstance(system, str) else system or []
    return "\n".join(text for block in blocks if not (text := _string(block, "text")).startswith(BILLING))


def _is_described(tool: AnthropicTool) -> bool:
    """Whether a tool's arguments are known: from its schema, or by its type. Others run only at Anthropic's."""
    if tool.type in (None, "custom") or tool.input_schema is not None or known(tool.type):
        return True
    note_ignored(f"tool of type {shown(tool.type)}, which has no input_schema")
    return False


def _tool(tool: AnthropicTool) -> Object:
    description, schema = known(tool.type) or (None, {})
    said = tool.description or description
    about: Object = {"description": said} if said else {}
    about |= {"parameters": tool.input_schema or schema, **({"strict": True} if tool.strict else {})}
    return {"type": "function", "function": {"name": tool.name, **about}}


def _tool_choice(choice: Object) -> str | None:
    """The tool that must be called; "" is any of them, None lets the model decide. Raises ApiError 400."""
    kind = choice.get("type", "auto")
    if kind in ("auto", "none"):
        return None
    if kind == "any":
        return ""
    name = choice.get("name")
    if kind != "tool" or not isinstance(name, str):
        raise ApiError(400, "tool_choice must be of type auto, any, none, or tool with a name")
    return name


def _messages(message: AnthropicMessage, loading: _Loading) -> list[Object]:
    """A message as chat templates expect it. Tool results become messages of their own, before the rest."""
    role = message.role
    if isinstance(message.content, str):
        return [{"role": role, "content": message.content}]
    parts: list[Part] = []
    results: list[Object] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    for block in map(loading.block, message.content):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking"))
        elif kind == "tool_use":
            call = {"name": _string(block, "name"), "arguments": block.get("input") or {}}
            calls.append({"id": _string(block, "id"), "type": "function", "function": call})
        elif kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": _result(block)})
        elif kind == "image" and role == "user" and not _is_stored(block):
            parts.append(_image(block.get("source")))
        elif kind != "redacted_thinking":
            parts += _parts(block, role)
    fields: Object = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    if calls:
        fields["tool_calls"] = calls
    rest = [{"role": role, "content": plain(parts), **fields}] if parts or fields or not results else []
    return [*results, *rest]


def _is_stored(block: Object) -> bool:
    """Whether a block's content is a file that is stored at Anthropic."""
    source = block.get("source")
    return isinstance(source, dict) and source.get("type") == "file"


def _image(source: Any) -> Part:
    """A block's image, in base64 or at a URL. Raises what image_part raises."""
    if not isinstance(source, dict) or source.get("type") != "base64":
        return image_part_of_url(source.get("url") if isinstance(source, dict) else None)
    return image_part(source.get("data"))


def _result(block: Object) -> str | list[Part]:
    """A tool's result: text, or parts if it has images."""
    content = plain(list(chain.from_iterable(_parts(inner, "tool") for inner in _blocks(block.get("content")))))
    return content or ("The tool failed without a message." if block.get("is_error") else "")


def _parts(block: Object, role: str) -> list[Part]:
    """A block as text, with the images of a tool's result, and pages of a document that are pictures."""
    if block.get("type") == "image" and role == "tool":
        return [noted_image(lambda: _image(block.get("source")))]
    if block.get("type") == "document":
        title = block.get("title")
        return [*([text_part(title)] if isinstance(title, str) else []), *_document(block.get("source"), role)]
    return [text_part(_text(block))]


def _joined(content: Any) -> str:
    """The text of a content, which is text or blocks."""
    return "\n".join(part["text"] for block in _blocks(content) for part in _parts(block, "assistant"))


def _blocks(content: Any) -> list[Object]:
    """The blocks of a content; text becomes one block. Raises ApiError 400."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, "content must be a text or a list of blocks")
    return content


def _text(block: Mapping[str, Any]) -> str:
    """A block as text. An unsupported kind becomes a note."""
    kind = block.get("type")
    if kind == "text":
        return _string(block, "text")
    if kind == "compaction" and isinstance(summary := block.get("content"), str):
        return f"Summary of the conversation so far:\n{summary}"
    title = block.get("title")
    head = [title] if isinstance(title, str) else []
    if kind == "search_result":
        source = block.get("source")
        return "\n".join([*head, *([source] if isinstance(source, str) else []), _joined(block.get("content"))])
    note_ignored(f"block of type {shown(kind)}")
    return left_out(str(kind)[:64])


def _document(source: Any, role: str) -> list[Part]:
    kind, data = (source.get("type"), source.get("data")) if isinstance(source, dict) else (None, None)
    if kind == "text" and isinstance(data, str):
        return [text_part(data)]
    if kind == "content" and isinstance(source, dict):
        return [text_part(_joined(source.get("content")))]
    if kind == "base64" and isinstance(source, dict):
        return file_parts(data, None, source.get("media_type"), "document", sees=role in ("user", "tool"))
    note_ignored(f"document whose source is of type {shown(kind)}")
    return [text_part(left_out("document"))]
