"""Names of fallback lists."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm.answer.event import AnswerEvent
from localllm.answer.request import AnswerRequest
from localllm.engine.request import Counts, FinishReason, Timings
from localllm.errors import OutOfMemoryError, QueueFullError, SettingsError
from localllm.remote.connection import RemoteError
from localllm.server.errors import ApiError, ModelNotFoundError
from localllm.server.fallbacks import parse_fallbacks
from localllm.server.metrics import Metrics
from localllm.server.options import ServerOptions
from localllm.server.service import Service
from localllm.slo import Slo
from tests.fakes.openai_server import ScriptedOpenAI, openai_server
from tests.localllm.server.conftest import MODEL, OTHER, StartServer
from tests.waiting import PATIENCE_S, eventually


def test_lists_are_read_from_one_setting() -> None:
    assert parse_fallbacks("") == {}
    assert parse_fallbacks("smart = qwen3:8b, qwen3:0.6b ;quick=a") == {
        "smart": ("qwen3:8b", "qwen3:0.6b"),
        "quick": ("a",),
    }
    assert parse_fallbacks("a = b, http://10.0.0.2:8000/v1#org/model:8b") == {
        "a": ("b", "http://10.0.0.2:8000/v1#org/model:8b")
    }


@pytest.mark.parametrize(
    "text",
    ["smart", "smart=", "=a", "a=a", "a=b;a=c", "a=b;b=c", "a=../x", f"a={'b,' * 16}c", "a=http://h:1", "a=ftp://h#b"],
)
def test_invalid_lists_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^fallbacks: "):
        parse_fallbacks(text)


class Models:
    """Models, some of which cannot be leased."""

    def __init__(self, **failures: Exception) -> None:
        self.failures = failures

    def find(self, name: str) -> str:
        if isinstance(self.failures.get(name), ModelNotFoundError):
            raise self.failures[name]
        return name

    @contextlib.asynccontextmanager
    async def lease(self, entry: str, _keep_alive_s: Any, _listener: Any) -> AsyncIterator[Any]:
        if entry in self.failures:
            raise self.failures[entry]
        accepted: Future[None] = Future()
        accepted.set_result(None)
        stream = SimpleNamespace(accepted=accepted, cancel=lambda: None)
        prompt = SimpleNamespace(submit=lambda _choice: stream)
        yield SimpleNamespace(name=entry, model=SimpleNamespace(most_choices=8, prepare=lambda _request: prompt))


def who_answers(models: Models, metrics: Metrics, name: str = "smart") -> str:
    service = Service(ServerOptions(fallbacks={"smart": ("big", "small")}), models, metrics)  # type: ignore[arg-type]

    async def ask() -> str:
        async with service.run(name, [AnswerRequest(prompt="hi")]) as run:
            return run.lease.name

    return asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


@pytest.mark.parametrize(
    "why",
    [
        ModelNotFoundError("big"),
        OutOfMemoryError("too big"),
        QueueFullError("full"),
        RemoteError("cannot be reached"),
        RemoteError("busy", 503),
        RemoteError("slow down", 429),
        RemoteError("failed", 502),
    ],
)
def test_the_next_model_answers_where_one_cannot(why: Exception) -> None:
    assert who_answers(Models(), Metrics()) == "big"
    assert who_answers(Models(big=why), Metrics()) == "small"
    with pytest.raises(type(why)):
        who_answers(Models(big=why), Metrics(), "big")  # requested by its own name


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ApiError, match="no chat"):
        who_answers(Models(big=ApiError(400, "no chat")), Metrics())
    with pytest.raises(RemoteError, match="too long"):
        who_answers(Models(big=RemoteError("too long", 400)), Metrics())
    with pytest.raises(OutOfMemoryError, match="both"):
        who_answers(Models(big=QueueFullError("full"), small=OutOfMemoryError("both")), Metrics())


def test_a_model_that_lately_violated_the_slo_comes_last() -> None:
    metrics = Metrics(Slo(ttft=1.0))
    for ttft in (0.5, 2.0, 2.0):
        assert who_answers(Models(), metrics) == "big"
        counts, times = Counts(prompt=1, generated=1), Timings(ttft_s=ttft)
        metrics.meter("big", "").add(AnswerEvent(counts=counts, timings=times, finish_reason=FinishReason.STOP))
    assert who_answers(Models(), metrics) == "small"
    assert who_answers(Models(small=QueueFullError("full")), metrics) == "big"


def test_a_server_that_failed_is_asked_last_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(ServerOptions(fallbacks={"smart": ("big", "small")}), Models(), Metrics())  # type: ignore[arg-type]
    now = 1000.0
    monkeypatch.setattr("localllm.server.service.time.monotonic", lambda: now)
    service.pass_on("big", RemoteError("cannot be reached"))
    assert service.choices("smart") == ["small", "big"]
    now += 31
    assert service.choices("smart") == ["big", "small"]


@pytest.fixture
def far() -> Iterator[ScriptedOpenAI]:
    with openai_server() as server:
        server.says("From afar.")
        yield server


def test_a_remote_server_takes_its_place_in_a_list(start_server: StartServer, far: ScriptedOpenAI) -> None:
    address = far.address.removesuffix("/v1")
    name = f"{address}#tiny"
    lists = f"smart={name},{MODEL}; safe=nobody:7b,{name}"
    with (
        start_server(LOCALLLM_FALLBACKS=lists, LOCALLLM_REMOTE_KEY="theirs") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):

        def ask(model: str) -> httpx.Response:
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            return http.post("/v1/chat/completions", json=body)

        for model in ("smart", "safe", name):
            answer = ask(model).json()
            assert (answer["model"], answer["choices"][0]["message"]["content"]) == (name, "From afar.")
        assert far.asked[-1]["model"] == "tiny" and far.keys[-1] == "Bearer theirs"
        assert ask(f"{address}#other").status_code == 400  # the lists name no such model
        assert {"smart", "safe", MODEL} <= {row["id"] for row in http.get("/v1/models").json()["data"]}
        assert http.post("/api/show", json={"model": "smart"}).status_code == 200

        far.refusal = 400, {"error": {"message": "too many messages"}}
        refused = ask("smart")
        assert refused.status_code == 400 and "too many messages" in refused.text
        far.refusal = 503, {"error": {"message": "maximum pending requests exceeded"}}
        assert ask("smart").json()["model"] == MODEL
        far.refusal = None
        assert ask("smart").json()["model"] == MODEL  # not tried again so soon
        assert ask("safe").json()["model"] == name  # the only one available


def test_another_localllm_answers_until_it_is_gone(start_server: StartServer) -> None:
    with contextlib.ExitStack() as stack:
        behind = stack.enter_context(start_server(models=(OTHER,)))
        name = f"{behind.url}#{OTHER}"
        front = stack.enter_context(start_server(models=(MODEL,), LOCALLLM_FALLBACKS=f"smart={name},{MODEL}"))
        http = stack.enter_context(httpx.Client(base_url=front.url, timeout=PATIENCE_S))
        body = {"model": "smart", "messages": [{"role": "user", "content": "Once"}], "options": {"num_predict": 2}}

        def who() -> str:
            *_, last = http.post("/api/chat", json=body).text.splitlines()
            return str(json.loads(last)["model"])

        assert who() == name
        behind.process.kill()
        behind.process.wait()
        assert who() == MODEL
        eventually(lambda: "cannot answer, so the next model" in front.log.read_text(), "the log says nothing")


def test_a_server_says_which_model_of_a_list_answered(start_server: StartServer) -> None:
    with (
        start_server(LOCALLLM_FALLBACKS=f"smart=nobody:7b,{MODEL},{OTHER}") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        listed = {row["id"] for row in http.get("/v1/models").json()["data"]}
        assert {"smart", MODEL, OTHER} <= listed and "nobody:7b" not in listed
        assert http.get("/v1/models/smart").json()["id"] == "smart"
        assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
        body = {"model": "smart", "prompt": "Once", "max_tokens": 1}
        assert http.post("/v1/completions", json=body).json()["model"] == MODEL
        chat = {"model": "smart", "messages": [{"role": "user", "content": "Once"}], "options": {"num_predict": 2}}
        lines = http.post("/api/chat", json=chat).text.splitlines()
        assert {json.loads(line)["model"] for line in lines} == {MODEL}
        asked = {"model": "smart", "input": "Once", "max_output_tokens": 1}
        assert http.post("/v1/responses", json=asked).json()["model"] == MODEL
        assert f'"model":"{MODEL}"' in http.post("/v1/messages", json=chat | {"max_tokens": 1, "stream": True}).text
        assert http.post("/api/show", json={"model": "smart"}).status_code == 200
        assert http.post("/v1/completions", json=body | {"model": "nobody:7b"}).status_code == 404
