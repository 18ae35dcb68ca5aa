"""/api/inspect: a server's engine for the chat's inspector."""

import time
from concurrent.futures import Future

import httpx
import pytest

from localllm.answer.event import Answer
from localllm.answer.request import AnswerRequest
from localllm.engine.inspection import EngineSnapshot, Timeline
from localllm.engine.request import ContextPolicy
from localllm.remote.connection import Endpoint, RemoteError
from localllm.remote.ollama import OllamaServer
from localllm.remote.openai import OpenAIServer
from localllm.wings.lab.laboratory import Reached
from tests.fakes.openai_server import openai_server
from tests.localllm.server.conftest import MODEL, OTHER, Server
from tests.localllm.server.test_infill import PICTURE
from tests.tui.chatting import read
from tests.waiting import PATIENCE_S
from tui.server_backend import OllamaBackend, OpenAIBackend


def seen(asked: "Future[EngineSnapshot] | None") -> EngineSnapshot:
    assert asked is not None
    return asked.result(PATIENCE_S)


@pytest.mark.parametrize("protocol", ["ollama", "openai"])
def test_the_chat_looks_into_a_server_s_engine(server: Server, protocol: str) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        body = {"model": MODEL, "prompt": "Once upon a time there was a " + "very " * 40, "max_tokens": 8}
        assert http.post("/v1/completions", json=body | {"temperature": 0}).status_code == 200
    if protocol == "ollama":
        backend: OllamaBackend | OpenAIBackend = OllamaBackend(OllamaServer(server.url))
    else:
        backend = OpenAIBackend(OpenAIServer(Endpoint.parse(server.url)))
    assert backend.inspect() is None and backend.laboratory() is None  # before a model is chosen
    backend.load(MODEL, lambda _what, _share: None)
    ended: list[Timeline] = []
    deadline = time.monotonic() + PATIENCE_S
    while not ended:  # the answer arrives before its end is recorded; other tests' requests may be there too
        assert time.monotonic() < deadline
        snapshot = seen(backend.inspect())
        ended = [each for each in snapshot.timelines if each.generated == 8]
    done = ended[-1]
    assert done.ended is not None
    assert [span.decodes for span in done.spans][-1] and done.spans[-1].rows >= 1
    assert done.came <= done.spans[0].began <= done.spans[-1].ended <= done.ended <= snapshot.now
    assert snapshot.page_holders.sum() > 0 and snapshot.prefixes and snapshot.pages_total > 0
    laboratory = backend.laboratory()
    assert laboratory is not None
    costs = laboratory.costs
    assert costs.shape.layers == 5
    layers = sum(part.read for part in costs.parts if part.name != "logits")
    assert 0.99 * costs.shape.dense_bytes < layers < costs.shape.dense_bytes  # the last norm belongs to no layer
    assert Reached.by(costs, snapshot).compute is not None
    with httpx.Client(base_url=server.url) as http:
        tokens = http.post("/tokenize", json={"model": MODEL, "content": "Once upon a time"}).json()["tokens"]
    assert backend.count_tokens("Once upon a time") == len(tokens)
    backend.close()


def test_a_server_tells_what_a_prompt_costs(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "Once", "max_tokens": 1}).status_code == 200
        told = http.get("/api/inspect", params={"model": MODEL, "prompt": 1000}).json()
        assert told.keys() == {"seconds", "shared_prefixes"} and all(
            one.keys() == {"tokens", "used"} for one in told["shared_prefixes"]
        )
        assert http.get("/api/inspect", params={"model": MODEL, "prompt": 0}).status_code == 400


def unload(url: object) -> None:
    """Unload the other model, which another test may have loaded."""
    httpx.post(f"{url}/api/generate", json={"model": OTHER, "keep_alive": 0}, timeout=PATIENCE_S).raise_for_status()


def test_a_server_tells_what_a_draft_costs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are those of the answer; a server that lacks the route, or is elsewhere, is not asked again."""
    backend = OllamaBackend(OllamaServer(server.url))
    backend.load(MODEL, lambda _what, _share: None)
    told = [{"role": "user", "content": "Once upon a time a snail went to the sea " + "and on " * 60}]
    for messages in (told, [*told, {"role": "assistant", "content": "It"}, {"role": "user", "content": "Why?"}]):
        request = AnswerRequest(messages=messages, max_tokens=2, context_policy=ContextPolicy.DROP_MESSAGES)
        expected = [backend.expected_counts(request) for _ in range(2)]
        answer = Answer()
        for event in read(backend.submit(request)):
            answer.add(event)
        assert expected[0] == expected[1]
        assert expected[0] is not None
        counts = answer.last.counts
        assert (expected[0].prompt, expected[0].cached) == (counts.prompt, counts.cached)
    assert counts.cached > 100
    too_long = AnswerRequest(messages=[{"role": "user", "content": "word " * 5000}])
    assert backend.expected_counts(too_long) is None and backend.expected_counts(request)
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        unload(str(http.base_url).rstrip("/"))
        other = http.post("/api/cost", json={"model": OTHER, "messages": told})
        assert other.status_code == 404 and "not loaded" in other.json()["error"]
        seen = {"role": "user", "content": "What is it?", "images": [PICTURE]}
        assert http.post("/api/cost", json={"model": MODEL, "messages": [seen]}).status_code == 400
    backend.close()
    monkeypatch.setattr("tui.server_backend.is_local", lambda _host: False)
    elsewhere = OllamaBackend(OllamaServer(server.url))
    elsewhere.load(MODEL, lambda _what, _share: None)
    assert elsewhere.expected_counts(request) is None
    elsewhere.close()


def test_a_server_that_is_not_ours_is_asked_once() -> None:
    with openai_server() as other:
        other.models = [{"id": "tiny"}]
        backend = OpenAIBackend(OpenAIServer(Endpoint.parse(other.address)))
        backend.load("tiny", lambda what, share: None)
        asked = backend.inspect()
        assert asked is not None
        with pytest.raises(RemoteError, match="does not show its engine"):
            asked.result(PATIENCE_S)
        assert backend.inspect() is None
        backend.close()


def test_a_model_that_is_not_loaded_does_not_end_polling(server: Server) -> None:
    unload(server.url)
    backend = OpenAIBackend(OpenAIServer(Endpoint.parse(server.url)))
    backend.load(OTHER, lambda what, share: None)
    for _ in range(2):
        asked = backend.inspect()
        assert asked is not None
        with pytest.raises(RemoteError, match="not loaded"):
            asked.result(PATIENCE_S)
    backend.close()
