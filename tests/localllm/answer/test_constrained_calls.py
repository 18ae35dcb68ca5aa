"""Calls that a model starts by itself: constrained from their marker on, in engines with and without drafting."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.answer.call_constraints import CallConstraints, checked
from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.splitting import AnswerSplitter
from localllm.answer.tool_calls import CallFormat
from localllm.answer.tool_calls.call import ORDERED
from localllm.answer.tool_calls.formats import BARE, FORMATS
from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, LazyConstraint, compile_constraint
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.sampling import Sampler
from localllm.engine.speculation import DraftLength
from localllm.engine.stream import Completion
from localllm.errors import RequestError
from tests.fakes.byte_vocabulary import END, ByteVocabulary
from tests.fakes.fake_runner import FakeRunner

# Some tokens start before a marker ends, and continue after it in ways that are not a call.
VOCABULARY = ByteVocabulary(
    (b"call>x", b"call>\n", b"_call>[", b'{"name', b"<tool", b"call>\n<tool", b"call> Done", b'call>\n{"n')
)
CONSTRAINTS = ConstraintVocabulary(VOCABULARY)
LOADED: Any = SimpleNamespace(
    constraint_vocabulary=lambda: CONSTRAINTS,
    constraint=lambda kind, source, after: compile_constraint(ConstraintKind(kind), source, CONSTRAINTS, after),
)
TOOLS = {
    "look": {
        "type": "object",
        "properties": {"at": {"enum": ["sun", "moon"]}, "times": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["at"],
        "additionalProperties": False,
    }
}
OPEN: Any = {"look": {key: value for key, value in TOOLS["look"].items() if key != "additionalProperties"}}
PROMPT = tuple(VOCABULARY.encode("Look! "))
MARKER = b"Yes.<tool_call>"


def form(opening: str, contains: str) -> CallFormat:
    return next(row for row in FORMATS if row.openings[0] == opening and contains in str(row.call))


FORMS = [form("<tool_call>", '"arguments"'), form("<tool_call>", "<function=")]


def opens_a_call(history: list[int], logits: NDArray[np.float32]) -> None:
    """Make a model write the marker, then sample freely with a preference for ending."""
    written = b"".join(VOCABULARY.tokens[token] for token in history[len(PROMPT) :])
    if len(written) < len(MARKER) and MARKER.startswith(written):
        likely = [
            token
            for token, data in enumerate(VOCABULARY.tokens)
            if data and (MARKER.startswith(written + data) or (written + data).rstrip() == MARKER)
        ]
        logits[likely] += 50
    else:
        logits[[byte + 1 for byte in b'"}<']] += 3


def own_form(text: str) -> CallFormat:
    """The form in which a model is held when it writes this text."""
    return BARE if text.startswith("{") else FORMS[0]


def constraint(one: CallFormat, tools: Any = TOOLS) -> LazyConstraint:
    return CallConstraints(LOADED).lazy([one], tools, lambda: AnswerSplitter([], [one], tools))


def requests(one: CallFormat) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            PROMPT, SamplingParams(seed=seed, temperature=1.5), max_tokens=110, constraint=constraint(one)
        )
        for seed in range(6)
    ]


def answers(wanted: Sequence[GenerationRequest]) -> list[Completion]:
    runner = FakeRunner(pages=2000, vocab_size=VOCABULARY.vocab_size, bias=opens_a_call)
    engine = Engine(runner, VOCABULARY)
    streams = [engine.submit(request) for request in wanted]
    while engine.step():
        engine.check_integrity()
    return [stream.collect() for stream in streams]


def parts_of(one: CallFormat, text: str) -> list[AnswerPart]:
    splitter = AnswerSplitter([], [one], TOOLS)
    return [*splitter.push(text), *splitter.flush()]


@pytest.mark.parametrize("one", FORMS, ids=["json", "tags"])
def test_calls_are_held_from_their_marker_on(one: CallFormat) -> None:
    found = [parts_of(one, done.text) for done in answers(requests(one))]
    calls = [call for parts in found for part in parts for call in part.tool_calls]
    assert len(calls) >= len(found) - 2, "all but those that are cut off"
    assert all(call.name == "look" and call.arguments["at"] in ("sun", "moon") for call in calls)
    assert all(call.arguments.keys() <= {"at", "times"} for call in calls)
    assert any(parts[-1].text.strip() and not parts[-1].tool_calls for parts in found), "text after calls is free"


@pytest.mark.parametrize("one", FORMS, ids=["json", "tags"])
def test_drafts_change_nothing(one: CallFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLength, "choose", lambda *_: 0)
    plain = [done.token_ids for done in answers(requests(one))]
    monkeypatch.setattr(DraftLength, "choose", lambda _self, limit, *_: max(min(limit, 6), 0))
    drafted = answers(requests(one))
    assert [done.token_ids for done in drafted] == plain
    assert sum(done.last.counts.accepted for done in drafted) > 0
    alone = [answers([request])[0].token_ids for request in requests(one)[:4]]
    assert alone == plain[:4], "and so does a batch"


@pytest.mark.parametrize(
    "wrong",
    [
        {"properties": 5},
        {"properties": {"at": {}, "on": {"required": "at"}}},
        {"properties": {"at": {"type": 5}}},
        {"properties": {"at": {"type": {"a": 1}}}},
        {"properties": {"at": {"type": "string", "minLength": "3"}}},
        {"properties": {"at": {"type": "string", "pattern": 5}}},
        {"properties": {"at": {"type": "array", "minItems": "x"}}},
        {"properties": {"at": {"type": "string", "anyOf": 5}}},
        {"properties": {"at": {"items": [{"not": {"pattern": "(a"}}]}}},
        {"properties": {"at": {"patternProperties": {"[z-a]": {}}}}},
        {"properties": {"at": {"$ref": "#/$defs/missing"}}},
    ],
)
def test_schemas_with_values_of_wrong_types_are_refused_with_their_place(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"tool 'look' .* at #/properties"):
        checked({"look": {"type": "object", **wrong}})


@pytest.mark.parametrize(
    ("careless", "meant"),
    [
        ({"properties": {"at": {"enum": ["sun"], "required": True}}}, {"required": ["at"]}),
        ({"properties": {"at": None}, "required": None}, {"properties": {"at": {}}}),
        ({"type": "OBJECT", "properties": {"at": {"type": "STRING", "example": 5}}}, {}),
        ({"properties": {"at": {"type": "file", "description": ["text"], "ui": {"widget": "x"}}}}, {}),
        ({"properties": {"at": {"enum": None, "default": None}}, "required": ["at", "at"]}, {"required": ["at"]}),
    ],
)
def test_careless_schemas_are_taken_as_they_are_meant(careless: dict[str, Any], meant: dict[str, Any]) -> None:
    tools = checked({"look": {"type": "object", **careless}})
    assert tools["look"].items() >= meant.items()
    for one in [*FORMS, form("<|tool_call>", ""), form("<function_calls>", "")]:
        CallConstraints(LOADED).lazy([one], tools, lambda one=one: AnswerSplitter([], [one], tools))  # type: ignore[misc]


def test_no_mask_is_made_outside_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[bool] = []
    sample = Sampler.sample

    def count(sampler: Sampler, logits: Any, allowed: Any = None, banned: Any = None) -> Any:
        masks.append(allowed is not None)
        return sample(sampler, logits, allowed, banned)

    monkeypatch.setattr(Sampler, "sample", count)
    (done,) = answers(requests(FORMS[0])[:1])
    assert b"".join(VOCABULARY.tokens[token] for token in done.token_ids).startswith(MARKER)
    assert not any(masks[: len(VOCABULARY.encode("Yes."))]) and any(masks)


def written(tokens: list[int], one: CallFormat = FORMS[0], tools: Any = TOOLS) -> Completion:
    """The answer of a model that wants to write these tokens."""

    def writes(history: list[int], logits: NDArray[np.float32]) -> None:
        logits[tokens[min(len(history) - len(PROMPT), len(tokens) - 1)]] += 1000

    engine = Engine(FakeRunner(pages=200, vocab_size=VOCABULARY.vocab_size, bias=writes), VOCABULARY)
    sampling = SamplingParams(temperature=0)
    stream = engine.submit(GenerationRequest(PROMPT, sampling, max_tokens=200, constraint=constraint(one, tools)))
    while engine.step():
        pass
    return stream.collect()


def bytes_of(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def token(data: bytes) -> list[int]:
    return [VOCABULARY.tokens.index(data)]


LOOK = '\n{"name": "look", "arguments": {"at": "sun", "times": 3}}\n'


def test_a_valid_call_keeps_its_tokens() -> None:
    """A call that is valid anyway keeps the model's own tokens."""
    tokens = [*bytes_of(f"<tool_call>{LOOK}</tool_call> Done."), END]
    done = written(tokens)
    assert done.token_ids == tuple(tokens)
    (call,) = [call for part in parts_of(FORMS[0], done.text) for call in part.tool_calls]
    assert json.dumps(call.arguments) == '{"at": "sun", "times": 3}'


