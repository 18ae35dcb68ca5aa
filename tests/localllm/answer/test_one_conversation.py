"""The same conversation is the same prompt, sampling and stop strings, whoever asks and in whichever protocol."""

import base64
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.answer.local import LocalModel
from localllm.answer.request import AnswerRequest
from localllm.cli.main import main
from localllm.engine.loaded_model import LoadedModel, load_model
from localllm.engine.request import FinishReason, GenerationRequest, TokenEvent
from localllm.engine.stream import GenerationStream
from localllm.library.behaviour import Behaviour
from localllm.server.anthropic.messages import MessagesBody, messages_request
from localllm.server.ollama.generate import chat_request as ollama_chat_request
from localllm.server.ollama.generate import generate_request
from localllm.server.ollama.schema import ChatBody as OllamaChatBody
from localllm.server.ollama.schema import GenerateBody
from localllm.server.openai.chat import chat_request as openai_chat_request
from localllm.server.openai.responses import responses_request
from localllm.server.openai.schema import ChatBody, ResponsesBody
from localllm.settings import Settings
from tests.gpu_offload.projector_files import png
from tests.localllm.server.made_models import with_metadata
from tui.conversation import Conversation
from tui.parameters import Parameters
from tui.sessions import Attachment, Role, SessionStore

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
    """How each front end says it; None where it cannot. What they share is filled in by those who ask."""

    ollama: dict[str, Any] | None = None
    generate: dict[str, Any] | None = None
    openai: dict[str, Any] | None = None
    responses: dict[str, Any] | None = None
    anthropic: dict[str, Any] | None = None
    run: list[str] | None = None
    chat: Callable[[Conversation], None] | None = None
    behaviour: Behaviour = field(default_factory=Behaviour)
    sampling: dict[str, float] = field(default_factory=lambda: SAMPLING)
    written: str = ""  # in the prompt, so that the comparison is not one of nothing


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
        chat=thinking("on"),
    ),
    "an effort": Case(
        ollama={"messages": [user()], "think": "low"},
        openai={"messages": [user()], "reasoning_effort": "low"},
        responses={"input": ASKED, "reasoning": {"effort": "low"}},
        written="[assistant]low",
    ),
    "no thinking": Case(
        ollama={"messages": [user()], "think": False},
        generate={"prompt": ASKED, "think": False},
        openai={"messages": [user()], "reasoning_effort": "none"},
        responses={"input": ASKED, "reasoning": {"effort": "none"}},
        anthropic={"messages": [user()], "thinking": {"type": "disabled"}},
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


@pytest.fixture(scope="module")
def loaded(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    source = data_dir / "models" / "gguf" / "stories260K-Q8_0.gguf"
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    with_metadata(source, path, "--chat-template", TEMPLATE)
    with load_model(path, Settings(backend="native", disk_cache=False, threads=1)) as model:
        rows: Any = SimpleNamespace(ids=(10**20, 10**20 + 1))
        model.see = lambda _data: [rows]  # type: ignore[method-assign]
        yield model


def by_protocol(case: Case) -> Iterator[tuple[str, AnswerRequest]]:
    options = case.sampling | ((case.ollama or {}).get("options") or {})
    shared: dict[str, Any] = {"model": "m"}
    if case.ollama is not None:
        yield "ollama", ollama_chat_request(OllamaChatBody(**shared | case.ollama | {"options": options}))
    if case.generate is not None:
        yield "generate", generate_request(GenerateBody(**shared | case.generate | {"options": options}))
    if case.openai is not None:
        yield "openai", openai_chat_request(ChatBody(**shared, **case.sampling, **case.openai))
    if case.responses is not None:
        yield "responses", responses_request(ResponsesBody(**shared, **case.sampling, **case.responses))
    if case.anthropic is not None:
        body = MessagesBody(**shared, **case.sampling, **case.anthropic, max_tokens=9)
        yield "anthropic", messages_request(body)


def asked_by_run(case: Case, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, folder: Path) -> GenerationRequest:
    asked: list[GenerationRequest] = []

    def submit(request: GenerationRequest) -> GenerationStream:
        asked.append(request)
        stream = GenerationStream(lambda: None)
        stream.push(TokenEvent(finish_reason=FinishReason.STOP))
        return stream

    class Held:
        def __enter__(self) -> LoadedModel:
            return loaded

        def __exit__(self, *_: object) -> None:
            """The model is the test's."""

    (folder / "fox.png").write_bytes(PICTURE)
    flags = [flag for name, value in case.sampling.items() for flag in (f"--{name.replace('_', '-')}", str(value))]
    picture = [str(folder / "fox.png")] if "--image" in (case.run or []) else []
    monkeypatch.setattr("localllm.engine.loaded_model.load_model", lambda *_: Held())
    monkeypatch.setattr("localllm.library.behaviour.behaviour_of", lambda _: case.behaviour)
    monkeypatch.setattr("localllm.settings.config_path", lambda: folder / "config.toml")
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr(loaded.engine, "submit", submit)
    monkeypatch.setattr(
        sys, "argv", ["localllm", "run", str(loaded.file.path), ASKED, *flags, *(case.run or []), *picture]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return asked[0]


def asked_by_chat(case: Case, loaded: LoadedModel, folder: Path) -> AnswerRequest:
    parameters = Parameters(**case.behaviour.settings | case.sampling)  # type: ignore[arg-type]
    store = SessionStore(folder / "sessions.db")
    try:
        conversation = Conversation(store, "m", parameters)
        assert case.chat is not None
        case.chat(conversation)
        continues = conversation.messages[-1].role is Role.ASSISTANT
        if not continues:
            conversation.begin_answer()
        return conversation.request(continues)
    finally:
        store.close()


@pytest.mark.parametrize("name", CASES)
def test_every_front_end_asks_for_the_same(
    name: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = CASES[name]
    model = LocalModel("m", loaded, case.behaviour)
    found = {who: model.prepare(request).generation for who, request in by_protocol(case)}
    if case.chat is not None:
        own = LocalModel(
            "m",
            loaded,
            Behaviour(system=case.behaviour.system, stop=case.behaviour.stop, messages=case.behaviour.messages),
        )
        found["chat"] = own.prepare(asked_by_chat(case, loaded, tmp_path)).generation
    if case.run is not None:
        found["run"] = asked_by_run(case, loaded, monkeypatch, tmp_path)
    assert len(found) > 2
    first, expected = next(iter(found.items()))
    text = loaded.tokenizer.decode([token for token in expected.prompt if token < 10**9])
    assert case.written in text
    for who, generation in found.items():
        assert generation.prompt == expected.prompt, (who, first)
        assert generation.sampling == expected.sampling, (who, first)
        assert generation.stop == expected.stop, (who, first)
        assert (generation.constraint is None) == (expected.constraint is None), (who, first)
        assert generation.images.keys() == expected.images.keys(), (who, first)
    if case.behaviour.settings and who != "anthropic":
        assert {generation.max_tokens for who, generation in found.items() if who != "anthropic"} == {9}
