"""Conversations, and how each front end expresses them."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from localllm.chats import Attachment
from localllm.chats.conversation import Conversation
from localllm.chats.parameters import Parameters
from localllm.library.behaviour import Behaviour
from tests.picture_files import png

# Writes everything that it gets.
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}[end]
{%- endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if not enable_thinking %}<think></think>{% endif %}{{ reasoning_effort }}{% endif %}"""

ASKED = "What is it?"
PICTURE = png(1)
DATA = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{DATA}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SAMPLING = {"temperature": 0.5, "top_k": 7, "top_p": 0.7, "min_p": 0.1, "repeat_penalty": 1.2}
OWN = Behaviour(
    system="Be a pirate.",
    settings={"temperature": 0.25, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "max_tokens": 9},
    stop=("END",),
    messages=({"role": "user", "content": "Ahoy"}, {"role": "assistant", "content": "Arr."}),
)


def user(content: Any = ASKED) -> dict[str, Any]:
    return {"role": "user", "content": content}


@dataclass(frozen=True)
class Case:
    """How each front end expresses it; None if it cannot. The test adds what they share."""

    ollama: dict[str, Any] | None = None
    generate: dict[str, Any] | None = None
    openai: dict[str, Any] | None = None
    responses: dict[str, Any] | None = None
    anthropic: dict[str, Any] | None = None
    run: list[str] | None = None
    chat: Callable[[Conversation], None] | None = None
    behaviour: Behaviour = field(default_factory=Behaviour)
    sampling: dict[str, float] = field(default_factory=lambda: SAMPLING)
    written: str = ""  # in the prompt, so that the comparison is not empty


def asks(conversation: Conversation) -> None:
    conversation.ask(ASKED)


def with_system(conversation: Conversation) -> None:
    conversation.set_parameters(conversation.parameters.with_text("system", "Be brief.", Parameters()))
    conversation.ask(ASKED)


def thinking(text: str) -> Callable[[Conversation], None]:
    def set_it(conversation: Conversation) -> None:
        conversation.set_parameters(conversation.parameters.with_text("think", text, Parameters()))
        conversation.ask(ASKED)

    return set_it


def goes_on(conversation: Conversation) -> None:
    conversation.ask(ASKED)
    answer = conversation.begin_answer()
    answer.content, answer.reasoning = "A fo", "Hm."
    conversation.save(answer)


def shows_a_picture(conversation: Conversation) -> None:
    conversation.ask(ASKED, (Attachment("fox.png", "", picture=DATA),))


FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
SYSTEM = {"role": "system", "content": "Be brief."}
CASES = {
    "a question": Case(
        ollama={"messages": [user()]},
        generate={"prompt": ASKED},
        openai={"messages": [user()]},
        responses={"input": ASKED},
        anthropic={"messages": [user()]},
        run=[],
        chat=asks,
        written=f"[user]{ASKED}[end][assistant]",
    ),
    "a system text": Case(
        ollama={"messages": [SYSTEM, user()]},
        generate={"prompt": ASKED, "system": "Be brief."},
        openai={"messages": [SYSTEM, user()]},
        responses={"input": ASKED, "instructions": "Be brief."},
        anthropic={"messages": [user()], "system": "Be brief."},
        run=["--system", "Be brief."],
        chat=with_system,
        written="[system]Be brief.[end][user]",
    ),
    "a developer's text": Case(
        ollama={"messages": [{**SYSTEM, "role": "developer"}, user()]},
        openai={"messages": [{**SYSTEM, "role": "developer"}, user()]},
        responses={"input": [{**SYSTEM, "role": "developer"}, user()]},
        anthropic={"messages": [user()], "system": [{"type": "text", "text": "Be brief."}]},
        run=["--system", "Be brief."],
        written="[system]Be brief.[end][user]",
    ),
    "what the model's manifest says": Case(
        ollama={"messages": [user()]},
        generate={"prompt": ASKED},
        openai={"messages": [user()]},
        responses={"input": ASKED},
        anthropic={"messages": [user()]},
        run=[],
        chat=asks,
        behaviour=OWN,
        sampling={},
        written="[system]Be a pirate.[end][user]Ahoy[end][assistant]Arr.[end][user]What",
    ),
    "a system text over the manifest's": Case(
        ollama={"messages": [SYSTEM, user()]},
        generate={"prompt": ASKED, "system": "Be brief."},
        openai={"messages": [{**SYSTEM, "role": "developer"}, user()]},
        responses={"input": ASKED, "instructions": "Be brief."},
        anthropic={"messages": [user()], "system": "Be brief."},
        run=["--system", "Be brief."],
        chat=with_system,
        behaviour=OWN,
        written="[system]Be brief.[end][user]Ahoy[end][assistant]Arr.[end][user]What",
    ),
    "stop strings over the manifest's": Case(
        ollama={"messages": [user()], "options": {"stop": ["A", "B"]}},
        generate={"prompt": ASKED, "options": {"stop": ["A", "B"]}},
        openai={"messages": [user()], "stop": ["A", "B"]},
        anthropic={"messages": [user()], "stop_sequences": ["A", "B"]},
        run=["--stop", "A", "--stop", "B"],
        behaviour=OWN,
    ),
    "tools": Case(
        ollama={"messages": [user()], "tools": [TOOL]},
        openai={"messages": [user()], "tools": [{"function": dict(reversed(FUNCTION.items())), "type": "function"}]},
        responses={"input": ASKED, "tools": [{"type": "function", **FUNCTION}]},
        anthropic={
            "messages": [user()],
            "tools": [{"name": "weather", "input_schema": SCHEMA, "description": "The weather."}],
        },
        written='"parameters": {"type": "object"',
    ),
    "calls, results and thoughts of before": Case(
        ollama={
            "messages": [
                user(),
                {"role": "assistant", "content": "I look.", "thinking": "Hm.", "tool_calls": [{"function": CALL}]},
                {"role": "tool", "content": "Rain.", "tool_name": "weather"},
            ]
        },
        openai={
            "messages": [
                user(),
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning": "Hm.",
                    "tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
                },
                {"role": "tool", "content": [{"type": "text", "text": "Rain."}], "tool_call_id": "a"},
            ]
        },
        responses={
            "input": [
                user(),
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'},
                {"type": "function_call_output", "call_id": "a", "output": "Rain."},
            ]
        },
        anthropic={
            "messages": [
                user(),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
                    ],
                },
                user([{"type": "tool_result", "tool_use_id": "a", "content": "Rain."}]),
            ]
        },
        written='<think>Hm.</think>I look.<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>',
    ),
    "thinking": Case(
        ollama={"messages": [user()], "think": True},
        generate={"prompt": ASKED, "think": True},
        openai={"messages": [user()], "chat_template_kwargs": {"enable_thinking": True}},
        anthropic={"messages": [user()], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        run=["--think", "on"],
        chat=thinking("on"),
    ),
    "an effort": Case(
        ollama={"messages": [user()], "think": "low"},
        openai={"messages": [user()], "reasoning_effort": "low"},
        responses={"input": ASKED, "reasoning": {"effort": "low"}},
        run=["--think", "low"],
        written="[assistant]low",
    ),
    "no thinking": Case(
        ollama={"messages": [user()], "think": False},
        generate={"prompt": ASKED, "think": False},
        openai={"messages": [user()], "reasoning_effort": "none"},
        responses={"input": ASKED, "reasoning": {"effort": "none"}},
        anthropic={"messages": [user()], "thinking": {"type": "disabled"}},
        run=["--think", "off"],
        chat=thinking("off"),
        written="[assistant]<think></think>",
    ),
    "a format": Case(
        ollama={"messages": [user()], "think": False, "format": SCHEMA},
        generate={"prompt": ASKED, "think": False, "format": SCHEMA},
        openai={
            "messages": [user()],
            "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
        },
        responses={"input": ASKED, "text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}},
        run=["--format", json.dumps(SCHEMA)],
        written="[assistant]<think></think>",
    ),
    "a picture": Case(
        ollama={"messages": [{**user(), "images": [DATA]}]},
        generate={"prompt": ASKED, "images": [DATA]},
        openai={
            "messages": [user([{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": ASKED}])]
        },
        responses={"input": [user([{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": ASKED}])]},
        anthropic={
            "messages": [
                user(
                    [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
                        {"type": "text", "text": ASKED},
                    ]
                )
            ]
        },
        run=["--image"],
        chat=shows_a_picture,
        written=f"\n{ASKED}[end]",
    ),
    "an answer that goes on": Case(
        ollama={"messages": [user(), {"role": "assistant", "content": "A fo", "thinking": "Hm."}]},
        openai={"messages": [user(), {"role": "assistant", "content": "A fo", "reasoning_content": "Hm."}]},
        responses={
            "input": [
                user(),
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
                {"role": "assistant", "content": "A fo"},
            ]
        },
        anthropic={
            "messages": [
                user(),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "text", "text": "A fo"},
                    ],
                },
            ]
        },
        chat=goes_on,
        written="[assistant] <think>Hm.</think>A fo",
    ),
}
