"""Tool calls of every family: whatever a weak model samples under the grammar parses back and fits the schema."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from gguf_io.chat_template import ChatTemplate
from localllm.answer.tool_calls import CallDelta, CallFormat, CallReader, ToolCall, call_formats
from localllm.answer.tool_calls.call import fits, parameters_of
from localllm.answer.tool_calls.formats import BARE, FORMATS, Slot, Tags
from localllm.answer.tool_calls.grammar import CallGrammar
from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, compile_constraint
from tests.fakes.byte_vocabulary import END, ByteVocabulary

CITY = {"type": "string", "maxLength": 12}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": CITY,
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "unit": {"enum": ["C", "F"]},
                    "exact": {"type": "boolean"},
                },
                "required": ["city", "unit"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_weather_at",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"$ref": "#/$defs/Place"},
                    "tags": {"type": "array", "items": {"enum": ["wind", "rain"]}, "maxItems": 2},
                    "note": {"anyOf": [{"type": "string", "pattern": "^[a-z]{2,5}$"}, {"type": "null"}]},
                },
                "required": ["place", "note"],
                "$defs": {
                    "Place": {
                        "type": "object",
                        "properties": {"x": {"type": "number", "minimum": 0, "maximum": 1}, "name": CITY},
                        "required": ["x"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMAS = parameters_of(TOOLS)
MAX_BYTES = 3000


class ControlVocabulary(ByteVocabulary):
    """A vocabulary of bytes, and control tokens for markup."""

    def __init__(self, controls: Sequence[str]) -> None:
        super().__init__()
        self.first = self.vocab_size
        self.tokens += [text.encode() for text in controls]
        self.vocab_size = len(self.tokens)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        data, at, ids = text.encode(), 0, []
        while at < len(data):
            control = next(
                (one for one in range(self.first, self.vocab_size) if data.startswith(self.tokens[one], at)), None
            )
            ids.append(control if control is not None and parse_special else data[at] + 1)
            at += len(self.tokens[ids[-1]])
        return ids

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        return b"" if skip_special and self.is_control(token) else self.tokens[token]

    def is_control(self, token: int) -> bool:
        return token == END or token >= self.first


CONTROLS = (
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call_start|>", "<|tool_call_end|>", '<|"|>', "<tool_call|>"),
    *("<|message|>", "<|constrain|>", "<|channel|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|python_tag|>"),
    *("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
)
VOCABULARIES = {"text": ByteVocabulary(), "controls": ControlVocabulary(CONTROLS)}


def sampled(form: CallFormat, tokenizer: ByteVocabulary, seed: int, tools: Any = SCHEMAS) -> str:
    """A section of calls sampled from random logits, which prefer short texts."""
    vocabulary = ConstraintVocabulary(tokenizer)
    grammar = CallGrammar(form, tools, vocabulary)
    constraint = compile_constraint(ConstraintKind.LARK, grammar.section(), vocabulary)
    rng = np.random.default_rng(seed)
    text = b""
    while not constraint.is_finished:
        assert len(text) < MAX_BYTES, text
        mask = constraint.mask()
        logits = np.where(mask, rng.gumbel(size=mask.size), -np.inf)
        logits[[byte + 1 for byte in b'"}])<']] += 4
        logits[END] += 2
        token = int(logits.argmax())
        constraint.accept(token)
        text += b"" if token == END else tokenizer.token_bytes(token)
    return text.decode()


def read(form: CallFormat, text: str, tools: Any = SCHEMAS, cut: int = 1) -> list[CallDelta | ToolCall]:
    """What a reader finds in a section that arrives in pieces."""
    reader = CallReader(form, tools, "" if form.starts else form.openings[0])
    found = []
    for at in range(0, len(text), cut):
        found += reader.read(text[at : at + cut])
    assert not reader.broken, text
    return found


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("form", [*FORMATS, BARE], ids=lambda form: form.openings[0] + str(form.call[:2])[:40])
def test_sampled_calls_are_read_and_fit(form: CallFormat, vocabulary: str) -> None:
    for seed in range(6):
        text = sampled(form, VOCABULARIES[vocabulary], seed)
        found = read(form, text, cut=1 + seed)
        calls = [one for one in found if isinstance(one, ToolCall)]
        assert calls, text
        streamed: list[list[str]] = []
        for one in found:
            if isinstance(one, CallDelta):
                streamed += [[one.name, ""]] if one.name else []
                streamed[-1][1] += one.arguments
        assert [ToolCall(name, json.loads(arguments)) for name, arguments in streamed] == calls
        for call in calls:
            jsonschema.validate(call.arguments, SCHEMAS[call.name])


WRITE = {"write": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}}
WRITTEN = ["", "\n", "\n\nint x;\n\n", 'print("<a>", "\\n")\n</param', "é\U0001f98a\t" * 50]


@pytest.mark.parametrize("content", WRITTEN)
@pytest.mark.parametrize("form", [form for form in FORMATS if isinstance(form.arguments, Tags)], ids=str)
def test_a_text_between_tags_comes_while_it_is_written(form: CallFormat, content: str) -> None:
    """However the text is cut, the pieces add up to the whole; all but a possible closing tag is emitted at once."""
    tags = form.arguments
    assert isinstance(tags, Tags)
    opening = tags.opening.format(key="content", type="string", string="true")
    spelt = ["write" if piece is Slot.NAME else piece if isinstance(piece, str) else "0" for piece in form.call]
    at = form.call.index(tags)
    begun = "".join([form.begin, *spelt[:at], opening, "\n", content])
    closing = tags.closing.format(key="content")
    ended = "".join(["\n", closing, *spelt[at + 1 :], form.end, form.closing])
    for cut in (1, 2, 7, len(begun)):
        reader = CallReader(form, WRITE, form.openings[0])
        found = [one for at in range(0, len(begun), cut) for one in reader.read(begun[at : at + cut])]
        sent = "".join(one.arguments for one in found if isinstance(one, CallDelta))
        certain = content[: max(len(content) - len(closing), 0)]
        assert sent == ('{"content": "' + json.dumps(certain, ensure_ascii=False)[1:-1] if certain else "")
        found += [one for at in range(0, len(ended), cut) for one in reader.read(ended[at : at + cut])]
        assert not reader.broken
        assert [one for one in found if isinstance(one, ToolCall)] == [ToolCall("write", {"content": content})]
        assert json.loads("".join(one.arguments for one in found if isinstance(one, CallDelta))) == {"content": content}


ARGUMENTS = {"city": "Oslo", "days": 3, "unit": "C"}
REAL = [
    *("Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
    *("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "google-gemma-4-31B-it"),
    *("Mistral-Small-3.2-24B-Instruct-2506", "unsloth-mistral-Devstral-Small-2507", "openai-gpt-oss-120b"),
    *("GLM-4.6", "GLM-4.7-Flash", "deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4", "ibm-granite-granite-4.0"),
    *("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "Apertus-8B-Instruct", "ByteDance-Seed-OSS", "Kimi-K2-Instruct"),
    *("MiniMax-M1", "MiniMax-M2", "MiniMax-M3", "NVIDIA-Nemotron-Nano-v2", "meetkai-functionary-medium-v3.1"),
    *("openbmb-MiniCPM5-1B", "poolside-Laguna-XS.2", "upstage-Solar-Open-100B", "tencent-Hy3", "Kimi-K3"),
    *("GigaChat3-10B-A1.8B", "muse-glimmer", "fireworks-ai-llama-3-firefunction-v2", "unsloth-Apriel-1.5"),
]


@pytest.mark.parametrize("name", REAL)
def test_calls_as_real_templates_write_them(data_dir: Path, name: str) -> None:
    template = ChatTemplate((data_dir / "templates" / f"{name}.jinja").read_text(), "<s>", "</s>")
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    asked = {"role": "user", "content": "How is it?"}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }
    described = [{**tool, "function": {"description": "d", **tool["function"]}} for tool in TOOLS]
    written = template.render([asked, called], tools=described, add_generation_prompt=False)
    form = call_formats(template.shown)[0]
    at, opening = max((written.rfind(opening), opening) for opening in form.openings)
    assert at >= 0
    text = written[at if form.starts else at + len(opening) :]
    reader = CallReader(form, SCHEMAS, "")
    found = [one for one in reader.read(text) if isinstance(one, ToolCall)]
    assert found == [ToolCall("get_weather", ARGUMENTS)]


TREE = {
    "$defs": {"N": {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}, "b": {"$ref": "#/$defs/N"}}}},
    "$ref": "#/$defs/N",
}


@pytest.mark.parametrize(
    ("schema", "value", "right"),
    [
        ({"type": "object", "required": ["a"]}, {}, False),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": False}, {"b": 1}, False),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 2.0, "b": 1}, True),
        ({"properties": {"a": {"type": ["string", "null"]}}}, {"a": 1}, False),
        ({"properties": {"a": {"enum": [1, None]}, "b": {"const": "x"}}}, {"a": None, "b": "x"}, True),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"maximum": 3}]}}}, {"a": 4}, False),
        ({"properties": {"a": {"allOf": [{"minimum": 1}, {"exclusiveMaximum": 2}]}}}, {"a": 2}, False),
        ({"properties": {"a": {"items": {"maxLength": 1}, "maxItems": 2}}}, {"a": ["x", "yy"]}, False),
        ({"properties": {"a": {"prefixItems": [{"type": "boolean"}], "items": False}}}, {"a": [True]}, True),
        (TREE, {"a": {"b": {"a": {}}}}, True),
        (TREE, {"a": {"b": 5}}, False),
    ],
)
def test_arguments_that_fit_a_schema(schema: dict[str, Any], value: dict[str, Any], right: bool) -> None:
    assert fits(schema, value) == jsonschema.Draft202012Validator(schema).is_valid(value) == right


def test_checking_arguments_takes_bounded_work() -> None:
    schema: dict[str, Any] = {"$defs": {"L40": {}}}
    for level in range(40):
        schema["$defs"][f"L{level}"] = {"allOf": [{"$ref": f"#/$defs/L{level + 1}"}] * 2}
    assert not fits({**schema, "$ref": "#/$defs/L0"}, {"a": 1})
