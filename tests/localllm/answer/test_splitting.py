"""Content, reasoning and tool calls, however the text is cut into pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.splitting import AnswerSplitter
from localllm.answer.tool_calls import ToolCall, parse_tool_calls
from localllm.engine.detokenizer import Detokenizer
from tests.localllm.answer.splitting import split_at

THINK = [("<think>", "</think>")]
CALLS = [("<tool_calls>", "</tool_calls>"), ("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]", "")]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def split(text: str, cuts: list[int], starts_in_reasoning: bool = False) -> list[AnswerPart]:
    """The parts of a text that comes in pieces, neighbours of one kind joined."""
    return split_at(AnswerSplitter(THINK, CALLS, starts_in_reasoning), text, cuts)


CUTS = st.lists(st.integers(0, 200), max_size=30)


@given(CUTS)
def test_sections_are_found_across_pieces(cuts: list[int]) -> None:
    parts = split(f"\n<think>\nI <b> think\n\n</think>\n\nSo \n it is: \n{CALL}\n{CALL} done\n", cuts)
    assert [(part.kind.value, part.text) for part in parts] == [
        ("reasoning", "I <b> think"),
        ("content", "So \n it is:"),
        ("tool_calls", CALL),
        ("tool_calls", CALL),
        ("content", "done\n"),
    ]
    assert parts[2].tool_calls == (ToolCall("add", {"a": 1}),)


@given(CUTS)
def test_white_space_stays_where_no_marker_is(cuts: list[int]) -> None:
    assert split(" \n a \n\n b \n", cuts) == [AnswerPart(PartKind.CONTENT, " \n a \n\n b \n")]
    assert split(" and so\n</think>\n", cuts, starts_in_reasoning=True) == [
        AnswerPart(PartKind.REASONING, " and so"),
    ]


@given(CUTS)
def test_markers_of_reasoning_within_an_answer_are_text(cuts: list[int]) -> None:
    assert split("Write <think>so</think>!", cuts) == [AnswerPart(PartKind.CONTENT, "Write <think>so</think>!")]
    assert split("<think>a</think>b <think>c</think>", cuts) == [
        AnswerPart(PartKind.REASONING, "a"),
        AnswerPart(PartKind.CONTENT, "b <think>c</think>"),
    ]
    assert split("</think>!", cuts) == [AnswerPart(PartKind.CONTENT, "</think>!")]


@given(CUTS)
def test_reasoning_that_the_prompt_opened(cuts: list[int]) -> None:
    assert split("because</think>yes", cuts, starts_in_reasoning=True) == [
        AnswerPart(PartKind.REASONING, "because"),
        AnswerPart(PartKind.CONTENT, "yes"),
    ]
    assert split("never end", cuts, starts_in_reasoning=True) == [AnswerPart(PartKind.REASONING, "never end")]


@given(
    CUTS, st.sampled_from(["<tool_call>add(1)</tool_call>", '<tool_call>{"name": "x"', "a <tool", "x [TOOL_CALLS]!"])
)
def test_what_is_no_call_stays_content(cuts: list[int], text: str) -> None:
    assert split(text, cuts) == [AnswerPart(PartKind.CONTENT, text)]


@given(st.text("<>/thinktool_calls[]TOCALS{}", max_size=60), CUTS)
def test_no_text_is_lost(text: str, cuts: list[int]) -> None:
    joined = "".join(part.text for part in split(text, cuts))
    for marker in THINK[0]:
        text, joined = text.replace(marker, ""), joined.replace(marker, "")
    assert joined == text


@pytest.mark.parametrize(
    ("opening", "body", "names"),
    [
        ("<tool_call>", '{"name": "f", "arguments": {}}', ["f"]),
        ("<tool_call>", '{"name": "f", "parameters": {"x": [1]}}', ["f"]),
        ("[TOOL_CALLS]", '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": "{}"}]', ["f", "g"]),
        ("[TOOL_CALLS]", 'f[ARGS]{"x": 1}', ["f"]),
        ("<function=", 'f>{"x": 1}', ["f"]),
        ("<tool_call>", "\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n", ["f"]),
        ("<tool_calls>", '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', ["f", "g"]),
        ("<tool_call>", '{"name": "f", "arguments": [1]}', []),
        ("<tool_call>", '{"name": 1, "arguments": {}}', []),
        ("<tool_call>", '{"name": "f", "arguments": {}} and more', []),
        ("<tool_call>", "[1, 2]", []),
        ("<tool_call>", "[" * 100_000, []),
        ("<tool_call>", "", []),
    ],
)
def test_forms_of_calls(opening: str, body: str, names: list[str]) -> None:
    assert [call.name for call in parse_tool_calls(opening, body)] == names


def test_parameters_are_json_where_they_can_be() -> None:
    body = "<function=f><parameter=n>3</parameter><parameter=s>three</parameter></function>"
    assert parse_tool_calls("<tool_call>", body) == (ToolCall("f", {"n": 3, "s": "three"}),)


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3), CUTS)
def test_detokenizer_cuts_at_the_first_stop_string(text: str, stop: list[str], cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    detokenizer = Detokenizer(stop)
    shown = ""
    for at, end in itertools.pairwise(edges):
        if not detokenizer.stopped:
            shown += detokenizer.push(data[at:end])
    shown += detokenizer.flush()
    found = [text.find(word) for word in stop if word in text]
    if not found:
        assert shown == text
    else:
        assert text.startswith(shown) and detokenizer.stopped
        assert not any(word in shown for word in stop)
