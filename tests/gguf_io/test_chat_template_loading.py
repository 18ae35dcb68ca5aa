"""Which template a model file uses: its own, the one for tools, or a default by family."""

from pathlib import Path
from typing import Any

import pytest

from gguf_io import open_model
from gguf_io.chat_template import ChatTemplate, load_chat_template
from gguf_io.errors import TemplateError

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "R"},
]


class Model:
    """A file's metadata without the file."""

    def __init__(self, tokens: tuple[str, ...] = (), name: str = "a model", **template: Any) -> None:
        self.metadata = {
            "general.name": name,
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *tokens],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            **{f"tokenizer.{key.replace('__', '.')}": value for key, value in template.items()},
        }


def test_a_file_with_a_template_uses_it() -> None:
    template = load_chat_template(Model(chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"))
    assert template.render([{"role": "user", "content": "Q"}]) == "<s>Q</s>"
    assert not template.is_default and template.warning is None


def test_real_files(data_dir: Path) -> None:
    with open_model(data_dir / "vocab/ggml-vocab-qwen2.gguf") as file:
        qwen = load_chat_template(file)
    assert not qwen.is_default and "<|im_start|>user\nQ<|im_end|>" in qwen.render(MESSAGES)
    with open_model(data_dir / "models/gguf/stories260K-Q8_0.gguf") as file:
        stories = load_chat_template(file)
    assert stories.is_default and "has no chat template" in str(stories.warning)


def test_the_template_for_tools_is_used_when_there_are_tools() -> None:
    template = load_chat_template(
        Model(
            chat_template="plain {{ messages[-1].content }}",
            chat_template__tool_use="{{ tools[0].function.name }} <tool_call></tool_call> {{ messages[-1].content }}",
        )
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert template.supports_tools and "<tool_call></tool_call>" in template.shown
    assert template.render(MESSAGES) == "plain R"
    assert template.render(MESSAGES, tools=tools) == "look <tool_call></tool_call> R"


@pytest.mark.parametrize(
    ("tokens", "name", "family", "expected"),
    [
        (
            ("<|im_start|>", "<|im_end|>"),
            "x",
            "ChatML",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
            "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "x",
            "Llama 3",
            "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nQ"
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            ("<start_of_turn>", "<end_of_turn>"),
            "x",
            "Gemma",
            "<start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
            "<start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            ("<|user|>", "<|assistant|>", "<|end|>"),
            "x",
            "Phi 3",
            "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nR<|end|>\n<|assistant|>\n",
        ),
        (
            ("<｜User｜>", "<｜Assistant｜>"),  # noqa: RUF001 - DeepSeek's tokens
            "x",
            "DeepSeek",
            "S\n\n<｜User｜>Q<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>R<｜Assistant｜>",  # noqa: RUF001
        ),
        (("[INST]", "[/INST]"), "x", "INST", "[INST] S\n\nQ [/INST] A</s>[INST] R [/INST]"),
        ((), "Llama-2-7b-chat", "INST", "[INST] S\n\nQ [/INST] A</s>[INST] R [/INST]"),
        ((), "Mistral 7B Instruct v0.1", "INST", "[INST] S\n\nQ [/INST] A</s>[INST] R [/INST]"),
        ((), "stories260K", "Role: text", "System: S\nUser: Q\nAssistant: A\nUser: R\nAssistant:"),
    ],
)
def test_defaults_by_family(tokens: tuple[str, ...], name: str, family: str, expected: str) -> None:
    template = load_chat_template(Model(tokens, name))
    assert template.is_default and family in str(template.warning)
    assert template.render(MESSAGES) == expected


def test_the_default_of_harmony_is_gpt_oss_own_but_for_its_name_and_dates(data_dir: Path) -> None:
    own = ChatTemplate((data_dir / "templates" / "openai-gpt-oss-120b.jinja").read_text("utf-8"))
    default = load_chat_template(Model(("<|start|>", "<|channel|>", "<|message|>")))
    assert default.is_default and default.reasoning_markers == own.reasoning_markers
    for messages in (MESSAGES[-1:], MESSAGES):
        for effort in ({}, {"reasoning_effort": "low"}):
            header, _, rest = default.render(messages, **effort).partition("<|end|>")
            full, _, expected = own.render(messages, **effort).partition("<|end|>")
            assert rest == expected
            start = full.index("Reasoning")
            assert header == "<|start|>system<|message|>" + full[start:]


def _tool(name: str, description: str, **properties: object) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties][:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


HARMONY_TOOLS = [
    _tool(
        "weather",
        "The weather of a place.",
        place={"type": "string", "description": "A city."},
        unit={"type": "string", "enum": ["C", "F"], "default": "C"},
        days={"type": "integer", "default": 3},
        hours={"type": "array", "items": {"type": "integer"}},
        exact={"type": "boolean"},
        either={"type": ["string", "number"]},
        more={"type": "object"},
    ),
    _tool("now", "The time."),
]


@pytest.mark.parametrize("system", [[], MESSAGES[:1]], ids=["alone", "system"])
@pytest.mark.parametrize(
    "later", [[], [{"role": "assistant", "content": "Cold."}, {"role": "user", "content": "Why?"}]]
)
def test_the_default_of_harmony_writes_tools_as_gpt_oss_own(
    data_dir: Path, system: list[Any], later: list[Any]
) -> None:
    own = ChatTemplate((data_dir / "templates" / "openai-gpt-oss-120b.jinja").read_text("utf-8"))
    default = load_chat_template(Model(("<|start|>", "<|channel|>", "<|message|>")))
    assert default.supports_tools
    call = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"place": "Bern", "days": 1}}}
    asked = [
        *(*system, {"role": "user", "content": "Is it cold?"}),
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '"-3" C'},
        *later,
    ]
    for messages in (asked, asked[: len(system) + 1]):
        header, _, rest = default.render(messages, tools=HARMONY_TOOLS).partition("<|end|>")
        full, _, expected = own.render(messages, tools=HARMONY_TOOLS).partition("<|end|>")
        assert rest == expected
        assert header == "<|start|>system<|message|>" + full[full.index("Reasoning") :]


