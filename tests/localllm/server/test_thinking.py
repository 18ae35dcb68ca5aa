"""Tools, thinking and formats, with a model whose template knows all three. Its answers are nonsense."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from localllm.answer.event import PartKind
from localllm.answer.splitting import ThinkingFirst
from tests.localllm.server.made_models import rename_token, with_metadata
from tests.waiting import PATIENCE_S

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
SPACE = 35  # <0x20>
END = 383  # " there" becomes </think>
SCHEMA = {
    "type": "object",
    "properties": {"at": {"enum": ["a", "b"]}},
    "required": ["at"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}

# Qwen's, shortened to this model's 512 tokens.
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
OPENED = TEMPLATE.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>", "{% if true %}<think>"
)
# gpt-oss's, shortened likewise.
HARMONY = """\
{%- for message in messages %}<|start|>{{ message.role }}
{%- if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|><|start|>assistant{% endif %}
{%- if message.role == "assistant" %}<|channel|>final{% endif %}<|message|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


@pytest.fixture(scope="module")
def thinker(start_server: Any, model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of "thinker", which may think, and "opened", whose prompt ends within reasoning."""
    folder = tmp_path_factory.mktemp("thinkers")
    flags = []
    for name, template in (("thinker", TEMPLATE), ("opened", OPENED)):
        path = folder / f"{name}.gguf"
        with_metadata(model_files / "stories260K-Q8_0.gguf", path, "--chat-template", template)
        rename_token(path, END, "</think>")
        flags += ["--model", str(path)]
    path = with_metadata(model_files / "stories260K-Q8_0.gguf", folder / "harmony.gguf", "--chat-template", HARMONY)
    flags += ["--model", str(path)]
    with start_server(*flags) as server:
        yield server


@pytest.fixture(scope="module")
def bias(thinker: Any) -> dict[str, float]:
    """Bias against blanks, which JSON allows between tokens and this model prefers; and for </think>."""
    told = httpx.post(f"{thinker.url}/tokenize", json={"model": "thinker", "content": " \n\r\t"}, timeout=PATIENCE_S)
    return {str(token): -100.0 for token in [*told.json()["tokens"], SPACE]} | {str(END): 5.5}


@pytest.fixture
def client(thinker: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_tools_reach_the_prompt_and_calls_come_back(
    thinker: Any, client: openai.OpenAI, bias: dict[str, float]
) -> None:
    with ollama.Client(host=thinker.url) as other:
        assert {"completion", "tools", "thinking"} <= set(other.show("thinker").capabilities or [])
    asked: dict[str, Any] = {
        "model": "thinker",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0,
        "logit_bias": bias,
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["at"] in ("a", "b")
    chunks = list(client.chat.completions.create(**asked, stream=True))
    found = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert "".join(one.function.arguments or "" for one in found if one.function) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    body = {"model": "thinker", "messages": HELLO, "tools": [WEATHER]}
    prompt = httpx.post(f"{thinker.url}/apply-template", json=body, timeout=PATIENCE_S).json()["prompt"]
    assert '"name": "weather"' in prompt and prompt.endswith("<|im_start|>assistant\n")


def test_a_format_begins_in_the_channel_of_answers(client: openai.OpenAI, bias: dict[str, float]) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "response_format": FORMAT, "temperature": 0, "max_tokens": 300}
    answer = client.chat.completions.create(model="harmony", reasoning_effort="none", logit_bias=bias, **asked)
    told = answer.choices[0].message
    assert json.loads(told.content or "")["at"] in ("a", "b")
    assert "reasoning" not in (told.model_extra or {})


def test_thinking_is_separated_from_content(thinker: Any) -> None:
    with ollama.Client(host=thinker.url) as client:
        told = client.chat("thinker", HELLO, think=False, options={"seed": 1, "num_predict": 4})
        assert told.message.content and not told.message.thinking
        opened = client.chat("opened", HELLO, options={"seed": 1, "num_predict": 4})
        assert opened.message.thinking and not opened.message.content


@pytest.mark.parametrize("model", ["thinker", "opened"])
def test_a_format_begins_behind_the_thoughts(client: openai.OpenAI, bias: dict[str, float], model: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": HELLO,
        "reasoning_effort": "low",
        "response_format": FORMAT,
        "temperature": 0,
        "logit_bias": bias,
        "max_tokens": 300,
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "stop" and json.loads(choice.message.content or "")["at"] in ("a", "b")
    thoughts = (choice.message.model_extra or {})["reasoning"]
    assert thoughts and "think>" not in thoughts
    content = reasoning = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning", "")
    assert (content, reasoning) == (choice.message.content, thoughts)
    called = client.chat.completions.create(
        **{**asked, "response_format": openai.omit}, tools=[WEATHER], tool_choice="required"
    ).choices[0]
    assert called.finish_reason == "tool_calls" and called.message.tool_calls[0].function.name == "weather"


def test_a_format_alone_switches_thinking_off(client: openai.OpenAI, bias: dict[str, float]) -> None:
    choice = client.chat.completions.create(
        model="thinker", messages=HELLO, response_format=FORMAT, temperature=0, logit_bias=bias, max_tokens=60
    ).choices[0]
    assert json.loads(choice.message.content or "")["at"] and "reasoning" not in (choice.message.model_extra or {})


def test_ollamas_default_is_to_think_first(thinker: Any) -> None:
    with ollama.Client(host=thinker.url) as client:
        answer = client.chat("thinker", HELLO, format=SCHEMA, options={"temperature": 0, "num_predict": 200})
        assert answer.message.thinking and (answer.message.content or "{").startswith("{")
        plain = client.chat("thinker", HELLO, think=False, format=SCHEMA, options={"seed": 1, "num_predict": 9})
        assert not plain.message.thinking and (plain.message.content or "").startswith("{")
        generated = client.generate("thinker", "Hi", format="json", options={"temperature": 0, "num_predict": 60})
        assert generated.thinking


def test_anthropics_thinking_block_comes_first(thinker: Any) -> None:
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model="opened", messages=HELLO, max_tokens=100, extra_body={"temperature": 0}, thinking={"type": "adaptive"}
        )
    assert answer.content[0].type == "thinking"


def test_an_effort_is_one_of_those_that_there_are(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        client.chat.completions.create(
            model="thinker", messages=HELLO, extra_body={"reasoning_effort": "<|im_end|>" * 1000}
        )


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("opening", ["<think>", ""])
def test_one_section_and_then_content(size: int, opening: str) -> None:
    text = opening + 'Is it </thin <b>?\n</think>\n\n{"a": "<think>no</think>"}\n'
    splitter = ThinkingFirst((opening, "</think>"))
    parts = [part for at in range(0, len(text), size) for part in splitter.push(text[at : at + size])]
    parts += splitter.flush()

    def of(kind: PartKind) -> str:
        return "".join(part.text for part in parts if part.kind is kind)

    assert of(PartKind.REASONING) == "Is it </thin <b>?\n"
    assert of(PartKind.CONTENT) == '{"a": "<think>no</think>"}\n'


def test_thoughts_without_an_end_are_thoughts() -> None:
    splitter = ThinkingFirst(("<think>", "</think>"))
    parts = [*splitter.push("<th"), *splitter.push("ink>so it </thi"), *splitter.flush()]
    assert "".join(part.text for part in parts) == "so it </thi"
    assert {part.kind for part in parts} == {PartKind.REASONING}
