"""Content, reasoning and tool calls, however the text is cut into pieces."""

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.harmony import HarmonySplitter
from localllm.answer.splitter import AnswerScope, Splitter
from localllm.answer.splitting import AnswerSplitter, ThinkingFirst
from localllm.answer.tool_calls import CallFormat, ToolCall
from localllm.answer.tool_calls.formats import BARE, FORMATS
from localllm.answer.tool_calls.reader import LONGEST_WORD
from localllm.engine.stream import Detokenizer
from tests.localllm.answer.splitting import split_at

THINK = [("<think>", "</think>")]
TOOLS = {name: {"type": "object"} for name in ("add", "f", "g")}


def form(opening: str, contains: str = "") -> CallFormat:
    """The row of the table whose calls contain a text."""
    return next(row for row in FORMATS if row.openings[0] == opening and contains in str(row.call))


HERMES, MISTRAL = form("<tool_call>", '"arguments"'), form("[TOOL_CALLS]", "[ARGS]")
CALLS = [form("<tool_calls>"), HERMES, MISTRAL]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def split(text: str, cuts: list[int], starts_in_reasoning: bool = False) -> list[AnswerPart]:
    """The parts of a text that arrives in pieces; neighbours of the same kind, and parts of the same
    call, are joined.
    """
    return split_at(AnswerSplitter(THINK, CALLS, TOOLS, starts_in_reasoning), text, cuts)


CUTS = st.lists(st.integers(0, 200), max_size=30)


@given(CUTS)
def test_sections_are_found_across_pieces(cuts: list[int]) -> None:
    parts = split(f"\n<think>\nI <b> think\n\n</think>\n\nSo \n it is: \n{CALL}\n{CALL} done\n", cuts)
    assert [(part.kind.value, part.text) for part in parts] == [
        ("reasoning", "I <b> think"),
        ("content", "So \n it is:"),
        ("tool_calls", CALL + CALL),
        ("content", " \ndone\n"),
    ]
    assert parts[2].tool_calls == (ToolCall("add", {"a": 1}),) * 2


@given(CUTS)
def test_texts_around_calls_are_separated_as_the_model_separated_them(cuts: list[int]) -> None:
    for text, content in {
        f"Look.\n{CALL}\n\nSeen.": "Look.\nSeen.",
        f"Look.{CALL}\n\nSeen.": "Look.\n\nSeen.",
        f"Look.{CALL}Seen.": "Look.\nSeen.",
        f"Look. {CALL}\n{CALL}\nSeen. ": "Look. Seen. ",
        f"{CALL}\nSeen.": "Seen.",
        f"<think>so</think>\n\n{CALL}\nSeen.\n{CALL}\nGone": "Seen.\nGone",
        f"Look.\n{CALL}\n<tool_call>no": "Look.\n<tool_call>no",
    }.items():
        found = split(text, cuts)
        assert "".join(part.text for part in found if part.kind is PartKind.CONTENT) == content


SCOPES: dict[str, tuple[Callable[[], Splitter], str, str]] = {
    "markers": (lambda: AnswerSplitter(THINK, CALLS, TOOLS), "<think>\nSTOP\n</think>\n\nOne. STOP Two.", "One. "),
    "opened by the prompt": (
        lambda: AnswerSplitter(THINK, CALLS, TOOLS, starts_in_reasoning=True),
        "a STOP b</think>STOPPED",
        "",
    ),
    "a call": (
        lambda: AnswerSplitter(THINK, CALLS, TOOLS),
        '<tool_call>{"name": "add", "arguments": {"a": "STOP"}}</tool_call>\nOne STOP',
        "One ",
    ),
    "no call": (
        lambda: AnswerSplitter(THINK, CALLS, TOOLS),
        '<tool_call>{"name": "STOP"} STOP',
        '<tool_call>{"name": "',
    ),
    "a marker's beginning": (lambda: AnswerSplitter(THINK, CALLS, TOOLS), "<thSTOP", "<th"),
    "a format": (lambda: ThinkingFirst(("<think>", "</think>")), '<think>STOP</think>{"a": "STOP"}', '{"a": "'),
    "harmony": (
        lambda: HarmonySplitter(TOOLS, False),
        "<|channel|>analysis<|message|>STOP<|end|><|start|>assistant<|channel|>final<|message|>One STOP two",
        "One ",
    ),
}


