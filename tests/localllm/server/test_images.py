"""Images in every protocol: the same bytes give the same answer; URLs are never fetched."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.oracle import llama_oracle
from tests.picture_files import png
from tests.projector_files import write_projector
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

PROMPT, WORDS = "Once upon a time", 40
PICTURE = base64.b64encode(png(1)).decode()
URL = f"data:image/png;base64,{PICTURE}"


@pytest.fixture(scope="module", params=["llama mlp", "native gemma3"])
def server(
    request: pytest.FixtureRequest, start_server: Any, model_files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A model with a projector beside it, which llama.cpp or the native engine computes, and one without."""
    folder = tmp_path_factory.mktemp("seeing")
    shutil.copyfile(model_files / "stories260K-F32.gguf", folder / "seer.gguf")
    backend, kind = request.param.split()
    write_projector(folder / "mmproj-seer.gguf", kind)
    with start_server("--model", str(folder / "seer.gguf"), LOCALLLM_BACKEND=backend, LOCALLLM_CTX="400") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def test_official_clients_get_the_same_answer_about_the_same_image(server: Any) -> None:
    greedy = {"temperature": 0, "num_predict": WORDS}
    with ollama.Client(host=server.url) as client:
        message = {"role": "user", "content": PROMPT, "images": [PICTURE]}
        answer = client.chat("seer", [message], options=greedy)
        plain = client.chat("seer", [{"role": "user", "content": PROMPT}], options=greedy)
        other = client.chat("seer", [message | {"images": [base64.b64encode(png(2)).decode()]}], options=greedy)
        generated = client.generate("seer", PROMPT, images=[PICTURE], options=greedy)
        two = client.chat("seer", [message | {"images": [PICTURE, PICTURE]}], options=greedy)
    text = answer.message.content
    assert text and text not in (plain.message.content, other.message.content)
    taken = answer.prompt_eval_count - plain.prompt_eval_count  # image rows, and the tokens around them
    assert 16 < taken <= 50
    assert two.prompt_eval_count >= answer.prompt_eval_count + taken - 4
    assert (generated.response, generated.context) == (text, None)

    parts = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": PROMPT}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(
            model="seer", messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=WORDS
        )
        items = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": PROMPT}]
        response = client.responses.create(
            model="seer", input=[{"role": "user", "content": items}], temperature=0, max_output_tokens=WORDS
        )
    assert chat.choices[0].message.content == text
    assert chat.usage.prompt_tokens_details.cached_tokens > 16
    assert response.output_text == text

    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": PROMPT}]
        said = client.messages.create(
            model="seer",
            messages=[{"role": "user", "content": blocks}],
            max_tokens=WORDS,
            extra_body={"temperature": 0},
        )
    assert said.content[0].text == text


def test_invalid_pictures_are_refused(client: httpx.Client) -> None:
    def chat(url: object, role: str = "user") -> httpx.Response:
        message = {"role": role, "content": [{"type": "image_url", "image_url": {"url": url}}]}
        return client.post("/v1/chat/completions", json={"model": "seer", "messages": [message], "max_tokens": 1})

    pdf = base64.b64encode(b"%PDF-1.7" + bytes(40)).decode()
    refused = [
        (chat("http://169.254.169.254/latest/meta-data"), "does not fetch images"),
        (chat("file:///etc/passwd"), "does not fetch images"),
        (chat(None), "does not fetch images"),
        (chat("data:image/png,abc"), "data:image/png;base64"),
        (chat("data:image/png;base64,%%%"), "not valid base64"),
        (chat(f"data:image/gif;base64,{pdf}"), "is a PDF"),
    ]
    address = {"type": "url", "url": "http://127.0.0.1:1/a.png"}
    block = [{"role": "user", "content": [{"type": "image", "source": address}]}]
    body = {"model": "seer", "max_tokens": 1, "messages": block}
    refused.append((client.post("/v1/messages", json=body), "does not fetch images"))
    many = {"role": "user", "content": "?", "images": [PICTURE] * 33}
    refused.append((client.post("/api/chat", json={"model": "seer", "messages": [many]}), "at most 32"))
    raw = {"model": "seer", "prompt": "?", "raw": True, "images": [PICTURE]}
    refused.append((client.post("/api/generate", json=raw), "cannot be used with raw"))
    for answer, said in refused:
        assert (answer.status_code, said in answer.text) == (400, True), answer.text
    noted = chat(URL, "system")
    assert noted.status_code == 200 and "Ignored: part of type 'image_url'" in noted.text


def test_vision_capability_is_reported(client: httpx.Client) -> None:
    listed: dict[str, Any] = {"seer": None}
    while None in listed.values():  # a list does not wait long for capabilities; the next one has more
        listed = {model["name"]: model.get("capabilities") for model in client.get("/api/tags").json()["models"]}
    assert listed["seer"] == ["completion", "vision"] and "vision" not in listed["stories260K-Q8_0"]
    shown = client.post("/api/show", json={"model": "seer"}).json()
    assert shown["capabilities"] == ["completion", "vision"]
    assert shown["projector_info"]["clip.has_vision_encoder"] is True


def test_a_missing_projector_is_reported_without_naming_flags(client: httpx.Client) -> None:
    message = {"role": "user", "content": "?", "images": [PICTURE]}
    answer = client.post("/api/chat", json={"model": "stories260K-Q8_0", "messages": [message]})
    assert (answer.status_code, "image" in answer.text, "--" in answer.text) == (400, True, False), answer.text
