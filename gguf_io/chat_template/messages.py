"""Reshapes conversations into the form that a template accepts.

`normalised` gives every message the fields that templates expect and clients leave out. `adapted` changes what this
template does not accept, as the probes showed. `milder_forms` are tried only after the template refused the messages.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import count, groupby, takewhile
from typing import Any

from gguf_io.chat_template.capabilities import Capabilities, Message
from gguf_io.errors import TemplateError, shortened

SYSTEM_ROLES = frozenset({"system", "developer"})
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def normalised(messages: Sequence[Mapping[str, Any]], knows_developer: bool) -> list[Message]:
    """Copies of the messages with all expected fields.

    `developer` becomes `system` unless the template knows it. Reasoning is stored under both names that templates
    read. Tool calls have type, id and name, and results name the call that they answer. Raises TemplateError naming a
    malformed message.
    """
    copies: list[Message] = []
    open_calls = _OpenCalls()
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f'message {number} is not an object with a "role"')
        copy = {"content": None, **message}
        if copy["content"] is not None and not isinstance(copy["content"], str | list):
            raise TemplateError(f"message {number}: content is text, a list of parts or null")
        if copy["role"] == "developer" and not knows_developer:
            copy["role"] = "system"
        reasoning = next((copy[key] for key in _REASONING_KEYS if copy.get(key)), None)
        if reasoning is not None:
            copy |= {"reasoning_content": reasoning, "thinking": reasoning}
        if calls := copy.pop("tool_calls", None):
            if not isinstance(calls, list):
                raise TemplateError(f"message {number}: tool_calls is not a list")
            copy["tool_calls"] = [_complete_call(call, number, index) for index, call in enumerate(calls)]
            open_calls.add(copy["tool_calls"])
        if copy["role"] == "tool":
            open_calls.complete(copy)
        copies.append(copy)
    return copies


def _complete_call(call: Any, number: int, index: int) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f'message {number}: tool call {index + 1} has no "function" with a "name"')
    # Nine characters: Mistral's templates accept no other length.
    made_up = {"id": f"call{number % 1000:03d}{index % 100:02d}", "type": "function"}
    return {**made_up, **call, "function": {"arguments": {}, **function}}


class _OpenCalls:
    """Tool calls without a result yet, looked up by id, name, both, or in order."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str | None, str | None], deque[Message]] = defaultdict(deque)
        self._closed: set[int] = set()

    def add(self, calls: Sequence[Message]) -> None:
        """Add calls in order. The caller must keep each alive, since closed ones are identified by `id()`."""
        for call in calls:
            key, name = repr(call["id"]), repr(call["function"]["name"])
            for queue in ((key, name), (key, None), (None, name), (None, None)):
                self._queues[queue].append(call)

    def complete(self, result: Message) -> None:
        """Link a tool's result to the first open call that its id or name matches, and close that call."""
        name = result.get("name") or result.get("tool_name")
        key = repr(result["tool_call_id"]) if "tool_call_id" in result else None
        queue = self._queues[key, repr(name) if name else None]
        while queue:
            call = queue.popleft()
            if id(call) not in self._closed:
                self._closed.add(id(call))
                result |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
                return
        if name:
            result["name"] = name


def adapted(messages: Sequence[Message], takes: Capabilities) -> list[Message]:
    """The messages in the form that this template accepts.

    Content becomes text or a list of parts; null becomes "", or in messages with tool calls the reverse. Arguments of
    tool calls become objects or JSON text. Unsupported tool calls are written into the content as JSON, and unsupported
    results become user messages. Later system messages stay in place, if need be as user messages (_late_as_user).
    Without a system role, system text goes before the first user message's.
    """
    fitted = [_fit_message(message, takes, number) for number, message in enumerate(messages, start=1)]
    fitted = _late_as_user(fitted, SYSTEM_ROLES - takes.late_roles)
    return fitted if takes.system else _without_system(fitted)


def _fit_message(message: Message, takes: Capabilities, number: int) -> Message:
    fitted = dict(message)
    content = fitted["content"]
    if not content and "tool_calls" in fitted and takes.null_calls != takes.empty_calls:
        content = None if takes.null_calls else ""
    elif content is None and not ("tool_calls" in fitted and takes.null_calls):
        content = ""
    if isinstance(content, str) and not takes.text_content:
        content = [{"type": "text", "text": content}]
    elif isinstance(content, list) and not (takes.typed_content and _needs_parts(content, takes)):
        content = _flat_text(content, number)
    fitted["content"] = content
    if "tool_calls" in fitted:
        fitted["tool_calls"] = [_fit_call(call, takes, number) for call in fitted["tool_calls"]]
        if not takes.tool_calls:
            written = _calls_as_text(fitted.pop("tool_calls"))
            fitted["content"] = _join_contents([fitted["content"] or "", written])
    if fitted["role"] == "tool" and not takes.tool_results:
        fitted = {"role": "user", "content": fitted["content"]}
    return fitted


