"""Every real template renders minja's test contexts as llama-cpp-python's formatter does."""

import copy
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gguf_io.chat_template import ChatTemplate

pytestmark = pytest.mark.oracle
llama_chat_format = pytest.importorskip("llama_cpp.llama_chat_format", reason="the oracle is llama-cpp-python")

DATA = Path(os.environ.get("TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
NAMES = sorted(path.stem for path in (DATA / "templates").glob("*.jinja"))
BOS, EOS = "<s>", "</s>"

# These fail on null for "no tools", so the oracle gets an empty list.
NEED_A_LIST_OF_TOOLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
}

# These write JSON text as it is; every other template gets the arguments as an object.
TAKE_ARGUMENTS_AS_TEXT = {
    "Bielik-11B-v3.0-Instruct",
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "NVIDIA-Nemotron-Nano-v2",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen3-0.6B",
    "Reka-Edge",
    "ibm-granite-granite-4.0",
    "ibm-granite-granite-4.1",
    "meetkai-functionary-medium-v3.2",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "unsloth-mistral-Devstral-Small-2507",
    "upstage-Solar-Open-100B",
}

# The oracle refuses or drops what these do not support; test_chat_template_adaptation.py tests what we do instead.
WITHOUT_SYSTEM = {"google-gemma-2-2b-it"}
WITHOUT_TOOL_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-deepseek-r1",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
CALL_LIST_METHODS = {"Kimi-K2-Instruct", "Kimi-K2-Thinking"}  # append and pop, which the oracle's sandbox refuses
TOLD_OF_FUNCTIONS = {"fireworks-ai-llama-3-firefunction-v2"}  # and functions of the time, which the oracle does not set


def oracle(source: str, messages: list[Any], tools: list[Any] | None) -> str:
    formatter = llama_chat_format.Jinja2ChatFormatter(source, eos_token=EOS, bos_token=BOS)
    prompt: str = formatter(messages=copy.deepcopy(messages), tools=tools).prompt
    return prompt


def with_object_arguments(messages: list[Any]) -> list[Any]:
    parsed = copy.deepcopy(messages)
    for message in parsed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return parsed


def context(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / f"chat/minja_context_{name}.json").read_text("utf-8"))
    return loaded


PLAIN = [
    {"role": "user", "content": "  Is 7 prime? <b>&amp;</b> \N{SNOWMAN} 'quoted'\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And 8?"},
]


@dataclass(frozen=True)
class Real:
    """A real template: its name, its text, and our object, whose process serves all tests of this template."""

    name: str
    source: str
    template: ChatTemplate


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest, data_dir: Path) -> Real:
    source = (data_dir / f"templates/{request.param}.jinja").read_text("utf-8")
    return Real(request.param, source, ChatTemplate(source, BOS, EOS))


def each_but(*left_out: set[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("real", sorted(set(NAMES).difference(*left_out)), indirect=True)


@each_but(TOLD_OF_FUNCTIONS)
def test_conversations_render_like_the_oracle(real: Real) -> None:
    no_tools: list[Any] | None = [] if real.name in NEED_A_LIST_OF_TOOLS else None
    conversations = [PLAIN, context("simple")["messages"]]
    if real.name not in WITHOUT_SYSTEM:
        conversations.append(context("system")["messages"])
    assert real.template.takes.system == (real.name not in WITHOUT_SYSTEM)
    for messages in conversations:
        assert real.template.render(messages) == oracle(real.source, messages, no_tools)


@each_but(WITHOUT_TOOL_CALLS, CALL_LIST_METHODS, TOLD_OF_FUNCTIONS)
def test_tool_calls_render_like_the_oracle(real: Real) -> None:
    given = context("tool_use")
    tools = given["tools"] if real.template.supports_tools else None
    messages = given["messages"] if real.name in TAKE_ARGUMENTS_AS_TEXT else with_object_arguments(given["messages"])
    assert real.template.render(given["messages"], tools=tools) == oracle(real.source, messages, tools)
