"""How messages are changed that a template does not accept; the expected texts are written by hand."""

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gguf_io.chat_template import ChatTemplate
from gguf_io.errors import TemplateError

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
ALTERNATING = """{% for m in messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
<{{ m.role }}>{{ m.content }}</>
{%- endfor %}"""
TYPED_ONLY = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}|{% endfor %}</>{% endfor %}"
WITH_CALLS = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ ARGUMENTS }}]{% endfor %}
{%- if m.role == 'tool' %}({{ m.name }} {{ m.tool_call_id }}){% endif %}</>{% endfor %}{{ tools | tojson if tools }}"""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: Any, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def call(arguments: Any, **others: Any) -> dict[str, Any]:
    return {"function": {"name": "look", "arguments": arguments}, **others}


def with_calls(arguments: str) -> ChatTemplate:
    return ChatTemplate(WITH_CALLS.replace("ARGUMENTS", arguments))


@pytest.fixture
def real(data_dir: Path) -> Any:
    def load(name: str) -> ChatTemplate:
        return ChatTemplate((data_dir / f"templates/{name}.jinja").read_text("utf-8"), "<bos>", "<eos>")

    return load


def test_system_text_precedes_the_first_user_message_without_a_system_role(real: Any) -> None:
    gemma = real("google-gemma-2-2b-it")
    assert gemma.render([system("Be brief."), user("Hi")]) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
    assert gemma.render([system("Be brief.")]) == (
        "<bos><start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_dropped_system_message_counts_as_no_role() -> None:
    template = ChatTemplate("{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}")
    assert template.render([system("A"), user("B"), system("C"), user("D")]) == (
        "<user>A\n\nB</><user><system>\nC\n</system></><user>D</>"
    )


def test_neighbours_of_one_role_are_joined_only_when_refused() -> None:
    messages = [user("A"), user("B"), assistant("C"), user("D")]
    assert ChatTemplate(ALTERNATING).render(messages) == "<user>A\n\nB</><assistant>C</><user>D</>"
    assert ChatTemplate(CHATML).render(messages) == "<user>A</><user>B</><assistant>C</><user>D</>"


def test_what_cannot_be_joined_is_refused_with_line_and_message() -> None:
    with pytest.raises(TemplateError, match=r"line 2: roles must alternate"):
        ChatTemplate(ALTERNATING).render([assistant("A"), user("B")])


FIRST_ONLY = """{% for m in messages %}{% if not loop.first and m.role == 'system' %}
{{ raise_exception('a system message comes first') }}{% endif %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"""
LAST_WINS = """{% set ns = namespace(text='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.text = m.content %}{% endif %}{% endfor -%}
<system>{{ ns.text }}</>{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"""
FIRST_READ = """<system>{{ messages[0].content if messages[0].role == 'system' }}</>
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"""


@pytest.mark.parametrize("source", [FIRST_ONLY, LAST_WINS, FIRST_READ], ids=["refuses", "moves", "drops"])
def test_a_late_system_message_becomes_a_user_message_in_its_place(source: str) -> None:
    messages = [system("A"), user("B"), assistant("C"), system("D"), {"role": "developer", "content": "E"}, user("F")]
    assert ChatTemplate(source).render(messages) == (
        "<system>A</><user>B</><assistant>C</><user><system>\nD\n</system></><user><system>\nE\n</system></><user>F</>"
    )
    assert ChatTemplate(source).render([system("A"), system("B"), user("C"), system("D")]) == (
        "<system>A\n\nB</><user>C</><user><system>\nD\n</system></>"
    )


def test_a_late_system_message_stays_one_where_the_template_writes_it_in_place() -> None:
    messages = [system("A"), user("B"), system("C"), assistant("D"), system("E")]
    assert ChatTemplate(CHATML).render(messages) == ("<system>A</><user>B</><system>C</><assistant>D</><system>E</>")


def test_late_system_text_in_parts_is_tagged_with_parts() -> None:
    first_only = "{% if loop.first or m.role != 'system' %}"
    only_typed = TYPED_ONLY.replace("<{{", first_only + "<{{").replace("</>", "</>{% endif %}")
    messages = [system("A"), user("B"), system([{"type": "text", "text": "C"}])]
    assert ChatTemplate(only_typed).render(messages) == ("<system>A|</><user>B|</><user><system>\n|C|\n</system>|</>")


# Templates of which each, by itself, refuses late system messages, moves them to the front or leaves them out.
CARELESS = [
    "Apertus-8B-Instruct",
    "Bielik-11B-v3.0-Instruct",
    "HuggingFaceTB-SmolLM3-3B",
    "MiniMax-M2",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen3.5-4B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "openai-gpt-oss-120b",
    "tencent-Hy3",
]


def test_late_system_messages_keep_the_prompt_before_them(real: Any) -> None:
    for name in CARELESS:
        text = real(name).render([system("medlar"), user("quince"), assistant("rowan"), system("lingon"), user("sloe")])
        assert text.count("lingon") == 1, name
        assert -1 < text.find("rowan") < text.find("lingon") < text.find("sloe"), name


CALLS = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "look"}}]}
FOUND = {"role": "tool", "tool_call_id": "c", "content": "sorb"}
TOOL = {"type": "function", "function": {"name": "look", "description": "D.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("late", [[system("lingon")], [system("lingon"), {"role": "developer", "content": "ramson"}]])
def test_late_system_messages_behind_a_result_are_part_of_it(real: Any, late: list[Any]) -> None:
    """A user's message would end the turn, and change what was computed of it."""
    for name in (*CARELESS, "mistralai-Ministral-3-14B-Reasoning-2512", "mistralai-Mistral-Nemo-Instruct-2407"):
        if (template := real(name)).supports_tools:
            turn = [user("quince"), CALLS, FOUND]
            before, text = (template.render(messages, tools=[TOOL]) for messages in (turn, [*turn, *late]))
            assert text.startswith(before[: before.find("sorb") + 4]), name
            places = [text.find(one["content"]) for one in late]
            assert text.find("sorb") < places[0] and places == sorted(places), name


def test_a_user_message_behind_a_result_where_roles_alternate(real: Any) -> None:
    for name in ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"):
        messages = [user("quince"), CALLS, FOUND, system("lingon"), user("sloe")]
        text = real(name).render(messages, tools=[TOOL])
        assert -1 < text.find("sorb") < text.find("lingon") < text.find("Done.") < text.find("sloe"), name


def test_a_developer_message_that_a_template_leaves_out_is_the_systems(real: Any) -> None:
    for name in ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "deepseek-ai-DeepSeek-V3.2", "Apertus-8B-Instruct"):
        text = real(name).render([{"role": "developer", "content": "medlar"}, user("quince"), assistant("rowan")])
        assert -1 < text.find("medlar") < text.find("quince"), name


def test_no_text_of_several_parts_is_lost(real: Any) -> None:
    parts = [{"type": "text", "text": text} for text in ("lingon", "ramson")]
    for name in ("unsloth-Apriel-1.5", "unsloth-mistral-Devstral-Small-2507"):
        for role in ("system", "user"):
            text = real(name).render([{"role": role, "content": parts}, user("sloe")])
            assert -1 < text.find("lingon") < text.find("ramson") < text.find("sloe"), name


def test_developer_is_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "A"}, user("B")]
    assert ChatTemplate(CHATML).render(messages) == "<system>A</><user>B</>"
    assert ChatTemplate("{# developer #}" + CHATML).render(messages) == "<developer>A</><user>B</>"


def test_parts_become_text_and_text_becomes_parts_as_demanded() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert ChatTemplate(CHATML).render([user(parts)]) == "<user>A\nB</>"
    assert ChatTemplate(TYPED_ONLY).render([user(parts), assistant("C")]) == "<user>A|B|</><assistant>C|</>"


def test_a_picture_for_a_template_of_text_is_refused() -> None:
    with pytest.raises(TemplateError, match="message 1 has a part of type 'image_url'"):
        ChatTemplate(CHATML).render([user([{"type": "image_url", "image_url": {"url": "data:"}}])])


def test_null_and_missing_content_is_empty_unless_the_template_takes_null() -> None:
    only_beside_calls = WITH_CALLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    takes_null = ChatTemplate(only_beside_calls.replace("ARGUMENTS", "c.function.arguments | tojson"))
    assert takes_null.render([user(None), {"role": "assistant"}]) == "<user></><assistant></>"
    assert ChatTemplate(CHATML).render([user(None), {"role": "assistant"}]) == "<user></><assistant></>"
    messages = [user("A"), assistant(None, call({"k": 1}, id="a1")), {"role": "tool", "content": "R"}]
    assert "<assistant>[a1 look" in with_calls("c.function.arguments | tojson").render(messages)


def test_calls_beside_null_content_only(real: Any) -> None:
    distilled = real("deepseek-ai-DeepSeek-R1-Distill-Llama-8B")
    for empty in ("", None):
        prompt = distilled.render([user("A"), assistant(empty, call({"k": 1})), {"role": "tool", "content": "R"}])
        assert '<｜tool▁sep｜>look\n```json\n{"k": 1}\n```<｜tool▁call▁end｜>' in prompt  # noqa: RUF001 - its tokens


def test_arguments_take_the_form_that_the_template_writes_well() -> None:
    takes_object = with_calls("c.function.arguments | tojson")
    takes_text = with_calls("c.function.arguments")
    takes_both = with_calls("c.function.arguments if c.function.arguments is string else c.function.arguments | tojson")
    for template in (takes_object, takes_text, takes_both):
        assert '[id look {"k": "v"}]' in template.render([user("A"), assistant("", call({"k": "v"}, id="id"))])
    given = [user("A"), assistant("", call('{"k":"v"}', id="id"))]
    assert '[id look {"k": "v"}]' in takes_object.render(given)
    assert '[id look {"k":"v"}]' in takes_text.render(given)
    assert '[id look {"k":"v"}]' in takes_both.render(given)
    with pytest.raises(TemplateError, match="message 2: the arguments of a tool call are not JSON"):
        takes_object.render([user("A"), assistant("", call('{"k":', id="id"))])


def test_calls_and_results_get_the_names_and_ids_that_clients_leave_out() -> None:
    template = with_calls("c.function.arguments | tojson")
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("look", "list")]
    results = [{"role": "tool", "tool_name": "list", "content": "2"}, {"role": "tool", "content": "1"}]
    assert template.render([user("A"), assistant("", *calls), *results]) == (
        "<user>A</><assistant>[call00200 look {}][call00201 list {}]</>"
        "<tool>2(list call00201)</><tool>1(look call00200)</>"
    )