@pytest.mark.parametrize(
    ("text", "kept", "calls"),
    [
        ('{"name": "Ada", "arguments": {"at": "home"}}', True, 0),
        ('{"name": "lookout", "at": 3}', True, 0),
        ('```json\n{"name": "look", "arguments": {"at": "home"}}\n```', True, 0),
        ('```json\n{"name": "look", "arguments": {"at": "moon"}}\n```', True, 1),
        ('<tools>{"name": "look", "arguments": {"at": "moon", "times": 2}}</tools>', True, 1),
    ],
)
def test_only_an_offered_tools_name_begins_a_bare_call(text: str, kept: bool, calls: int) -> None:
    tokens, one = [*bytes_of(text), END], own_form(text)
    done = written(tokens, one)
    assert (done.token_ids == tuple(tokens)) == kept
    parts = parts_of(one, done.text)
    assert len([call for part in parts for call in part.tool_calls]) == calls
    assert calls or "".join(part.text for part in parts if part.kind is PartKind.CONTENT) == text


def test_an_offered_tools_name_begins_a_bare_call() -> None:
    done = written([*bytes_of('{"name": "look", "at": "sun"}'), END], BARE)
    assert any(part.kind is PartKind.TOOL_CALLS for part in parts_of(BARE, done.text))
    assert '"look", "at"' not in done.text