@pytest.mark.parametrize("name", SCOPES)
@given(CUTS)
def test_stop_strings_count_in_the_answer_only(name: str, cuts: list[int]) -> None:
    make, text, content = SCOPES[name]
    detokenizer = Detokenizer(["STOP"], AnswerScope(make()))
    splitter, data, parts = make(), text.encode(), []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for at, end in itertools.pairwise(edges):
        if not detokenizer.stopped:
            parts += splitter.push(detokenizer.push(data[at:end]))
    parts += [*splitter.push(detokenizer.flush()), *splitter.flush()]
    assert detokenizer.stopped == "STOP"
    assert "".join(part.text for part in parts if part.kind is PartKind.CONTENT) == content


def test_white_space_after_thoughts_does_not_stop_and_ends_of_turns_always_do() -> None:
    thought = b"<think>a\n\nb</think>\n\n"
    detokenizer = Detokenizer(["\n\n"], AnswerScope(AnswerSplitter(THINK, CALLS, TOOLS)), ["<end>"])
    assert detokenizer.push(thought + b"One\n\ntwo") == "<think>a\n\nb</think>\n\nOne"
    detokenizer = Detokenizer(["\n\n"], AnswerScope(AnswerSplitter(THINK, CALLS, TOOLS)), ["<end>"])
    assert detokenizer.push(b"<think>a<end>b") == "<think>a" and detokenizer.stopped == "<end>"


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
def test_text_that_is_not_a_call_stays_content(cuts: list[int], text: str) -> None:
    assert split(text, cuts) == [AnswerPart(PartKind.CONTENT, text)]


@given(CUTS, st.sampled_from(["<think>a</think>", f"<think>a</think>{CALL}"]))
def test_white_space_after_text_that_is_not_a_call_stays(cuts: list[int], before: str) -> None:
    for text in ('<tool_call>{"name": "add", "arguments": {"a": }} and more', f"<tool_call>{'[' * 2100} and more"):
        parts = split(before + text, [*cuts, len(before + text) - len(" and more")])
        assert "".join(part.text for part in parts).endswith(text)


@given(st.text("<>/thinktool_calls[]TOCALS{}", max_size=60), CUTS)
def test_no_text_is_lost(text: str, cuts: list[int]) -> None:
    joined = "".join(part.text for part in split(text, cuts))
    for marker in THINK[0]:
        text, joined = text.replace(marker, ""), joined.replace(marker, "")
    assert joined == text


@pytest.mark.parametrize(
    ("opening", "contains", "body", "names"),
    [
        ("<tool_call>", '"arguments"', '{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', ["f"]),
        ("[TOOL_CALLS]", '"id"', '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', ["f", "g"]),
        ("[TOOL_CALLS]", "[ARGS]", 'f[CALL_ID]123456789[ARGS]{"x": 1}', ["f"]),
        ("<function=", "Slot.JSON", 'f>{"x": 1}</function>', ["f"]),
        (
            "<tool_call>",
            "parameter",
            "\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
            ["f"],
        ),
        ("<tool_call>", '"arguments"', '{"name": "f", "arguments": [1]}', []),
        ("<tool_call>", '"arguments"', '{"name": "unknown", "arguments": {}}', []),
        ("<tool_call>", '"arguments"', '{"name": 1, "arguments": {}}', []),
        ("<tool_call>", '"arguments"', "[1, 2]", []),
        ("<tool_call>", '"arguments"', "[" * 100_000, []),
        ("<tool_call>", '"arguments"', "", []),
    ],
)
def test_forms_of_calls(opening: str, contains: str, body: str, names: list[str]) -> None:
    parts = split_at(AnswerSplitter([], [form(opening, contains)], TOOLS), opening + body, [1, 5, 9])
    assert [call.name for part in parts for call in part.tool_calls] == names
    assert "".join(part.text for part in parts) == opening + body, "nothing is lost"


@given(CUTS, st.sampled_from([' {"name": "f", "parameters": {"x": 1}}', '{\n  "name":"f", "arguments": {"x": 1} }\n']))
def test_an_answer_that_is_a_call(cuts: list[int], text: str) -> None:
    (part,) = split_at(AnswerSplitter([], [BARE], TOOLS), text, cuts)
    assert part.tool_calls == (ToolCall("f", {"x": 1}),)
    inside = f"Write {text}"
    assert split_at(AnswerSplitter([], [BARE], TOOLS), inside, cuts) == [AnswerPart(PartKind.CONTENT, inside)]


F = '{"name": "f", "arguments": {"x": 1}}'


