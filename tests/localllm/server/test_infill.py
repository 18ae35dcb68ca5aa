"""Filling in the middle, with a model whose vocabulary has the tokens for it; images are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.localllm.server.made_models import with_metadata
from tests.waiting import PATIENCE_S, eventually

PREFIX, SUFFIX = "Once upon a time", "the end."
MARKS = {"fim_pre": 400, "fim_suf": 401, "fim_mid": 402}
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
DATA_URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}


@pytest.fixture(scope="module")
def filler(start_server: Any, model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("filler") / "filler.gguf"
    flags = [text for name, token in MARKS.items() for text in ("--special-token-by-id", name, str(token))]
    with_metadata(model_files / "stories260K-Q8_0.gguf", path, *flags)
    with start_server("--model", str(path), models=()) as server:
        yield server


@pytest.fixture(scope="module")
def middle(filler: Any) -> str:
    """What the model writes between the texts: a continuation of the prompt given as tokens."""

    def tokens(text: str) -> list[int]:
        told = httpx.post(
            f"{filler.url}/tokenize", json={"model": "filler", "content": text}, timeout=PATIENCE_S
        ).json()
        return list(told["tokens"])

    prompt = [1, MARKS["fim_pre"], *tokens(PREFIX), MARKS["fim_suf"], *tokens(SUFFIX), MARKS["fim_mid"]]
    body = {"model": "filler", "prompt": prompt, "temperature": 0, "max_tokens": 8}
    text = httpx.post(f"{filler.url}/v1/completions", json=body, timeout=PATIENCE_S).json()["choices"][0]["text"]
    assert text
    return str(text)


def test_suffix_of_both_protocols(filler: Any, middle: str) -> None:
    with ollama.Client(host=filler.url) as client:
        options = {"temperature": 0, "num_predict": 8}
        assert client.generate("filler", PREFIX, suffix=SUFFIX, options=options).response == middle
        streamed = client.generate("filler", PREFIX, suffix=SUFFIX, options=options, stream=True)
        assert "".join(piece.response for piece in streamed) == middle
        assert client.generate("filler", "", suffix=SUFFIX, options=options).done_reason == "length"
        assert "insert" in (client.show("filler").capabilities or [])
    with openai.OpenAI(base_url=f"{filler.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="filler", prompt=PREFIX, suffix=SUFFIX, temperature=0, max_tokens=8)
        assert answer.choices[0].text == middle
        with pytest.raises(openai.BadRequestError, match="a single prompt"):
            client.completions.create(model="filler", prompt=[PREFIX, PREFIX], suffix=SUFFIX)


def test_infill_whole_and_streamed(filler: Any, middle: str) -> None:
    body = {"model": "filler", "input_prefix": PREFIX, "input_suffix": SUFFIX, "temperature": 0, "n_predict": 8}
    whole = httpx.post(f"{filler.url}/infill", json=body, timeout=PATIENCE_S).json()
    assert whole["content"] == middle and whole["stop"] and whole["stop_type"] == "limit"
    stopped = httpx.post(f"{filler.url}/infill", json=body | {"stop": [middle[2:4]]}, timeout=PATIENCE_S).json()
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", middle[2:4])
    banned = httpx.post(
        f"{filler.url}/infill", json=body | {"logit_bias": [[middle, False]]}, timeout=PATIENCE_S
    ).json()
    assert banned["content"] and not set(banned["content"].split()) & set(middle.split())
    lines = httpx.post(f"{filler.url}/infill", json=body | {"stream": True}, timeout=PATIENCE_S).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == middle
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_infill_tells_its_load_and_its_progress(filler: Any) -> None:
    httpx.post(f"{filler.url}/api/generate", json={"model": "filler", "keep_alive": 0}, timeout=PATIENCE_S)
    eventually(lambda: not httpx.get(f"{filler.url}/api/ps", timeout=PATIENCE_S).json()["models"])
    body = {"model": "filler", "input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 2}
    asked = body | {"stream": True, "progress": True}
    lines = httpx.post(f"{filler.url}/infill", json=asked, timeout=PATIENCE_S).text.splitlines()
    told = [json.loads(line.removeprefix("data: ")).get("progress", {}) for line in lines if line]
    assert "phase" in told[0] and any("queue_position" in progress for progress in told)


def test_names_of_the_marks_are_text(filler: Any, middle: str) -> None:
    """A prefix that spells a control token's name must not act as one."""
    body = {"model": "filler", "input_prefix": "</s>" + PREFIX, "temperature": 0, "n_predict": 1}
    told = httpx.post(f"{filler.url}/infill", json=body | {"input_suffix": SUFFIX}, timeout=PATIENCE_S).json()
    plain = httpx.post(
        f"{filler.url}/tokenize", json={"model": "filler", "content": "</s>" + PREFIX}, timeout=PATIENCE_S
    ).json()["tokens"]
    assert 2 not in plain and told["usage"]["prompt_tokens"] > len(plain)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "What is it?", "images": [PICTURE]}]}),
        ("/api/generate", {"prompt": "What is it?", "images": [PICTURE]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [DATA_URL]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [BLOCK]}]}),
    ],
)
def test_pictures_are_refused_with_the_reason(filler: Any, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(filler.url + path, json={"model": "filler", **body}, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert ("does not fetch images" if "http://x" in str(body) else "reads text only") in answer.text
