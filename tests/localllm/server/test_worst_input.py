"""Large worst-case inputs for every loop and expression that reads foreign text: one that is not linear hangs."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from localllm.answer.harmony import HarmonySplitter
from localllm.answer.placeholders import Placeholders
from localllm.answer.splitting import AnswerSplitter
from localllm.answer.tool_calls.formats import FORMATS
from localllm.server.errors import LONGEST_MESSAGE, ApiError, message_of
from localllm.server.json_body import parse_json, what_is_wrong
from localllm.server.ollama.options import read_options
from localllm.server.openai.schema import CompletionBody, EmbeddingsBody
from localllm.server.options import parse_duration

SIZE = 1_000_000
ANSWER = 250_000
"""Characters: more than today's models write in one answer."""
MARKERS = ("<function=", "<function=a>", "<parameter=a>", "<function=a><parameter=b>", "<tool_call>", "f[ARGS]", "```")
LETTERS = ("a", " ", "a ", "[", "{", '"', "<", ",", "1", "<think>", "</think>", "<|channel|>", "<|start|>", "<|end|>")


def filled(piece: str, size: int = SIZE) -> str:
    return piece * (size // len(piece))


@pytest.mark.parametrize("piece", [*MARKERS, *LETTERS])
def test_a_long_answer_is_read_in_one_go(piece: str) -> None:
    text = filled(piece, ANSWER)
    tools = {"f": {"type": "object"}}
    splitters: list[tuple[str, Callable[[], Any]]] = [
        ("<tool_call>", lambda: AnswerSplitter([("<think>", "</think>")], FORMATS[-8:], tools)),
        ('<tool_call>{"name": "f", "arguments": {', lambda: AnswerSplitter([], FORMATS[-8:], tools)),
        ("<｜DSML｜tool_calls>", lambda: AnswerSplitter([], FORMATS[:6], tools)),  # noqa: RUF001
        ("to=functions.f<|message|>", lambda: HarmonySplitter(tools, False)),
    ]
    for opening, make in splitters:
        for begin in ("", opening):
            splitter = make()
            for at in range(0, len(text), 64):
                splitter.push(begin + text[at : at + 64])
                begin = ""  # noqa: PLW2901
            splitter.flush()


def test_many_names_of_control_tokens_in_one_message() -> None:
    def markup(text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer("<think>|<x>", text)]

    literal = Placeholders(markup, ["<think>"])
    literal.hide_messages([{"role": "assistant", "content": filled("<think>")}])
    literal.hide_messages([{"role": "assistant", "content": filled("<x><think>")}])
    parts = [{"type": "text", "text": "<x>"}] * (SIZE // 10)
    (hidden,) = literal.hide_messages([{"role": "user", "content": parts}])
    assert not any(part["text"] == "<x>" for part in hidden["content"])


@pytest.mark.parametrize("piece", ["1", "1m", "1.", ".", "x", "-", "1m "])
def test_durations(piece: str) -> None:
    with pytest.raises(ValueError, match="invalid duration") as refused:
        parse_duration(filled(piece))
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("item", ["[1]", "{}", "1", '"a"', "[[[1]]]"])
def test_bodies_are_bounded_in_values(item: str) -> None:
    with pytest.raises(ValueError, match="values"):
        parse_json(b"[" + b",".join([item.encode()] * 2_100_000) + b"]")


@pytest.mark.parametrize("item", ["[1]", "{}", "[[[1]]]"])
def test_too_many_lists_are_refused_before_they_are_made(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("the body was parsed"))
    with pytest.raises(ValueError, match="more than"):
        parse_json(f"[{','.join([item] * 200_000)}]".encode())


@pytest.mark.parametrize("text", ["[" * 1_000_000, "{," * 1_500_000, '\\"[' * 300_000, "\\\\[" * 300_000])
def test_brackets_and_commas_in_strings_are_text(text: str) -> None:
    assert parse_json(f'{{"prompt": "{text}", "n": [1]}}'.encode())["n"] == [1]


@pytest.mark.parametrize("piece", ['\\"[', '"[', '"\\[', '\\\\"['])
@pytest.mark.parametrize("end", ["", "\\", '"', "["])
def test_strings_that_do_not_end_are_refused_in_linear_time(piece: str, end: str) -> None:
    with pytest.raises(ValueError, match="JSON"):
        parse_json(f'["{piece * 1_000_000}{end}'.encode())


@pytest.mark.parametrize("model", [CompletionBody, EmbeddingsBody])
@pytest.mark.parametrize("item", ['"a"', "[1]", "1.5", "{}"])
def test_lists_of_many_wrong_items_are_refused_at_the_first(model: type[BaseModel], item: str) -> None:
    body = parse_json(
        f'{{"prompt": [{",".join([item] * 40_000)}], "input": [{",".join([item] * 40_000)}, 1]}}'.encode()
    )
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in refused.value.errors()]
    assert len(faults) < 10
    assert len(what_is_wrong(faults, body)) < 300


def test_what_is_wrong_is_said_in_few_words(caplog: pytest.LogCaptureFixture) -> None:
    read_options({filled("x"): 1})
    assert len(caplog.text) < 200
    assert len(message_of(ApiError(400, filled("x")))) < LONGEST_MESSAGE + 10