@given(CUTS, st.sampled_from([BARE, HERMES, MISTRAL]), st.booleans())
def test_what_follows_a_call_lands_in_the_same_place_however_it_is_cut(
    cuts: list[int], one: CallFormat, is_forced: bool
) -> None:
    """Behind whole calls, behind calls with an error, and behind markers without a call."""
    opening, call = {
        BARE: ("", F),
        HERMES: ("<tool_call>", f"{F}</tool_call>"),
        MISTRAL: ("[TOOL_CALLS]", "f[CALL_ID]123456789[ARGS]{}"),
    }[one]
    for body, calls, content in (
        (f"{call} and more", 1, " and more"),
        (f"{call}\n\nMore. ", 1, "\n\nMore. "),
        (f"{call}\n```json\n{F}\n```", 2, ""),
        (f"{call}; {{", 1, "; {"),
        (f"{call} \n ", 1, ""),
        (f"{F[:-1]} x\n{F}", 0, None),
        (f"no\n```json\n{F}\n```\nSo.", 0, None),
    ):
        text = body if is_forced else opening + body

        def parts(cuts: list[int], text: str = text) -> list[AnswerPart]:
            return split_at(AnswerSplitter(THINK, [one], TOOLS, starts_in_call=is_forced), text, cuts)

        found, whole = parts(cuts), parts([])
        assert [(part.kind, part.text, part.tool_calls, part.unfinished) for part in found] == [
            (part.kind, part.text, part.tool_calls, part.unfinished) for part in whole
        ]
        said = "".join(part.text for part in found if part.kind is PartKind.CONTENT)
        if content is not None:
            assert len([call for part in found for call in part.tool_calls]) == calls
            assert said.strip() == content.strip()


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OFFERED = {"weather": CITY, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
BERN, ROME = ('{"name": "weather", "arguments": {"city": "%s"}}' % city for city in ("Bern", "Rome"))  # noqa: UP031


@pytest.mark.parametrize("one", [HERMES, MISTRAL, BARE], ids=["tags", "control", "bare"])
@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"```json\n{BERN}\n```", 1, ""),
        (f"Let me look:\n\n```json\n{BERN}\n```\nDone.", 1, "Let me look:\n\nDone."),
        (f"```\n{BERN}\n{ROME}\n```", 2, ""),
        (f"```tool_call\n[{BERN},\n {ROME}]\n```", 2, ""),
        (f"```json\n{BERN}\n```\n```json\n{ROME}\n```", 2, ""),
        (f"I call it.\n{BERN}", 1, "I call it."),
        (f"<tools>\n{BERN}\n</tools>", 1, ""),
        (f"<function_call>{BERN}</function_call> So.", 1, " So."),
        ('```json\n{"arguments": {"city": "Bern"}, "name": "weather"}\n```', 1, ""),
        ('{"type": "function", "function": {"name": "now", "parameters": {}}}', 1, ""),
        (f"<b>Bold</b>\n<i>\n\n{BERN}", 1, "<b>Bold</b>\n"),
    ],
)
@given(CUTS)
def test_calls_without_the_templates_markers(
    one: CallFormat, text: str, calls: int, content: str, cuts: list[int]
) -> None:
    parts = split_at(AnswerSplitter(THINK, [one], OFFERED), text, cuts)
    found = [call for part in parts for call in part.tool_calls]
    assert len(found) == calls and found[0].name in OFFERED
    deltas = [delta.arguments for part in parts for delta in part.deltas if not delta.name]
    assert [json.loads(delta) for delta in deltas if delta] == [call.arguments for call in found] or one is BARE
    said = "".join(part.text for part in parts if part.kind is PartKind.CONTENT)
    assert said.strip() == content.strip()


@pytest.mark.parametrize(("length", "calls"), [(LONGEST_WORD, 1), (LONGEST_WORD + 1, 0)])
def test_names_of_tags_around_calls_are_bounded_however_they_are_cut(length: int, calls: int) -> None:
    text = "<{0}>{1}</{0}>".format("x" * length, BERN)
    for cuts in ([], [*range(len(text))]):
        parts = split_at(AnswerSplitter(THINK, [HERMES], OFFERED), text, cuts)
        assert len([call for part in parts for call in part.tool_calls]) == calls


@pytest.mark.parametrize("one", [HERMES, MISTRAL, BARE], ids=["tags", "control", "bare"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "arguments": {"age": 36}}',
        '{"name": "weathercock", "arguments": {"city": "Bern"}}',
        '```json\n{"name": "weather", "arguments": {"town": "Bern"}}\n```',
        '```json\n{"name": "weather", "description": "The weather."}\n```\n',
        f"Write {BERN} for that.",
        f"```python\nx = 1\n{BERN}\n```",
        '{"city": "Bern", "name": "weather"}',
        '<tools>\n{"name": "weather"}\n</tools>',
        '[1, {"name": "weather"}]\n`a`\n<p>{}</p>\n```\n```',
        '```json\n{"name": "weather", "arguments": {"city": "a\nb"}}\n```',
        '```json\n{"name": "weather", "arguments": {"city": "Be',
        "<",
        "`",
    ],
)
@given(CUTS)
def test_text_without_markers_that_is_not_a_call_stays_text(one: CallFormat, text: str, cuts: list[int]) -> None:
    if one is BARE and text.startswith('{"name": "weather"'):
        return
    assert split_at(AnswerSplitter(THINK, [one], OFFERED), text, cuts) == [AnswerPart(PartKind.CONTENT, text)]


