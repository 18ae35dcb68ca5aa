"""What a picture costs: budgets of settings, requests and single pictures, and what each protocol tells."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.picture_files import png
from tests.projector_files import write_projector
from tests.waiting import PATIENCE_S

PICTURE = base64.b64encode(png(1)).decode()
URL = f"data:image/png;base64,{PICTURE}"


@pytest.fixture(scope="module")
def client(start_server: Any, model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A model whose pictures fill any budget; the settings' are 20 to 30 tokens."""
    folder = tmp_path_factory.mktemp("seeing")
    shutil.copyfile(model_files / "stories260K-F32.gguf", folder / "seer.gguf")
    write_projector(folder / "mmproj-seer.gguf", "gemma4uv")
    budget = {"LOCALLLM_IMAGE_MIN_TOKENS": "20", "LOCALLLM_IMAGE_MAX_TOKENS": "30"}
    with (
        start_server("--model", str(folder / "seer.gguf"), LOCALLLM_CTX="400", **budget) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = client.post(path, json={"model": "seer", "stream": False, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def ollama(client: httpx.Client, **options: int) -> dict[str, Any]:
    message = {"role": "user", "content": "?", "images": [PICTURE]}
    return post(client, "/api/chat", messages=[message], options={"num_predict": 1, **options})


def openai(client: httpx.Client, detail: str | None = None, **more: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": URL, **({"detail": detail} if detail else {})}}
    return post(client, "/v1/chat/completions", messages=[{"role": "user", "content": [part]}], max_tokens=1, **more)


def responses(client: httpx.Client, detail: str | None = None, **more: Any) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": URL, **({"detail": detail} if detail else {})}
    return post(client, "/v1/responses", input=[{"role": "user", "content": [part]}], max_output_tokens=1, **more)


def anthropic(client: httpx.Client, **more: Any) -> dict[str, Any]:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    return post(client, "/v1/messages", messages=[{"role": "user", "content": [block]}], max_tokens=1, **more)


def rows(answer: dict[str, Any]) -> int:
    """The rows of the only picture, from its size: each is a square of a fixed number of pixels."""
    told = answer.get("pictures") or answer["choices"][0]["pictures"]
    (one,) = told
    assert (one["width"], one["height"], one["tiles"]) == (40, 30, 1)
    return int(one["resized_width"] * one["resized_height"]) // 144


def test_every_protocol_tells_what_was_seen_within_the_settings_budget(client: httpx.Client) -> None:
    for ask in (ollama, openai, responses, anthropic):
        assert 20 <= rows(ask(client)) <= 30


@pytest.mark.parametrize("ask", [ollama, openai, responses, anthropic])
def test_each_request_may_set_a_budget(client: httpx.Client, ask: Any) -> None:
    assert 8 < rows(ask(client, image_max_tokens=12)) <= 12
    assert 60 < rows(ask(client, image_min_tokens=90, image_max_tokens=90)) <= 90


@pytest.mark.parametrize("ask", [openai, responses])
def test_detail_changes_the_budget_of_a_picture(client: httpx.Client, ask: Any) -> None:
    assert 90 < rows(ask(client, "low")) <= 128
    assert 150 < rows(ask(client, "high")) <= 200
    assert rows(ask(client, "auto")) == rows(ask(client)) <= 30


def test_budgets_that_make_no_sense_are_refused(client: httpx.Client) -> None:
    message = {"role": "user", "content": "?", "images": [PICTURE]}
    for options in (
        {"image_max_tokens": 0},
        {"image_max_tokens": "many"},
        {"image_min_tokens": 9, "image_max_tokens": 8},
    ):
        reply = client.post("/api/chat", json={"model": "seer", "messages": [message], "options": options})
        assert reply.status_code == 400, reply.text


def test_pictures_that_do_not_fit_together_are_refused_before_they_are_encoded(client: httpx.Client) -> None:
    message = {"role": "user", "content": "?", "images": [PICTURE] * 5}
    options = {"image_min_tokens": 90, "image_max_tokens": 95}
    reply = client.post("/api/chat", json={"model": "seer", "messages": [message], "options": options})
    assert reply.status_code == 400 and "The 5 images of the last message take" in reply.text
    assert "more than the context of 400. Lower image_max_tokens, or send fewer" in reply.text


def test_a_picture_larger_than_the_context_is_refused_with_its_tokens(client: httpx.Client) -> None:
    message = {"role": "user", "content": "?", "images": [PICTURE]}
    options = {"image_min_tokens": 500, "image_max_tokens": 500}
    reply = client.post("/api/chat", json={"model": "seer", "messages": [message], "options": options})
    assert reply.status_code == 400 and "more than the context of 400. Lower image_max_tokens" in reply.text