def test_long_ids_are_shortened_for_templates_that_demand_nine_characters(real: Any) -> None:
    nemo = real("mistralai-Mistral-Nemo-Instruct-2407")
    messages = [
        user("A"),
        assistant("", call({"k": 1}, id="call_abcdefghijkl")),
        {"role": "tool", "tool_call_id": "call_abcdefghijkl", "content": "R"},
    ]
    ids = re.findall(r'"(?:call_)?id": "([^"]*)"', nemo.render(messages))
    assert len(ids) == 2 and ids[0] == ids[1] and re.fullmatch("[0-9a-z]{9}", ids[0])


def test_tools_without_a_place_are_an_error_and_old_calls_stay_readable(real: Any) -> None:
    gemma = real("google-gemma-2-2b-it")
    assert not gemma.supports_tools
    messages = [user("A"), assistant(None, call({"k": "v"})), {"role": "tool", "content": "R"}]
    with pytest.raises(TemplateError, match="does not support tools"):
        gemma.render(messages, tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}])
    assert gemma.render(messages) == (
        "<bos><start_of_turn>user\nA<end_of_turn>\n"
        '<start_of_turn>model\n[{"name": "look", "arguments": {"k": "v"}}]<end_of_turn>\n'
        "<start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_each_of_its_names(key: str) -> None:
    messages = [user("A"), {**assistant("B"), key: "R"}]
    assert ChatTemplate("{{ messages[1].reasoning_content }}{{ messages[1].thinking }}").render(messages) == "RR"


def test_thinking_is_switched_by_the_name_that_the_template_reads(real: Any) -> None:
    qwen, deepseek, minimax = (real(name) for name in ("Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-V3.1", "MiniMax-M3"))
    assert qwen.supports_thinking and deepseek.supports_thinking and minimax.supports_thinking
    assert not real("Qwen-Qwen2.5-7B-Instruct").supports_thinking
    assert qwen.render([user("A")], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert qwen.render([user("A")]).endswith("<|im_start|>assistant\n")
    assert deepseek.render([user("A")], enable_thinking=True).endswith("<think>")
    assert deepseek.render([user("A")], enable_thinking=False).endswith("</think>")
    assert deepseek.starts_in_reasoning(deepseek.render([user("A")], enable_thinking=True))
    assert not deepseek.starts_in_reasoning(deepseek.render([user("A")], enable_thinking=False))
    assert "mode: disabled" in minimax.render([user("A")], enable_thinking=False)


@pytest.mark.parametrize(
    ("name", "reasoning", "shown"),
    [
        ("Qwen-Qwen3-0.6B", ("<think>", "</think>"), "<tool_call>"),
        ("Mistral-Small-3.2-24B-Instruct-2506", None, "[TOOL_CALLS]bullace"),
        ("openai-gpt-oss-120b", ("<|channel|>analysis<|message|>", "<|end|>"), "to=functions.bullace"),
        ("google-gemma-4-31B-it", ("<|channel>thought", "<channel|>"), "<|tool_call>call:bullace"),
        ("meta-llama-Llama-3.1-8B-Instruct", None, '{"name": "bullace", "parameters": '),
        ("google-gemma-2-2b-it", None, "<start_of_turn>"),
    ],
)
def test_markers(real: Any, name: str, reasoning: Any, shown: str) -> None:
    template = real(name)
    assert template.reasoning_markers == ((reasoning,) if reasoning else ())
    assert shown in template.shown


def test_list_methods_that_real_templates_call(real: Any) -> None:
    messages = [user("A"), assistant("", call({"k": 1})), {"role": "tool", "content": "R"}]
    assert "## Return of functions.look:0\nR<|im_end|>" in real("Kimi-K2-Instruct").render(messages)


def test_firefunction_prompts_list_functions_and_the_date(real: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    prompt = real("fireworks-ai-llama-3-firefunction-v2").render([user("A")], tools=tools)
    assert f"JSON spec:\n{json.dumps(tools, indent=2)}\nToday is " in prompt
    assert re.search(rf"Today is \w{{3}} \d\d {datetime.datetime.now(datetime.UTC).year}\.", prompt)


def test_extra_arguments_are_those_on_the_list() -> None:
    template = ChatTemplate("{{ reasoning_effort }}")
    assert template.render([], reasoning_effort="low") == "low"
    with pytest.raises(TemplateError, match="did you mean 'reasoning_effort'"):
        template.render([], reasoning_efort="low")
    for name in ("chat_template", "bos_token", "strftime_now"):
        with pytest.raises(TemplateError, match=f"unknown template argument '{name}'"):
            template.render([], **{name: "x"})


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (["text"], 'message 1 is not an object with a "role"'),
        ([{"content": "A"}], 'message 1 is not an object with a "role"'),
        ([assistant("", {"function": {}})], "message 1: tool call 1"),
        ([{**assistant("A"), "tool_calls": 5}], "message 1: tool_calls is not a list"),
        ([user("A"), user(5)], "message 2: content is text, a list of parts or null"),
        ([{**user("A"), "weight": float("nan")}], "plain JSON"),
        ([{**user("A"), "weight": object()}], "plain JSON"),
    ],
)
def test_malformed_messages_are_named(messages: Any, complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        ChatTemplate(CHATML).render(messages)


def test_text_of_any_kind_comes_back_as_it_went() -> None:
    odd = "\N{SNOWMAN}\U0001f600\r\n\u2028\x00{{ 1 }}{% x %}<b>&\ud800"
    assert ChatTemplate("{{ messages[0].content }}").render([user(odd)]) == odd