@pytest.mark.parametrize(
    "text", ['{"name": "Ada', '```json\n{"name": "wz', "```py", "<b>x", '{"z', "[1", "```json\n{}"]
)
def test_text_is_held_no_longer_than_it_may_become_a_call(text: str) -> None:
    splitter = AnswerSplitter(THINK, [HERMES], OFFERED)
    assert "".join(part.text for character in text for part in splitter.push(character)) == text


@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> f",
        '<tool_call>{"name": "weax',
        '<tool_call>\n{"nama',
        '<tool_call> [{"name"',
        "[TOOL_CALLS]wz",
        "[TOOL_CALLS] so",
    ],
)
def test_text_after_a_marker_is_held_no_longer_than_it_may_become_a_call(text: str) -> None:
    splitter = AnswerSplitter(THINK, [HERMES, MISTRAL], OFFERED)
    assert "".join(part.text for character in text for part in splitter.push(character)) == text


@given(CUTS)
def test_a_truncated_call_is_reported(cuts: list[int]) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "a { b'
    (part,) = split(text, cuts)
    assert part.kind is PartKind.TOOL_CALLS and not part.tool_calls and part.unfinished == text
    assert "".join(delta.arguments for delta in part.deltas) == '{"x": "a { b'


def test_text_parameters_stay_text() -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": ["integer", "null"]}}}
    body = "<function=f><parameter=n>3</parameter><parameter=s>3</parameter></function></tool_call>"
    (part,) = split_at(AnswerSplitter([], [form("<tool_call>", "parameter")], {"f": schema}), f"<tool_call>{body}", [])
    assert part.tool_calls == (ToolCall("f", {"n": 3, "s": "3"}),)


LITERALS = [
    (
        "<|tool_call_start|>",
        '[add(path="a \\"b\\"\\n", deep={"k": [1, None], "s": "x"}, n=-1.5e3), f()]<|tool_call_end|>',
    ),
    ("<function_calls>", 'add(path="a \\"b\\"\\n", deep={"k": [1, None], "s": "x"}, n=-1.5e3)\nf()</function_calls>'),
    ("<|tool_call>", 'call:add{path:<|"|>a "b"\n<|"|>,deep:{k:[1,null],s:<|"|>x<|"|>},n:-1.5e3}<tool_call|>'),
    (
        "<start_function_call>",
        'call:add{path:<escape>a "b"\n<escape>,deep:{k:[1,null],s:<escape>x<escape>},n:-1.5e3}<end_function_call>',
    ),
]


@pytest.mark.parametrize(("opening", "body"), LITERALS)
@given(CUTS)
def test_deltas_of_literals_are_their_call(opening: str, body: str, cuts: list[int]) -> None:
    (part,) = split_at(AnswerSplitter([], [form(opening)], TOOLS), opening + body, cuts)
    wanted = {"path": 'a "b"\n', "deep": {"k": [1, None], "s": "x"}, "n": -1500.0}
    texts: list[str] = []
    for delta in part.deltas:
        if delta.name:
            texts.append("")
        texts[-1] += delta.arguments
    assert [json.loads(text) for text in texts] == [wanted, {}][: len(texts)]
    assert part.tool_calls == (ToolCall("add", wanted), ToolCall("f", {}))[: len(texts)]


@pytest.mark.parametrize(("opening", "body"), LITERALS)
def test_literals_stream_within_a_parameter(opening: str, body: str) -> None:
    splitter = AnswerSplitter([], [form(opening)], TOOLS)
    body = body.replace("a ", "a long text, ")
    begun = opening + body[: body.index(", ")]
    written = "".join(delta.arguments for sign in begun for part in splitter.push(sign) for delta in part.deltas)
    assert written.startswith('{"path": "a lo')


@pytest.mark.parametrize("text", ["[add(n=007)]", "[add(n=1,)]", "[add(n=1})]", "[add(n=" + "x" * 3000])
def test_text_that_is_not_a_literal_is_not_a_call(text: str) -> None:
    opening = "<|tool_call_start|>"
    parts = split_at(AnswerSplitter([], [form(opening)], TOOLS), f"{opening}{text}<|tool_call_end|>", [])
    assert not any(part.tool_calls for part in parts)


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
