"""Embeddings by the official clients, compared with llama.cpp's own."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from gguf_io import load_tokenizer, open_model
from tests.gpu_offload import lora_files
from tests.oracle import llama_oracle
from tests.waiting import PATIENCE_S

MODEL = "stories260K-Q8_0"
# Both round activations to eight bits, in different ways.
ROUNDING = 5e-3
TEXTS = ["Once upon a time", "A dog ran to the park."]

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]


def mean_state(path: Path, text: str) -> Any:
    with open_model(path) as file:
        tokens = load_tokenizer(file).encode(text)
    state = llama_oracle.hidden_states(path, tokens).mean(axis=0)
    return state / np.linalg.norm(state)


def test_vectors_are_llama_cpps(server: Any, model_files: Path) -> None:
    expected = [mean_state(model_files / f"{MODEL}.gguf", text) for text in TEXTS]
    with ollama.Client(host=server.url) as client:
        answer = client.embed(MODEL, TEXTS)
        single = client.embeddings(MODEL, TEXTS[0])
        short = client.embed(MODEL, TEXTS[0], dimensions=8)
        with pytest.raises(ollama.ResponseError, match="dimensions"):
            client.embed(MODEL, TEXTS[0], dimensions=10**6)
        with pytest.raises(ollama.ResponseError, match="tokens"):
            client.embed(MODEL, "word " * 2000, truncate=False)
        assert client.embed(MODEL, "word " * 2000).prompt_eval_count == 512
    np.testing.assert_allclose(answer.embeddings, expected, atol=ROUNDING)
    np.testing.assert_allclose(single.embedding, expected[0], atol=ROUNDING)
    length = np.linalg.norm(expected[0][:8])
    np.testing.assert_allclose(short.embeddings[0], expected[0][:8] / length, atol=ROUNDING / length)
    assert answer.prompt_eval_count and answer.prompt_eval_count > 5


def test_openai_takes_texts_and_tokens_in_two_encodings(server: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
        packed = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="base64")
        tokens = client.embeddings.create(model=MODEL, input=[1, 403, 407, 261, 378], encoding_format="float")
        assert floats.usage.prompt_tokens == packed.usage.prompt_tokens
        first = np.array(floats.data[0].embedding)
        raw: Any = packed.data[0].embedding
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw), "<f4"), first, atol=1e-6)
        np.testing.assert_allclose(tokens.data[0].embedding, first, atol=1e-6)
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=MODEL, input=[10**6])


def test_adapters_change_vectors(start_server: Any, model_files: Path, tmp_path: Path) -> None:
    plain = model_files / "stories260K-F32.gguf"
    made = lora_files.factors(plain, 1)
    lora = lora_files.write(tmp_path / "style.gguf", made)
    other = lora_files.write(tmp_path / "other.gguf", lora_files.factors(plain, 2), "qwen2")
    expected = {
        weight: mean_state(lora_files.merge(plain, tmp_path / f"{weight}.gguf", (made, weight)), TEXTS[0])
        for weight in (0.0, 0.5, 1.0)
    }
    assert np.abs(expected[1.0] - expected[0.0]).max() > 20 * ROUNDING
    name = plain.stem

    def embedded(server: Any, model: str) -> Any:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": model, "input": TEXTS[0]}, timeout=PATIENCE_S)
        return answer.json()["data"][0]["embedding"] if answer.status_code == 200 else answer.text

    with start_server("--lora", f"{lora}:0.5", models=(name,)) as server:
        np.testing.assert_allclose(embedded(server, name), expected[0.5], atol=ROUNDING)
        np.testing.assert_allclose(embedded(server, f"{name}:style"), expected[0.5], atol=ROUNDING)
        for body, weight in (([{"id": 0, "scale": 1.0}], 1.0), ([], 0.0)):
            httpx.post(f"{server.url}/lora-adapters", json=body, params={"model": name}, timeout=PATIENCE_S)
            np.testing.assert_allclose(embedded(server, name), expected[weight], atol=ROUNDING)
    with start_server("--lora", f"{other}:0.5", models=(name,)) as server:
        np.testing.assert_allclose(embedded(server, name), expected[0.0], atol=ROUNDING)
        assert "has no adapters" in embedded(server, f"{name}:other")
