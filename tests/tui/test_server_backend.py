"""The chat on a server: a scripted one with Ollama's protocol, and localllm's own."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from localllm.answer.event import PartKind, merged
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason, Progress
from localllm.errors import RequestError
from localllm.library.modelfile import Modelfile
from localllm.remote.connection import RemoteError
from localllm.remote.ollama import OllamaServer
from localllm.remote.stream import NO_REASON
from tests.fakes.http_server import Quiet, serving
from tests.tui.chatting import read
from tui.backend import LoadStoppedError
from tui.server_backend import OllamaBackend

LAST = {"done": True, "done_reason": "stop", "prompt_eval_count": 9, "eval_count": 3, "eval_duration": 1_500_000_000}


class Script:
    """The server's answers, and the requests it received."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.loading: list[dict[str, Any]] = []
        self.costs: object = None
        self.asked: list[dict[str, Any]] = []
        self.address = ""
        self.key = ""
        self.abilities = ["completion", "thinking"]
        self.mute = threading.Event()  # until it is set, no conversation gets even a header
        self.mute.set()
        self.hold = threading.Event()
        self.hold.set()
        self.gone = threading.Event()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def backend(script: Script) -> Iterator[OllamaBackend]:
    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tags = {"name": "tiny:latest", "size": 7, "details": {"parameter_size": "1M", "quantization_level": "Q8_0"}}
            self._json({"models": [tags], "costs": script.costs})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.asked.append(body)
            if script.key and self.headers["Authorization"] != f"Bearer {script.key}":
                self._json({"error": "an API key is needed"}, 401)
            elif body["model"] != "tiny:latest":
                self._json({"error": "model not found"}, 404)
            elif self.path == "/api/create":
                self._json({"status": "success"})
            elif self.path == "/api/show":
                self._json({"model_info": {"llama.context_length": 512}, "capabilities": script.abilities})
            elif not body["messages"]:
                self._tell(*script.loading, {"done": True})
            else:
                self._stream()

        def _stream(self) -> None:
            script.mute.wait(60)
            self.send_response(200)
            self.end_headers()
            try:
                for line in script.lines:
                    self.wfile.write(json.dumps(line).encode() + b"\n")
                    self.wfile.flush()
                while not script.hold.wait(0.02):
                    self.wfile.write(b"\n")
            except OSError:
                script.gone.set()

        def _tell(self, *lines: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            for line in lines:
                self.wfile.write(json.dumps(line).encode() + b"\n")

        def _json(self, content: dict[str, Any], status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as script.address:
        yield OllamaBackend(OllamaServer(script.address))
        script.hold.set()


HI = [{"role": "user", "content": "Hi"}]


def asked() -> AnswerRequest:
    return AnswerRequest(messages=HI, sampling={"temperature": 0.5, "seed": 3}, max_tokens=40, think=True)


def test_an_answer_with_thinking_and_the_servers_own_figures(backend: OllamaBackend, script: Script) -> None:
    script.lines = [{"message": {"thinking": "Hm."}}, {"message": {"content": "Hello"}}, {"message": {}, **LAST}]
    info = backend.load("tiny:latest", lambda what, share: None)
    assert info.context == 512
    updates = read(backend.submit(asked()))
    assert [(part.kind, part.text) for update in updates for part in update.parts] == [
        (PartKind.REASONING, "Hm."),
        (PartKind.CONTENT, "Hello"),
    ]
    last = updates[-1]
    assert last.finish_reason is FinishReason.STOP
    assert (last.counts.prompt, last.counts.generated, last.timings.decode_s) == (9, 3, 1.5)
    body = script.asked[-1]
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert body["think"] is True
    # Unchanged parameters are left to the server, whose model may have its own.
    assert body["options"] == {"temperature": 0.5, "seed": 3, "num_predict": 40}


def test_cancelling_ends_the_connection(backend: OllamaBackend, script: Script) -> None:
    script.lines = [{"message": {"content": "Half"}}]
    script.hold.clear()
    backend.load("tiny:latest", lambda what, share: None)
    answer = backend.submit(asked())
    while not answer.poll():
        time.sleep(0.005)
    answer.cancel()
    assert read(answer)[-1].finish_reason is FinishReason.CANCELLED
    assert script.gone.wait(20)


def test_errors_say_what_the_server_said(backend: OllamaBackend, script: Script) -> None:
    with pytest.raises(RemoteError, match=r"refuses: model not found\. Check the model's name"):
        backend.load("other", lambda what, share: None)
    backend.load("tiny:latest", lambda what, share: None)
    script.lines = [{"message": {"content": "So"}}, {"error": "out of memory"}]
    last = read(backend.submit(asked()))[-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "out of memory")
    script.lines = [{"message": {"content": "So"}}]
    last = read(backend.submit(asked()))[-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, NO_REASON)


def test_a_server_that_asks_for_a_key(backend: OllamaBackend, script: Script) -> None:
    script.key = "secret"
    with pytest.raises(RemoteError, match=r"an API key is needed\. Set .*LOCALLLM_REMOTE_KEY"):
        backend.load("tiny:latest", lambda what, share: None)
    with_key = OllamaBackend(OllamaServer(script.address, "secret"))
    assert with_key.load("tiny:latest", lambda what, share: None).context == 512


def test_how_far_the_prompt_is_read_and_what_was_cached(backend: OllamaBackend, script: Script) -> None:
    reading = {"message": {"content": ""}, "progress": {"queue_position": 0, "completed": 512, "total": 2048}}
    cached = {"prompt_eval_cached_count": 7, "dropped_messages": 2}
    drafts = {"draft_count": 8, "draft_accepted_count": 5, "draft_duration": 250_000_000}
    script.lines = [reading]
    script.hold.clear()
    backend.load("tiny:latest", lambda what, share: None)
    answer = backend.submit(asked())
    while not (events := answer.poll()):
        time.sleep(0.005)
    update = merged(events)
    assert script.asked[-1]["progress"] is True
    assert update.progress == Progress(0, 512, 2048)
    assert update.timings.prefill_s > 0
    answer.cancel()
    script.hold.set()
    script.lines = [reading, {"message": {"content": "Hello"}}, {"message": {}, **LAST, **cached, **drafts}]
    last = read(backend.submit(asked()))[-1]
    assert (last.progress, last.counts.cached, last.counts.dropped_messages) == (None, 7, 2)
    assert (last.counts.drafted, last.counts.accepted, last.timings.drafting_s) == (8, 5, 0.25)


def test_a_load_tells_how_far_it_is_and_why_it_fails(backend: OllamaBackend, script: Script) -> None:
    told: list[tuple[str, float]] = []
    script.loading = [{"progress": {"phase": "reading weights", "share": 0.25}, "done": False}]
    backend.load("tiny:latest", lambda what, share: told.append((what, share)))
    loads = "127.0.0.1 loads tiny:latest"
    assert told == [(loads, 0.0), ("127.0.0.1: reading weights", 0.25), (loads, 1.0)]
    script.loading.append({"error": "out of memory"})
    with pytest.raises(RemoteError, match="cannot load tiny:latest: out of memory"):
        backend.load("tiny:latest", lambda what, share: None)

    def stop(what: str, share: float) -> None:
        if share == 0.25:
            raise LoadStoppedError("enough")

    with pytest.raises(LoadStoppedError):
        backend.load("tiny:latest", stop)


def test_an_answer_can_be_cancelled_before_the_server_has_said_anything(backend: OllamaBackend, script: Script) -> None:
    backend.load("tiny:latest", lambda what, share: None)
    script.mute.clear()
    answer = backend.submit(asked())
    try:
        assert not answer.poll()
        answer.cancel()
        assert read(answer)[-1].finish_reason is FinishReason.CANCELLED
    finally:
        script.mute.set()


def test_pictures_go_to_a_model_that_sees(backend: OllamaBackend, script: Script) -> None:
    backend.load("tiny:latest", lambda what, share: None)
    with pytest.raises(RequestError, match="tiny:latest reads text only"):
        backend.see_picture(b"\x89PNG")
    script.abilities.append("vision")
    backend.load("tiny:latest", lambda what, share: None)
    assert backend.see_picture(b"\x89PNG") is None
    script.lines = [{"message": {"content": "A fox"}, **LAST}]
    parts = [{"type": "image", "data": b"\x89PNG"}, {"type": "text", "text": "What is it?"}]
    read(backend.submit(AnswerRequest(messages=[{"role": "user", "content": parts}])))
    assert script.asked[-1]["messages"] == [{"role": "user", "content": "What is it?", "images": ["iVBORw=="]}]


def test_a_tools_result_goes_with_the_tools_name(backend: OllamaBackend, script: Script) -> None:
    backend.load("tiny:latest", lambda what, share: None)
    script.lines = [{"message": {"content": "Sunny"}, **LAST}]
    calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    messages = [
        *HI,
        {"role": "assistant", "content": "", "thinking": "Look.", "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "tool_call_id": "call_1", "content": "20 degrees"},
    ]
    read(backend.submit(AnswerRequest(messages=messages)))
    assert script.asked[-1]["messages"] == messages


def test_a_line_of_another_shape_ends_the_answer(backend: OllamaBackend, script: Script) -> None:
    backend.load("tiny:latest", lambda what, share: None)
    script.lines = [{"message": {"tool_calls": [{"name": "oops"}]}}]
    last = read(backend.submit(asked()))[-1]
    assert last.error is not None
    assert "does not follow its protocol" in last.error


def test_a_model_is_saved_at_the_server(backend: OllamaBackend, script: Script) -> None:
    backend.load("tiny:latest", lambda what, share: None)
    backend.save("tiny:latest", Modelfile(parameters={"temperature": 0.1}, messages=HI))
    assert script.asked[-1] == {
        "model": "tiny:latest",
        "from": "tiny:latest",
        "stream": False,
        "parameters": {"temperature": 0.1},
        "messages": [{"role": "user", "content": "Hi"}],
    }


def test_models_and_addresses(backend: OllamaBackend) -> None:
    (choice,) = backend.models(None)
    assert (choice.name, choice.size, choice.quantization, choice.loaded) == ("tiny:latest", 7, "Q8_0", True)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # no server listens there
        with pytest.raises(RemoteError, match="cannot be reached"):
            OllamaBackend(OllamaServer(f"127.0.0.1:{silent.getsockname()[1]}")).models(None)
    with pytest.raises(RemoteError, match="not a server's address"):
        OllamaServer("ftp://host")


@pytest.mark.parametrize("costs", [{"parts": 1}, ["text"], "text"])
def test_costs_of_another_form_are_an_error_to_show(backend: OllamaBackend, script: Script, costs: object) -> None:
    script.costs = costs
    backend.load("tiny:latest", lambda _what, _share: None)
    with pytest.raises(RemoteError, match="does not show its engine"):
        backend.laboratory()
