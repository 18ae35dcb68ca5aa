"""lm-evaluation-harness: its requests, as its model local-completions sends them, in ten questions."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.localllm.server.conftest import StartServer
from tests.waiting import PATIENCE_S

QUESTIONS = [
    (f"Once upon a time there was a {animal}. The {animal} was very", (" happy", " q%z#"))
    for animal in ("fox", "dog", "cat", "bird", "duck", "bear", "frog", "goat", "fish", "mouse")
]


@pytest.fixture(scope="module")
def http(start_server: StartServer) -> Iterator[httpx.Client]:
    with start_server(models=()) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def encode(http: httpx.Client, text: str) -> list[int]:
    return list(http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"])


def loglikelihood(http: httpx.Client, context: str, choice: str) -> tuple[float, bool]:
    """As lm_eval.models.openai_completions computes it, version 0.4.13."""
    whole, before = encode(http, context + choice), len(encode(http, context))
    body: dict[str, Any] = {"model": "builtin", "prompt": [whole], "temperature": 0, "max_tokens": 1, "logprobs": 1}
    answer = http.post("/v1/completions", json={**body, "seed": 1234, "echo": True})
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["logprobs"]
    values, tops = found["token_logprobs"][before:-1], found["top_logprobs"][before:-1]
    assert len(values) == len(whole) - before
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


def test_the_likelier_choice_is_found_in_ten_questions(http: httpx.Client) -> None:
    for context, choices in QUESTIONS:
        right, wrong = (loglikelihood(http, context, choice) for choice in choices)
        assert right[0] > wrong[0] and not wrong[1], context


def test_the_tokenizer_is_described_as_vllm_does(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] and info["bos_token"] and "chat_template" in info
    assert len(encode(http, info["eos_token"])) == 1
    tokens = encode(http, "Once upon a time")
    counted = http.post("/tokenize", json={"prompt": "Once upon a time"}).json()
    assert counted["tokens"][-len(tokens) :] == tokens and counted["count"] == len(counted["tokens"]) >= len(tokens)
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"].strip() == "Once upon a time"
    assert http.post("/tokenize", json={}).status_code == 400
