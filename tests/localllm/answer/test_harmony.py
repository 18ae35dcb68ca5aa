"""Answers of gpt-oss, however the text is cut into pieces."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_io.chat_template import ChatTemplate
from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.harmony import HarmonySplitter
from localllm.answer.splitting import AnswerSplitter, answer_splitter
from localllm.answer.tool_calls import ToolCall
from tests.localllm.answer.splitting import split_at

CUTS = st.lists(st.integers(0, 300), max_size=30)
THOUGHT = "<|channel|>analysis<|message|>I <b> think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes & <no>."
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'


def split(text: str, cuts: list[int], offers_tools: bool = True, starts_in_reasoning: bool = False) -> list[AnswerPart]:
    """The parts of a text that arrives in pieces; neighbours of the same kind are joined."""
    return split_at(
        HarmonySplitter({"add": {"type": "object"}} if offers_tools else {}, starts_in_reasoning), text, cuts
    )


@given(CUTS)
def test_channels_become_reasoning_and_content(cuts: list[int]) -> None:
    expected = [AnswerPart(PartKind.REASONING, "I <b> think."), AnswerPart(PartKind.CONTENT, "Yes & <no>.")]
    assert split(THOUGHT + FINAL, cuts) == expected
    assert split(THOUGHT + FINAL + "<|return|>", cuts) == expected
    assert split(THOUGHT.removesuffix("<|end|>") + FINAL, cuts) == expected, "a header ends what was before it"
    body = (THOUGHT + FINAL).removeprefix("<|channel|>analysis<|message|>")
    assert split(body, cuts, starts_in_reasoning=True) == expected


@given(CUTS)
def test_messages_for_functions_are_calls(cuts: list[int]) -> None:
    for call in (CALL, ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}'):
        for end in ("", "<|call|>"):
            _, part = split(f"{THOUGHT}<|start|>assistant{call}{end}", cuts)
            assert part.kind is PartKind.TOOL_CALLS and part.tool_calls == (ToolCall("add", {"a": 1}),)
    two = split(f"{CALL}<|call|><|start|>assistant{CALL}<|call|>", cuts)
    assert [call for part in two for call in part.tool_calls] == [ToolCall("add", {"a": 1})] * 2


@given(CUTS)
def test_text_that_is_not_a_call_stays_content(cuts: list[int]) -> None:
    assert split(CALL, cuts, offers_tools=False) == [AnswerPart(PartKind.CONTENT, '{"a": 1}')]
    broken = CALL.removesuffix("}")
    assert [part.unfinished for part in split(broken, cuts)] == [broken]
    preamble = "<|channel|>commentary<|message|>Let me see."
    assert split(preamble, cuts) == [AnswerPart(PartKind.CONTENT, "Let me see.")]


@given(CUTS)
def test_messages_of_one_kind_are_separated(cuts: list[int]) -> None:
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    content = [part.text for part in split(f"{said}{CALL}<|call|>{FINAL}", cuts) if part.kind is PartKind.CONTENT]
    assert content == ["I look.", "\nYes & <no>."]
    thoughts = split(f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}", cuts)
    assert thoughts[0] == AnswerPart(PartKind.REASONING, "I <b> think.\nI <b> think.")


@given(
    CUTS, st.sampled_from(["plain text", "to be or not to be", "<b>", "to=", "<|channel|>analysis", "<|start|>x" * 40])
)
def test_text_without_headers_is_content(cuts: list[int], text: str) -> None:
    assert "".join(part.text for part in split(text, cuts)).replace("<|start|>", "") == text.replace("<|start|>", "")
    assert {part.kind for part in split(text, cuts)} == {PartKind.CONTENT}


@pytest.mark.parametrize(
    ("name", "kind"), [("openai-gpt-oss-120b", HarmonySplitter), ("Qwen-Qwen3-0.6B", AnswerSplitter)]
)
def test_the_template_decides_who_splits(data_dir: Path, name: str, kind: type) -> None:
    template = ChatTemplate((data_dir / "templates" / f"{name}.jinja").read_text())
    assert type(answer_splitter(template.reasoning_markers, (), {})) is kind
