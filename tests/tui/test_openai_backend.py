"""The chat's backend on a scripted server of OpenAI's protocol."""

import time
from collections.abc import Iterator

import pytest

from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.errors import RequestError
from localllm.remote.connection import RemoteError
from localllm.remote.openai import OpenAIServer
from localllm.settings import Settings
from tests.fakes.openai_server import ScriptedOpenAI, openai_server
from tests.tui.chatting import read
from tui.server_backend import OpenAIBackend

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def script() -> Iterator[ScriptedOpenAI]:
    with openai_server() as server:
        yield server


@pytest.fixture
def backend(script: ScriptedOpenAI) -> OpenAIBackend:
    return OpenAIBackend(OpenAIServer.at(script.address, Settings()))


def test_an_answer_and_what_was_asked_for(backend: OpenAIBackend, script: ScriptedOpenAI) -> None:
    info = backend.load("tiny", lambda what, share: None)
    assert (info.context, info.place) == (512, f"{script.address}/v1")
    assert backend.info is info
    script.says("Hel", "lo", finish="length", prompt_tokens=9, completion_tokens=2)
    messages = [*HI, {"role": "assistant", "content": "Wel", "reasoning_content": "Hm."}]
    sampling = {"temperature": 0.5, "seed": 3, "min_p": 0.2}
    asking = AnswerRequest(messages=messages, sampling=sampling, max_tokens=40, think=False, continues_text=True)
    updates = read(backend.submit(asking))
    assert "".join(part.text for update in updates for part in update.parts) == "Hello"
    last = updates[-1]
    assert (last.finish_reason, last.counts.prompt, last.counts.generated) == (FinishReason.LENGTH, 9, 2)
    asked = script.asked[0]
    assert asked["messages"] == messages
    assert asked.items() >= {"temperature": 0.5, "seed": 3, "min_p": 0.2, "max_tokens": 40}.items()
    assert "top_k" not in asked
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert asked["continue_final_message"] is True


def test_cancel_and_errors(backend: OpenAIBackend, script: ScriptedOpenAI) -> None:
    with pytest.raises(RequestError, match="No model is chosen"):
        backend.submit(AnswerRequest(messages=HI))
    with pytest.raises(RemoteError, match=r"has no model 'else'\. It has: tiny, other, third"):
        backend.load("else", lambda what, share: None)
    backend.load("tiny", lambda what, share: None)
    script.pieces = [{"content": "Half"}]
    script.hold.clear()
    answer = backend.submit(AnswerRequest(messages=HI))
    while not answer.poll():
        time.sleep(0.005)
    answer.cancel()
    assert read(answer)[-1].finish_reason is FinishReason.CANCELLED
    assert script.gone.wait(20)
    script.refusal = (500, {"error": {"message": "boom"}})
    assert "boom" in (read(backend.submit(AnswerRequest(messages=HI)))[-1].error or "")


def test_the_servers_models_are_the_choice(backend: OpenAIBackend) -> None:
    backend.load("other", lambda what, share: None)
    assert [(one.name, one.context, one.loaded) for one in backend.models(None)] == [
        ("tiny", 512, False),
        ("other", 64, True),
        ("third", None, False),
    ]


def test_tokens_are_counted_by_a_server_of_this_machine_that_can(
    backend: OpenAIBackend, script: ScriptedOpenAI
) -> None:
    assert backend.count_tokens("Hi there") is None  # no model yet
    backend.load("tiny", lambda what, share: None)
    script.json_answer = {"tokens": [5, 6]}
    assert backend.count_tokens("Hi there") == 2
    assert script.paths[-1] == "/tokenize" and script.asked[-1] == {"model": "tiny", "content": "Hi there"}
    script.refusal = (503, {"error": "busy"})
    assert backend.count_tokens("Hi there") is None
    script.refusal = (404, {"error": "no such route"})
    assert backend.count_tokens("Hi there") is None
    asked = len(script.asked)
    assert backend.count_tokens("Hi there") is None
    assert len(script.asked) == asked  # it is not asked again


def test_a_draft_is_not_sent_elsewhere_to_be_counted(script: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.server_backend.is_local", lambda host: False)
    elsewhere = OpenAIBackend(OpenAIServer.at(script.address, Settings()))
    elsewhere.load("tiny", lambda what, share: None)
    assert elsewhere.count_tokens("Hi there") is None
    assert not script.asked