def _fit_call(call: Message, takes: Capabilities, number: int) -> Message:
    arguments = call["function"]["arguments"] or {}
    if isinstance(arguments, str) and not takes.text_arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"message {number}: the arguments of a tool call are not JSON: {error}") from None
    elif not isinstance(arguments, str) and takes.text_arguments and not takes.object_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _calls_as_text(calls: Sequence[Message]) -> str:
    functions = [call["function"] for call in calls]
    return json.dumps(
        [{key: function[key] for key in ("name", "arguments")} for function in functions], ensure_ascii=False
    )


def _needs_parts(content: Sequence[Any], takes: Capabilities) -> bool:
    """Whether a content must stay a list. Some templates read only the first of several texts."""
    return not takes.text_content or any(not isinstance(one, Mapping) or one.get("type") != "text" for one in content)


def _flat_text(parts: Sequence[Any], number: int) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(
                f"message {number} has a part of type {shortened(kind)!r}, and this model's chat template takes text"
            )
        texts.append(text)
    return "\n".join(texts)


def milder_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Equivalent forms of messages that the template has refused, each different from the one before.

    The changes add up: adjacent messages of one role are joined; then later system messages become user messages; then
    the assistant answers tools' results before a user's message; then ids of calls become nine letters and digits.
    """
    tried = list(messages)
    for step in (_join_neighbours, _late_as_user, _answered_results, _short_ids):
        changed = _join_neighbours(step(tried))
        if changed != tried:
            yield changed
        tried = changed


def _join_neighbours(messages: list[Message]) -> list[Message]:
    """Join adjacent messages of one role, except tool results and messages with tool calls or reasoning."""
    numbers = count()

    def run_of(message: Message) -> Any:
        alone = message["role"] == "tool" or any(key in message for key in ("tool_calls", "reasoning_content"))
        return next(numbers) if alone else message["role"]

    joined: list[Message] = []
    for _, run in groupby(messages, key=run_of):
        first, *others = run
        contents = [message["content"] for message in (first, *others)]
        joined.append({**first, "content": _join_contents(contents)} if others else first)
    return joined


def _join_contents(contents: Sequence[Any]) -> Any:
    """Contents joined: as text with a blank line between, or as a list of parts if one of them is a list."""
    texts = next((at for at, content in enumerate(contents) if not isinstance(content, str)), len(contents))
    text = "\n\n".join(content for content in contents[:texts] if content)
    if texts == len(contents):
        return text
    return [part for content in (text, *contents[texts:]) for part in _as_parts(content)]


def _as_parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _late_as_user(messages: list[Message], roles: Container[str] = SYSTEM_ROLES) -> list[Message]:
    """System messages after other messages as user messages between <system> tags, and the first ones joined.

    Behind a tool's result they become part of it: a user message would end the assistant's turn, from whose calls
    templates then remove the reasoning. Moved to the front, a late message would change the prompt from its beginning
    on, so that nothing computed before could be reused; many templates drop it. roles: of the messages to change.
    """
    if not any(message["role"] in roles for message in messages[1:]):
        return messages
    first = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    rest: list[Message] = []
    for message in messages[len(first) :]:
        if message["role"] not in roles:
            rest.append(message)
        elif rest and rest[-1]["role"] == "tool":
            rest[-1] = {**rest[-1], "content": _join_contents([rest[-1]["content"], _tagged(message["content"])])}
        else:
            rest.append({"role": "user", "content": _tagged(message["content"])})
    if any(message["role"] in roles for message in first[1:]):
        first = [{**first[0], "content": _join_contents([message["content"] for message in first])}]
    return first + rest


def _tagged(content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": "<system>\n"}, *content, {"type": "text", "text": "\n</system>"}]
    return f"<system>\n{content}\n</system>"


def _answered_results(messages: list[Message]) -> list[Message]:
    """An assistant's message between a tool's result and a user's message, for templates in which both alternate."""
    answered: list[Message] = []
    for message in messages:
        if answered and answered[-1]["role"] == "tool" and message["role"] == "user":
            answered.append({"role": "assistant", "content": "Done."})
        answered.append(message)
    return answered


def _short_ids(messages: list[Message]) -> list[Message]:
    def shortened(holder: Message, key: str) -> Message:
        return {**holder, key: hashlib.sha256(str(holder[key]).encode()).hexdigest()[:9]} if key in holder else holder

    return [
        {**short, "tool_calls": [shortened(call, "id") for call in short["tool_calls"]]}
        if "tool_calls" in short
        else short
        for short in (shortened(message, "tool_call_id") for message in messages)
    ]


def _without_system(messages: list[Message]) -> list[Message]:
    """The first system messages' text moved before that of the user's message after them, else as a user message."""
    first = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    if not first:
        return messages
    rest = messages[len(first) :]
    contents = [message["content"] for message in first]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": _join_contents([*contents, rest[0]["content"]])}, *rest[1:]]
    return [{**first[0], "role": "user", "content": _join_contents(contents)}, *rest]
