"""Log-probabilities: of prompts (OpenAI's `echo` with `logprobs`, vLLM's `prompt_logprobs`), and on other servers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gguf_io import load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from localllm.answer.request import AnswerRequest
from localllm.remote.connection import Endpoint
from localllm.remote.ollama import OllamaModel, OllamaServer
from localllm.remote.openai import OpenAIServer
from tests.localllm.server.conftest import MODEL, Server, StartServer
from tests.oracle import llama_oracle
from tests.waiting import PATIENCE_S

TEXT = "Once upon a time, there was a little girl named Lily — she loved her 🦊."
CONTEXT = "Once upon a time, there was a little"
CHOICES = (" girl", " named", " tree")


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(model_files: Path) -> Tokenizer:
    with open_model(model_files / f"{MODEL}.gguf") as file:
        return load_tokenizer(file)


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"model": MODEL, "temperature": 0, "max_tokens": 0, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("backend", ["native", "llama"])
def test_sums_are_those_of_llama_cpp(start_server: StartServer, model_files: Path, backend: str) -> None:
    path = model_files / "stories260K-F32.gguf"
    prompts = [llama_oracle.tokenize(path, text) for text in (TEXT, *(CONTEXT + choice for choice in CHOICES))]
    with start_server(models=(path.stem,), LOCALLLM_BACKEND=backend, LOCALLLM_GPU_LAYERS="0") as server:
        body = {"model": path.stem, "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
        found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    assert found["usage"]["completion_tokens"] == 0
    for prompt, choice in zip(prompts, found["choices"], strict=True):
        logits = np.float64(llama_oracle.prefill_logits(path, prompt))
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        own = expected[np.arange(len(prompt) - 1), prompt[1:]]
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None and sum(others) == pytest.approx(own.sum(), rel=2e-3, abs=2e-3)
        assert others == pytest.approx(own.tolist(), abs=0.02)


def test_offsets_are_those_of_the_text(http: httpx.Client) -> None:
    (choice,) = ask(http, prompt=TEXT, echo=True, logprobs=2, max_tokens=3)["choices"]
    logprobs = choice["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1
    assert choice["text"].startswith(f" {TEXT}")  # the space comes from the tokenizer
    assert logprobs["top_logprobs"][0] is None and logprobs["tokens"][0] == "<s>"
    rows = list(zip(logprobs["tokens"], logprobs["text_offset"], logprobs["token_logprobs"], strict=True))[1:]
    assert [offset for _, offset, _ in rows] == sorted(offset for _, offset, _ in rows)
    for (token, offset, value), top in zip(rows, logprobs["top_logprobs"][1:], strict=True):
        if "\ufffd" not in token:
            assert choice["text"][offset : offset + len(token)] == token
            assert top[token] == value
        assert 2 <= len(top) <= 3 or "\ufffd" in top


def test_multiple_choice_as_an_evaluation_reads_it(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """Context and choice as token ids; one token is generated and dropped. The choice is what follows the context."""
    context = tokenizer.encode(CONTEXT)
    wholes = [tokenizer.encode(CONTEXT + choice) for choice in CHOICES]
    assert all(whole[: len(context)] == context for whole in wholes)
    scores, greedy = [], []
    for choice in ask(http, prompt=wholes, echo=True, logprobs=1, max_tokens=1, seed=1)["choices"]:
        logprobs = choice["logprobs"]
        behind = slice(len(context), -1)
        scores.append(sum(logprobs["token_logprobs"][behind]))
        best = (max(top, key=top.get) for top in logprobs["top_logprobs"][behind])
        greedy.append(
            all(token == likeliest for token, likeliest in zip(logprobs["tokens"][behind], best, strict=True))
        )
    assert scores.index(max(scores)) == 0 and greedy == [True, False, False]


def test_what_ends_the_answer_is_in_the_list(http: httpx.Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(CONTEXT)
    eos = tokenizer.eos_id
    for ending in ({"logit_bias": {str(eos): 100}}, {"stop": [" "]}):
        (found,) = ask(http, prompt=prompt, echo=True, logprobs=0, max_tokens=1, **ending)["choices"]
        assert found["finish_reason"] == "stop" and len(found["logprobs"]["tokens"]) == len(prompt) + 1


def test_streamed_as_whole(http: httpx.Client) -> None:
    body = {"prompt": [TEXT, CONTEXT], "echo": True, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 4}
    wholes = ask(http, **body)["choices"]
    texts, scores, by_id = ["", ""], [{}, {}], [[], []]  # type: ignore[var-annotated]
    with http.stream(
        "POST", "/v1/completions", json={"model": MODEL, "temperature": 0, **body, "stream": True}
    ) as lines:
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                index = choice["index"]
                texts[index] += choice["text"]
                by_id[index] += choice.get("prompt_logprobs") or []
                for name, values in (choice["logprobs"] or {}).items():
                    scores[index].setdefault(name, []).extend(values)
    assert texts == [whole["text"] for whole in wholes]
    assert scores == [whole["logprobs"] for whole in wholes]
    assert by_id == [whole["prompt_logprobs"] for whole in wholes]


def test_vllms_form(http: httpx.Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(CONTEXT)
    (choice,) = ask(http, prompt=prompt, prompt_logprobs=2, echo=True, logprobs=0)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, entries, value in zip(prompt[1:], others, choice["logprobs"]["token_logprobs"][1:], strict=True):
        assert entries[str(token)]["logprob"] == value
        assert {1, 2} <= {entry["rank"] for entry in entries.values()} <= {1, 2, None} and len(entries) <= 3
    assert "prompt_logprobs" not in ask(http, prompt=prompt, echo=True)["choices"][0]


@pytest.mark.parametrize("wanted", [0, 3])
def test_a_remote_chat_gets_the_same_in_both_protocols(server: Server, wanted: int) -> None:
    sampling = {"temperature": 0.0, "logprobs": wanted}
    request = AnswerRequest(messages=[{"role": "user", "content": "Hi"}], sampling=sampling, max_tokens=4)
    models = OllamaModel(OllamaServer(server.url), MODEL), OpenAIServer(Endpoint.parse(server.url)).model(MODEL)
    ollamas, openais = (
        [entry for event in model.prepare(request).submit() for entry in event.logprobs] for model in models
    )
    assert ollamas == openais
    assert [len(entry.top) for entry in ollamas] == [wanted] * 4
