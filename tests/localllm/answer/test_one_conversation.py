"""The same conversation gives the same prompt, sampling and stop strings in every front end and protocol."""

import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gguf_io.image_rows import ReadPicture
from gguf_io.media import PictureView
from localllm.answer.local import LocalModel
from localllm.answer.request import AnswerRequest
from localllm.chats import Role, SessionStore
from localllm.chats.conversation import Conversation
from localllm.chats.parameters import Parameters
from localllm.cli.main import main
from localllm.engine.request import FinishReason, GenerationRequest, TokenEvent
from localllm.engine.stream import GenerationStream
from localllm.library.behaviour import Behaviour
from localllm.placement.loaded_model import LoadedModel, load_model
from localllm.server.anthropic.requests import MessagesBody, messages_request
from localllm.server.ollama.generate import chat_request as ollama_chat_request
from localllm.server.ollama.generate import generate_request
from localllm.server.ollama.schema import GenerateBody
from localllm.server.ollama.schema import OllamaChatBody as OllamaChatBody
from localllm.server.openai.chat import chat_request as openai_chat_request
from localllm.server.openai.responses import given_items, responses_request
from localllm.server.openai.schema import ChatBody, ResponsesBody
from localllm.settings import Settings
from tests.localllm.answer.conversations import ASKED, CASES, PICTURE, TEMPLATE, TOOL, Case
from tests.localllm.server.made_models import with_metadata
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def loaded(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    source = data_dir / "models" / "gguf" / "stories260K-Q8_0.gguf"
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    with_metadata(source, path, "--chat-template", TEMPLATE)
    with load_model(path, Settings(backend="native", disk_cache=False, threads=1)) as model:
        rows: Any = SimpleNamespace(ids=(10**20, 10**20 + 1))
        view = PictureView((9, 9), None, (1, 1), 2)
        model.see = lambda *_: ReadPicture((rows,), view)  # type: ignore[method-assign]
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
        asked = ResponsesBody(**shared, **case.sampling, **case.responses)
        yield "responses", responses_request(asked, given_items(asked))
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

    (folder / "fox.png").write_bytes(PICTURE)
    flags = [flag for name, value in case.sampling.items() for flag in (f"--{name.replace('_', '-')}", str(value))]
    picture = [str(folder / "fox.png")] if "--image" in (case.run or []) else []
    monkeypatch.setattr("localllm.front.models.load_model", lambda *_: loaded)
    monkeypatch.setattr(loaded, "close", lambda: None)
    monkeypatch.setattr("localllm.front.models.behaviour_of", lambda _: case.behaviour)
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


def test_the_thinking_setting_applies_where_a_request_does_not_say(loaded: LoadedModel) -> None:
    silent = copy(loaded)
    silent.placement = replace(loaded.placement, settings=Settings(thinking=False))
    messages = [{"role": "user", "content": ASKED}]

    def text(model: LoadedModel, think: bool | None) -> str | None:
        return LocalModel("m", model).prepare(AnswerRequest(messages=messages, think=think)).text

    assert text(silent, None) == text(loaded, False) != text(loaded, None)
    assert text(silent, True) == text(loaded, None)


def test_the_text_of_a_prompt_ends_with_the_opening_of_a_required_call(loaded: LoadedModel) -> None:
    request = AnswerRequest(messages=[{"role": "user", "content": ASKED}], tools=[TOOL], tool_choice="")
    prompt = LocalModel("m", loaded).prepare(request)
    assert prompt.text.endswith("<tool_call>")
    assert loaded.tokenizer.decode(list(prompt.tokens)).endswith("<tool_call>")


def test_asking_what_a_request_costs_keeps_nothing_of_it(loaded: LoadedModel) -> None:
    """Not even its tools, which a later request of the conversation would inherit."""
    model, before = LocalModel("m", loaded), dict(loaded.tool_histories)
    request = AnswerRequest(messages=[{"role": "user", "content": "What is never sent?"}], tools=[TOOL])
    counts = model.expected_counts(request).result(PATIENCE_S)
    assert loaded.tool_histories == before
    assert counts.prompt == len(model.prepare(request).tokens) > counts.cached
    assert loaded.tool_histories != before
