"""`localllm serve --remote` in front of a real foreign server, llama-cpp-python's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import ollama
import openai
import pytest

from tests.fakes.llama_server import llama_server, needs_server
from tests.oracle import llama_oracle
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.oracle, llama_oracle.needs_llama, needs_server]
PROMPT = "Once upon a time"
KEY = "sesame"


@pytest.fixture(scope="module")
def model(model_files: Path) -> Path:
    return model_files / "stories260K-F32.gguf"


@pytest.fixture(scope="module")
def front(model: Path, start_server: Any) -> Iterator[str]:
    with (
        llama_server(model, "stories", KEY) as address,
        start_server("--remote", address, models=(), LOCALLLM_REMOTE_KEY=KEY) as server,
    ):
        yield server.url


def test_a_completion_is_what_the_model_says_here(front: str, model: Path) -> None:
    ids = llama_oracle.tokenize(model, PROMPT)
    expected = llama_oracle.detokenize(model, llama_oracle.greedy(model, ids, 30)).decode()
    options = {"temperature": 0, "repeat_penalty": 1.0, "num_predict": 30}
    with ollama.Client(host=front) as client:
        pieces = list(client.generate("stories", PROMPT, raw=True, options=options, stream=True))
        assert "".join(piece.response for piece in pieces).strip() == expected.strip()
        assert pieces[-1].done_reason == "length"
        assert [row.model for row in client.list().models] == ["stories"]


def test_chats_stream_and_leave_the_server_free(front: str) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a story"}]
    with openai.OpenAI(base_url=f"{front}/v1", api_key="-") as client:
        streamed = client.chat.completions.create(model="stories", messages=messages, max_tokens=12, stream=True)
        assert len([chunk for chunk in streamed if chunk.choices and chunk.choices[0].delta.content]) > 2
        left = client.chat.completions.create(model="stories", messages=messages, max_tokens=400, stream=True)
        next(iter(left))
        left.close()
        # Its one model is free again; otherwise this would wait for 400 tokens.
        done = client.chat.completions.create(model="stories", messages=messages, max_tokens=2)
        assert done.choices[0].finish_reason == "length" and done.usage is not None


def test_its_refusals_come_through(front: str) -> None:
    assert httpx2.get(f"{front}/health", timeout=PATIENCE_S).json()["ready"] is True
    body = {"model": "stories", "prompt": "long " * 900, "stream": False}
    refused = httpx2.post(f"{front}/api/generate", json=body, timeout=PATIENCE_S)
    assert refused.status_code >= 400 and refused.json()["error"]
    asked = {"model": "stories", "messages": [{"role": "user", "content": "Tom"}], "stream": False}
    # It does not know schemas by the protocol's own name.
    schema = httpx2.post(f"{front}/api/chat", json=asked | {"format": {"type": "object"}}, timeout=PATIENCE_S)
    assert schema.status_code == 502 and "'json_object'" in schema.json()["error"]
    plain = httpx2.post(f"{front}/api/chat", json=asked | {"options": {"num_predict": 8}}, timeout=PATIENCE_S)
    assert plain.status_code == 200 and plain.json()["eval_count"] > 0
