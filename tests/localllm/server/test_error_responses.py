"""Error responses: the status, what was wrong and what would be right."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm.answer.event import AnswerEvent
from localllm.engine.request import FinishReason
from localllm.errors import OutOfMemoryError, RequestError
from localllm.library.behaviour import Behaviour
from localllm.library.entry import LibraryModel, Source
from localllm.server.app import error_body_at
from localllm.server.catalog import CatalogEntry
from localllm.server.errors import ApiError, status_of
from localllm.server.json_body import parse_json
from localllm.server.keys import Key
from localllm.server.models_manager import ModelManager
from localllm.server.options import ServerOptions
from localllm.server.security import Gate
from localllm.server.service import check_ending
from tests.localllm.server.conftest import MODEL, Server
from tests.waiting import PATIENCE_S

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/generate", {"think": "banana"}, "think: Input should be a valid boolean"),
        ("/api/generate", {"think": "banana"}, "or 'low', 'medium', 'high', 'max'"),
        ("/api/generate", {"keep_alive": [1]}, "keep_alive: Input should be a valid number or a valid string"),
        ("/api/generate", {"name": 5, "model": None}, "name: Input should be a valid string"),
        ("/api/generate", None, "missing request body"),
        ("/api/generate", [], "the body must be a JSON object"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        (
            "/v1/chat/completions",
            {"messages": [*HI, {"role": "user", "content": ["x"]}]},
            "messages.1.content.0: Input should be a valid dictionary",
        ),
        ("/v1/chat/completions", {"messages": HI, "stop": 5}, "stop: Input should be a valid string or a valid list"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs: Input should be greater than"),
    ],
)
def test_errors_in_bodies_name_the_place_and_the_reason(http: httpx.Client, path: str, body: Any, words: str) -> None:
    sent = {"model": MODEL, **body} if isinstance(body, dict) else body
    answer = http.post(path, content=b"" if sent is None else json.dumps(sent).encode())
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(("body", "words"), [(b"[" + b"9" * 5000 + b"]", "too many digits"), (b"[NaN]", "NaN is not")])
def test_numbers_that_are_none(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(body)


def test_a_response_whose_conversation_is_too_long_drops_messages_where_truncation_is_auto(http: httpx.Client) -> None:
    words = [{"role": "user", "content": "Once upon a time there was a girl. " * 8} for _ in range(30)]
    body = {"model": MODEL, "input": words, "max_output_tokens": 2}
    assert http.post("/v1/responses", json=body).status_code == 400
    answer = http.post("/v1/responses", json={**body, "truncation": "auto"})
    assert (answer.status_code, answer.json()["truncation"]) == (200, "auto")


@pytest.mark.parametrize(
    ("cause", "status"),
    [(RequestError("the schema"), 400), (OutOfMemoryError("no room"), 503), (None, 500), (ValueError("x"), 500)],
)
def test_whose_fault_a_failed_generation_was(cause: Exception | None, status: int) -> None:
    last = AnswerEvent(finish_reason=FinishReason.ERROR, error=str(cause), cause=cause)
    with pytest.raises((RequestError, OutOfMemoryError, ApiError)) as raised:
        check_ending(last)
    assert status_of(raised.value) == status


@pytest.mark.parametrize(("origin", "told"), [("https://app.example", True), ("https://evil.example", False)])
def test_a_page_that_may_call_can_read_a_refusal(origin: str, told: bool) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    nothing: Any = None
    headers = [(b"host", b"localhost"), (b"origin", origin.encode())]
    scope = {"type": "http", "method": "GET", "path": "/api/tags", "server": ("127.0.0.1", 1), "headers": headers}
    options = ServerOptions(keys=(Key("", "sesame"),), origins=("https://app.example",))
    asyncio.run(Gate(nothing, options, error_body_at)(scope, nothing, send))
    assert sent[0]["status"] == (401 if told else 403)
    assert (dict(sent[0]["headers"]).get(b"access-control-allow-origin") == origin.encode()) == told


class InstantLoader:
    """Loads at once, and records what was closed."""

    def __init__(self) -> None:
        self.closed: list[str | None] = []

    def describe(self, _entry: CatalogEntry) -> dict[str, Any]:
        return {}

    def plan(self, *_: Any) -> Any:
        return SimpleNamespace()

    def load(self, entry: CatalogEntry, *_: Any) -> Any:
        return SimpleNamespace(close=lambda: self.closed.append(entry.behaviour.template))


def test_a_model_that_was_made_anew_takes_the_place_of_the_old_one() -> None:
    loader = InstantLoader()
    model = LibraryModel(("m",), Source.PATH, Path("/m.gguf"))
    old, new = (CatalogEntry("m", model, Behaviour(template=template)) for template in ("old", "new"))

    async def scene() -> None:
        manager = ModelManager(ServerOptions(), loader)
        async with manager.lease(old), manager.lease(new):
            assert not loader.closed
        while len(manager.slots()) > 1:
            await asyncio.sleep(0)
        assert loader.closed == ["old"]
        await manager.close()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    assert loader.closed == ["old", "new"]
