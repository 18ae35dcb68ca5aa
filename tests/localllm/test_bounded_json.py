"""JSON that is nested so deeply that Python parses it, in some versions, but cannot copy or search it."""

import contextlib
import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from localllm.answer.placeholders import Placeholders
from localllm.answer.tool_calls import CallReader, ToolCall
from localllm.answer.tool_calls.formats import FORMATS, Slot
from localllm.bounded_json import MAX_DEPTH, levels, parsed
from localllm.chats.importing import exported
from localllm.chats.records import Message, Role
from localllm.chats.store import SessionStore
from localllm.server.contents import as_arguments

DEEP = [MAX_DEPTH + 1, 500, 900, 20_000, 300_000]


def nested(depth: int) -> str:
    """An object, with a name of a control token behind an escape, and lists in it."""
    return '{"a": "\\u003cend>", "b": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def test_what_is_parsed_can_be_copied() -> None:
    for depth in (1, 2, MAX_DEPTH):
        value = parsed(nested(depth) if depth > 1 else "{}")
        assert len([*levels(value)]) == depth and copy.deepcopy(value) == value
    assert [parsed(text) for text in ("1", b'"x"', bytearray(b"null"))] == [1, "x", None]


@pytest.mark.parametrize("depth", DEEP)
def test_deeper_json_is_refused(depth: int) -> None:
    for text in (nested(depth), '{"a":' * depth + "1" + "}" * depth):
        with pytest.raises(ValueError, match="nested deeper than 128 levels"):
            parsed(text)


@pytest.mark.parametrize("depth", DEEP)
def test_arguments_that_are_nested_too_deeply_are_text(depth: int) -> None:
    assert as_arguments(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    assert as_arguments(nested(depth)) == {"malformed": nested(depth)}


@pytest.mark.parametrize("depth", DEEP)
def test_a_model_writes_no_call_that_is_nested_too_deeply(depth: int) -> None:
    form = next(one for one in FORMATS if one.openings[0] == "<tool_call>" and one.arguments is Slot.JSON)
    for written in (MAX_DEPTH, depth):
        reader = CallReader(form, {"f": {}}, form.openings[0])
        found = reader.read(f'\n{{"name": "f", "arguments": {nested(written)}}}\n</tool_call>')
        calls = [one for one in found if isinstance(one, ToolCall)]
        assert len(calls) == (written == MAX_DEPTH) and reader.broken == (written > MAX_DEPTH)


def test_a_chat_with_nested_arguments_is_stored_and_exported(tmp_path: Path) -> None:
    with contextlib.closing(SessionStore(tmp_path / "chats.db")) as store:
        session = store.create("m", {})
        call = ToolCall("f", parsed(nested(MAX_DEPTH)))
        store.add(Message(0, session, None, Role.ASSISTANT, calls=(call,)))
        (message,) = store.path(session)
        assert message.calls == (call,)
        assert json.loads(exported(store.summary(session), [message], None))["messages"][0]["calls"] == [asdict(call)]


def test_names_in_nested_arguments_are_replaced() -> None:
    def markup(text: str) -> list[tuple[int, int]]:
        return [(0, len(text))] if text == "<end>" else []

    for depth, replaced in [(MAX_DEPTH, True), *((depth, False) for depth in DEEP)]:
        calls = [{"function": {"name": "f", "arguments": nested(depth)}}]
        (message,) = Placeholders(markup).hide_messages([{"role": "assistant", "tool_calls": calls}])
        hidden: dict[str, Any] = message["tool_calls"][0]["function"]
        assert (hidden["arguments"] != nested(depth)) == replaced
        assert not replaced or json.loads(hidden["arguments"])["b"] == json.loads(nested(depth))["b"]
