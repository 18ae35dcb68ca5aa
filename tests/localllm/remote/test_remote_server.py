"""Answers of a scripted server: pieces, counts, errors, keys, addresses, cancelling."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.answer.event import AnswerEvent, PartKind
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.errors import SettingsError
from localllm.remote import connection
from localllm.remote.connection import Endpoint, RemoteError
from localllm.remote.fields import completion_fields
from localllm.remote.openai import OpenAIServer
from localllm.remote.stream import NO_REASON, RemoteStream
from localllm.settings import Settings
from tests.fakes.openai_server import ScriptedOpenAI, openai_server
from tests.waiting import PATIENCE_S

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def script() -> Iterator[ScriptedOpenAI]:
    with openai_server() as server:
        yield server


def stream(server: OpenAIServer, **asked: Any) -> RemoteStream:
    return server.model("tiny").prepare(AnswerRequest(**asked)).submit()


def ask(script: ScriptedOpenAI, settings: Settings = Settings()) -> list[AnswerEvent]:  # noqa: B008 - it is frozen
    return list(stream(OpenAIServer.at(script.address, settings), messages=HI, max_tokens=7))


def test_pieces_reasoning_and_the_servers_own_counts(script: ScriptedOpenAI) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    script.pieces = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"reasoning": " So."},
        {"content": "Hel"},
        {"content": "lo", "reasoning_content": None},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": usage},
    ]
    updates = ask(script)
    assert [(part.kind, part.text) for update in updates for part in update.parts] == [
        (PartKind.REASONING, "Hm."),
        (PartKind.REASONING, " So."),
        (PartKind.CONTENT, "Hel"),
        (PartKind.CONTENT, "lo"),
    ]
    assert [update.counts.generated for update in updates] == [1, 2, 3, 4, 5]
    last = updates[-1]
    assert (last.counts.prompt, last.counts.cached, last.finish_reason) == (9, 4, FinishReason.LENGTH)
    assert last.timings.ttft_s > 0
    assert script.paths == ["/v1/chat/completions"]
    assert script.asked[0] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_raw_prompt_goes_to_completions(script: ScriptedOpenAI) -> None:
    script.pieces = [{"choices": [{"text": "upon a time"}]}, {"choices": [{"text": "", "finish_reason": "stop"}]}]
    updates = list(stream(OpenAIServer.at(script.address, Settings()), prompt="Once"))
    assert [part.text for update in updates for part in update.parts] == ["upon a time"]
    assert updates[-1].finish_reason is FinishReason.STOP
    assert (script.paths, script.asked[0]["prompt"]) == (["/v1/completions"], "Once")


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((404, {"error": {"message": "model not found"}}), "refuses: model not found. Check the model's name"),
        ((400, {"object": "error", "message": "too long."}), "refuses: too long."),
        ((401, {"detail": "who are you?"}), "who are you?. Set the server's key: LOCALLLM_REMOTE_KEY"),
        ((500, "<html>broken</html>"), "<html>broken</html>"),
        ((503, ""), "Service Unavailable"),
        (
            (503, {"error": {"message": "Loading model", "code": 503}}),
            "refuses: Loading model. It is busy or still loads",
        ),
    ],
)
def test_a_refusal_keeps_the_servers_message(script: ScriptedOpenAI, refusal: tuple[int, Any], words: str) -> None:
    script.refusal = refusal
    (last,) = ask(script)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None and words in last.error and script.address in last.error


def test_what_breaks_on_the_way_is_named(script: ScriptedOpenAI) -> None:
    script.pieces = [{"content": "So"}, {"error": {"message": "out of memory"}}]
    assert [update.error for update in ask(script)] == [None, "The server failed: out of memory."]
    script.pieces = [{"content": "So"}]
    assert ask(script)[-1].error == NO_REASON
    script.ending = b"data: {nonsense\n\n"
    assert "not JSON" in (ask(script)[-1].error or "")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"data": ["x" * 2000] * 10}, "sends more than"),
        ('{"data": ' + "[" * 100_000, "does not send JSON"),
        ("[1]", "does not send a JSON object"),
        ({"data": [{"embedding": {}}]}, "does not send vectors"),
    ],
)
def test_bad_json_is_an_error_of_the_server(
    script: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch, answer: Any, words: str
) -> None:
    script.json_answer = answer
    if "more than" in words:
        monkeypatch.setattr(connection, "LONGEST_JSON", 10_000)
    with pytest.raises(RemoteError, match=words):
        OpenAIServer.at(script.address, Settings()).model("tiny").embed(["a"], truncate=True, dimensions=None)


@pytest.mark.parametrize("event", [b"[" * 100_000, b'"text"', b'{"choices": 5}', b'{"choices": [{"delta": []}]}'])
def test_a_bad_event_is_an_error_of_the_server(script: ScriptedOpenAI, event: bytes) -> None:
    script.ending = b"data: " + event + b"\n\n"
    last = ask(script)[-1]
    assert last.finish_reason is FinishReason.ERROR and isinstance(last.cause, RemoteError)


@pytest.mark.parametrize("index", [0.5, "0", None, 7])
def test_a_bad_score_is_an_error_of_the_server(script: ScriptedOpenAI, index: Any) -> None:
    script.json_answer = {"results": [{"index": index, "relevance_score": 0.5}]}
    with pytest.raises(RemoteError, match="score"):
        OpenAIServer.at(script.address, Settings()).model("tiny").rank("a", ["b"], truncate=True)


def test_cancelling_ends_the_connection_at_any_moment(script: ScriptedOpenAI) -> None:
    script.pieces = [{"content": "Half"}]
    script.hold.clear()
    answer = stream(OpenAIServer.at(script.address, Settings()), messages=HI)
    updates = []
    for update in answer:
        updates.append(update)
        threading.Thread(target=answer.cancel).start()
    assert updates[-1].finish_reason is FinishReason.CANCELLED
    assert script.gone.wait(PATIENCE_S)
    early = stream(OpenAIServer.at(script.address, Settings()), messages=HI)
    early.cancel()
    assert [update.finish_reason for update in early][-1] is FinishReason.CANCELLED  # a piece may have arrived before


def test_the_key_comes_from_a_setting_or_a_file(script: ScriptedOpenAI, tmp_path: Path) -> None:
    script.says("Hello")
    ask(script)
    ask(script, Settings(remote_key="sesame"))
    (tmp_path / "key").write_text("from a file\n", encoding="utf-8")
    ask(script, Settings(remote_key_file=str(tmp_path / "key")))
    assert script.keys == [None, "Bearer sesame", "Bearer from a file"]
    with pytest.raises(SettingsError, match="remote_key_file"):
        OpenAIServer.at(script.address, Settings(remote_key_file=str(tmp_path / "absent")))
    assert "sesame" not in repr(Settings(remote_key="sesame")) + repr(Endpoint.parse("host", "sesame"))


def test_models_and_their_contexts(script: ScriptedOpenAI) -> None:
    found = [(model.name, model.context) for model in OpenAIServer.at(script.address, Settings()).models()]
    assert found == [("tiny", 512), ("other", 64), ("third", None)]


def test_a_context_is_that_of_a_slot(script: ScriptedOpenAI) -> None:
    """llama-server divides its context among slots, and reports both lengths."""
    row = {"id": "tiny", "owned_by": "llamacpp", "meta": {"n_ctx_train": 40960, "n_ctx": 512}}
    script.models = [row]
    (found,) = OpenAIServer.at(script.address, Settings()).models()
    assert found.context == 512


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("host", "http://host:80/v1"),
        ("host:8000", "http://host:8000/v1"),
        (":8000", "http://127.0.0.1:8000/v1"),
        ("https://host", "https://host:443/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
        ("https://host/api/v3", "https://host:443/api/v3"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        ("::1", "http://[::1]:80/v1"),
        ("[::1]", "http://[::1]:80/v1"),
        ("[fe80::1]:8000/", "http://[fe80::1]:8000/v1"),
        ("0.0.0.0:8000", "http://127.0.0.1:8000/v1"),
        ("http://[::]:8000", "http://[::1]:8000/v1"),
        (' "host:8000" ', "http://host:8000/v1"),
        ("HTTP://Host:8000/x//", "http://host:8000/x"),
    ],
)
def test_addresses(address: str, shown: str) -> None:
    assert str(Endpoint.parse(address)) == shown


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":",
        ":0",
        "ftp://host",
        "http://",
        "host:port",
        "host:0",
        "http://[::1",
        "http://host/v1?key=x",
        "a..b",
        f"http://{'a' * 64}.test",
    ],
)
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(RemoteError, match="is not a server's address"):
        Endpoint.parse(address)
    with pytest.raises(RemoteError, match="LOCALLLM_REMOTE_KEY"):
        Endpoint.parse("http://me:secret@host")


def test_a_server_that_is_not_there() -> None:
    (last,) = stream(OpenAIServer(Endpoint.parse("127.0.0.1:9")), messages=HI)
    assert last.error is not None and "http://127.0.0.1:9/v1 cannot be reached" in last.error
    assert "Errno" not in last.error


def test_only_named_sampling_parameters_are_sent() -> None:
    def fields(**sampling: float | None) -> dict[str, Any]:
        return completion_fields(AnswerRequest(prompt="x", sampling=sampling))

    assert fields(temperature=0.5, seed=None) == {"prompt": "x", "temperature": 0.5}
    expected = {"prompt": "x", "top_k": 3, "repeat_penalty": 1.2, "repetition_penalty": 1.2}
    assert fields(top_k=3, repeat_penalty=1.2) == expected