CALLS = [
    '\n{"name": "look", "arguments": {"times": 3, "at": "sun"}}\n',
    '{"name":"look","arguments":{"times":3,\t"at":\r\n    "sun"   }}',
    '\n{"name": "look", "arguments": {\n        "at": "sun",\n        "times": 3\n    }}',
]


@pytest.mark.parametrize("call", CALLS)
def test_arguments_keep_the_order_and_the_layout_that_the_model_writes(call: str) -> None:
    tokens = [*bytes_of(f"<tool_call>{call}</tool_call>"), END]
    assert written(tokens).token_ids == tuple(tokens)
    strict = {"look": {**TOOLS["look"], ORDERED: True}}
    done = written(tokens, tools=strict)
    assert (done.token_ids == tuple(tokens)) == (call.index("at") < call.index("times"))


def test_parameters_between_tags_keep_their_order() -> None:
    body = "<parameter=times>\n3\n</parameter>\n<parameter=at>\nsun\n</parameter>"
    tokens = [*bytes_of(f"<tool_call>\n<function=look>\n{body}\n</function>\n</tool_call>"), END]
    assert written(tokens, FORMS[1]).token_ids == tuple(tokens)
    python = [*bytes_of('<function_calls>look(times=3, at="sun")</function_calls>'), END]
    assert written(python, form("<function_calls>", "")).token_ids == tuple(python)


def wrapped(one: CallFormat, call: str) -> str:
    return f"{one.openings[0]}{call}{one.closing}"


JSON_FORM, TAG_FORM = FORMS
GLM = form("<tool_call>", "<arg_key>")
GEMMA = form("<|tool_call>", "")
PYTHON = form("<function_calls>", "")
PARAMETER = "<parameter={}>\n{}\n</parameter>\n"
TAGGED = "\n<function=look>\n{}{}</function>\n"
UNLISTED = [
    (JSON_FORM, '{"name": "look", "arguments": {"zoom": 2, "at": "sun"}}', {"zoom": 2, "at": "sun"}),
    (
        JSON_FORM,
        '\n{"name": "look", "arguments": {"at": "sun", "atlas": {"a": [1, null, "x"]}, "times": 1, "ti": ""}}\n',
        {"at": "sun", "atlas": {"a": [1, None, "x"]}, "times": 1, "ti": ""},
    ),
    (
        TAG_FORM,
        TAGGED.format(PARAMETER.format("atlas-2", 'any <text>\n"here"'), PARAMETER.format("at", "sun")),
        {"atlas-2": 'any <text>\n"here"', "at": "sun"},
    ),
    (TAG_FORM, TAGGED.format(PARAMETER.format("at", "sun"), PARAMETER.format("a", "[1]")), {"at": "sun", "a": [1]}),
    (
        GLM,
        "look\n<arg_key>sky</arg_key>\n<arg_value>a b</arg_value>\n<arg_key>at</arg_key>\n<arg_value>sun</arg_value>\n",
        {"sky": "a b", "at": "sun"},
    ),
    (PYTHON, 'look(sky={"a": [1, True]}, at="sun", a="b")', {"sky": {"a": [1, True]}, "at": "sun", "a": "b"}),
    (
        GEMMA,
        'call:look{at:<|"|>sun<|"|>,atlas:{b:[<|"|>x<|"|>,null]},sky:2}',
        {"at": "sun", "atlas": {"b": ["x", None]}, "sky": 2},
    ),
]