def test_the_default_of_harmony_writes_any_schema() -> None:
    default = load_chat_template(Model(("<|start|>", "<|channel|>", "<|message|>")))
    deep = {"type": "object", "properties": {"x": {"anyOf": [{"type": "number"}, {"type": "null"}]}}, "required": ["x"]}
    tools = [_tool("f", "", a={"type": "array", "items": deep}, b={}, c={"enum": [1, None]}), _tool("g", "No text.")]
    del tools[1]["function"]["parameters"], tools[1]["function"]["description"]
    calls = [{"type": "function", "id": n, "function": {"name": n, "arguments": {}}} for n in "fg"]
    messages = [
        {"role": "user", "content": "Both."},
        {"role": "assistant", "content": "I call both.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": n, "content": n} for n in "fg"),
    ]
    text = default.render(messages, tools=tools)
    assert "a: {\nx: number | null,\n}[],\nb?: any,\nc?: 1 | null,\n}) => any;\n\ntype g = () => any;" in text
    assert "commentary<|message|>I call both.<|end|>" in text
    assert text.index("functions.f to=assistant") < text.index("functions.g to=assistant")


def test_only_plain_lines_need_a_text_to_stop_at() -> None:
    assert "\nUser:" in load_chat_template(Model()).stop_strings
    assert load_chat_template(Model(("<|im_start|>", "<|im_end|>"))).stop_strings == ()


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    model = Model(chat_template="[{{ bos_token }}]")
    model.metadata["tokenizer.ggml.bos_token_id"] = 4294967295
    assert load_chat_template(model).render([]) == "[]"


def test_a_template_that_is_not_text_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"tokenizer\.chat_template .* is not text"):
        load_chat_template(Model(chat_template=7))


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(TemplateError, match="line 3"):
        ChatTemplate("a\nb\n{% if %}").render([])
