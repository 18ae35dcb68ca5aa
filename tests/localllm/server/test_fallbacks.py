"""Names that stand for lists of models."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm.answer.event import AnswerEvent
from localllm.answer.request import AnswerRequest
from localllm.engine.request import Counts, FinishReason, Timings
from localllm.errors import OutOfMemoryError, QueueFullError, SettingsError
from localllm.measure.latency import Slo
from localllm.server.errors import ApiError, ModelNotFoundError
from localllm.server.fallbacks import parse_fallbacks
from localllm.server.metrics import Metrics
from localllm.server.options import ServerOptions
from localllm.server.service import Service
from tests.localllm.server.conftest import MODEL, OTHER, StartServer
from tests.waiting import PATIENCE_S


def test_lists_are_read_from_one_setting() -> None:
    assert parse_fallbacks("") == {}
    assert parse_fallbacks("smart = qwen3:8b, qwen3:0.6b ;quick=a") == {
        "smart": ("qwen3:8b", "qwen3:0.6b"),
        "quick": ("a",),
    }


@pytest.mark.parametrize("text", ["smart", "smart=", "=a", "a=a", "a=b;a=c", "a=b;b=c", "a=../x", f"a={'b,' * 16}c"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^fallbacks: "):
        parse_fallbacks(text)


class Models:
    """Models of which some cannot be leased."""

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
        yield SimpleNamespace(model=SimpleNamespace(name=entry, most_choices=8, prepare=lambda _request: prompt))


def who_answers(models: Models, metrics: Metrics, name: str = "smart") -> str:
    service = Service(ServerOptions(fallbacks={"smart": ("big", "small")}), models, metrics)  # type: ignore[arg-type]

    async def ask() -> str:
        async with service.run(name, [AnswerRequest(prompt="hi")]) as run:
            return run.lease.model.name

    return asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


@pytest.mark.parametrize("why", [ModelNotFoundError("big"), OutOfMemoryError("too big"), QueueFullError("full")])
def test_the_next_model_answers_where_one_cannot(why: Exception) -> None:
    assert who_answers(Models(), Metrics()) == "big"
    assert who_answers(Models(big=why), Metrics()) == "small"
    with pytest.raises(type(why)):
        who_answers(Models(big=why), Metrics(), "big")  # asked for by its own name


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ApiError, match="no chat"):
        who_answers(Models(big=ApiError(400, "no chat")), Metrics())
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


def test_a_server_says_which_model_of_a_list_answered(start_server: StartServer) -> None:
    with (
        start_server(LOCALLLM_FALLBACKS=f"smart=nobody:7b,{MODEL},{OTHER}") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        listed = {row["id"] for row in http.get("/v1/models").json()["data"]}
        assert {"smart", MODEL, OTHER} <= listed and "nobody:7b" not in listed
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