@pytest.mark.parametrize(("one", "call", "arguments"), UNLISTED)
def test_arguments_that_the_schema_does_not_list_keep_their_tokens(
    one: CallFormat, call: str, arguments: dict[str, Any]
) -> None:
    """Unless it forbids them, or the tool is strict."""
    tokens = [*bytes_of(wrapped(one, call)), END]
    done = written(tokens, one, OPEN)
    assert done.token_ids == tuple(tokens)
    splitter = AnswerSplitter([], [one], OPEN)
    parts = [*splitter.push(done.text), *splitter.flush()]
    assert [found.arguments for part in parts for found in part.tool_calls] == [arguments]
    for closed in (TOOLS, {"look": {**OPEN["look"], ORDERED: True}}):
        assert written(tokens, one, closed).token_ids != tuple(tokens)


@pytest.mark.parametrize("one", [*FORMATS, BARE], ids=lambda one: one.openings[0])
def test_every_format_has_a_grammar_of_unlisted_arguments(one: CallFormat, caplog: pytest.LogCaptureFixture) -> None:
    named = {"type": "object", "properties": {"a/b": {}, "c.d": {"type": "object"}}, "required": ["a/b", "ä"]}
    constraint(one, {**OPEN, "other": {"type": "object"}, "third": named})
    assert not caplog.records


def test_unlisted_arguments_fit_the_schema_of_others() -> None:
    """So do the arguments of a tool that lists none."""
    for others, fits in ((True, True), ({"type": "string"}, True), ({"type": "array"}, False)):
        tools = {"look": {**OPEN["look"], "additionalProperties": others}}
        body = TAGGED.format(PARAMETER.format("at", "sun"), PARAMETER.format("sky", "blue"))
        for one, call in (
            (TAG_FORM, body),
            (PYTHON, 'look(sky="x", at="sun")'),
            (JSON_FORM, LOOK.replace('"times": 3', '"sky": "x"')),
        ):
            tokens = [*bytes_of(wrapped(one, call)), END]
            assert (written(tokens, one, tools).token_ids == tuple(tokens)) == fits, (one, others)
    for schema in ({"type": "object"}, {"type": "object", "properties": {}}):
        for one, call in (
            (TAG_FORM, TAGGED.format(PARAMETER.format("sky", "blue"), "")),
            (PYTHON, "look(sky=[1, [2]])"),
        ):
            tokens = [*bytes_of(wrapped(one, call)), END]
            assert written(tokens, one, {"look": schema}).token_ids == tuple(tokens)


@pytest.mark.parametrize(
    ("tokens", "calls", "text"),
    [
        ([*bytes_of(f"<tool_call>{LOOK}</tool_"), *token(b"call> Done")], 1, "Done"),
        (
            [*bytes_of(f"A<tool_call>{LOOK}</tool_"), *token(b"call>\n<tool"), *bytes_of(f"_call>{LOOK}</tool_call>")],
            2,
            "A",
        ),
        ([*bytes_of("Say <tool_"), *token(b"call>x"), *bytes_of(" or so")], 0, "Say <tool_call>x or so"),
        ([*bytes_of("Say <tool"), *token(b"_call>["), *bytes_of("1]")], 0, "Say <tool_call>[1]"),
        ([*bytes_of("<tool_"), *token(b'call>\n{"n'), *bytes_of(f"{LOOK[4:]}</tool_call>")], 1, ""),
    ],
)
def test_tokens_across_the_borders_of_calls_pass(tokens: list[int], calls: int, text: str) -> None:
    done = written([*tokens, END])
    assert done.token_ids == (*tokens, END)
    parts = parts_of(FORMS[0], done.text)
    assert len([call for part in parts for call in part.tool_calls]) == calls
    assert "".join(part.text for part in parts if part.kind is PartKind.CONTENT) == text
