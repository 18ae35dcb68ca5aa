"""/v1/rerank on a tiny reranker: shape, order, bounds, refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gguf_io import load_tokenizer, open_model
from gguf_io.tokenizer.pairs import Pairs
from tests.gpu_offload.reranker_files import bert_reranker
from tests.oracle import llama_oracle
from tests.waiting import PATIENCE_S

QUERY = "what is a panda"
DOCUMENTS = ["snow falls", "the panda is a bear", "hi", "a bear eats bamboo"]

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rerankers") / "tiny-reranker.gguf"
    bert_reranker(path)
    return path


@pytest.fixture(scope="module")
def client(start_server: Any, reranker: Path) -> Iterator[httpx.Client]:
    with (
        start_server("--model", str(reranker)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def test_documents_come_back_in_the_order_of_their_scores(client: httpx.Client, reranker: Path) -> None:
    with open_model(reranker) as file:
        framing = Pairs(file.metadata, load_tokenizer(file))
        pairs = [framing.encode(QUERY, document) for document in DOCUMENTS]
    expected = np.concatenate([llama_oracle.pooled(reranker, pair, 1) for pair in pairs])
    body = {"model": "tiny-reranker", "query": QUERY, "documents": DOCUMENTS}
    found = client.post("/v1/rerank", json=body).json()
    assert [result["index"] for result in found["results"]] == list(expected.argsort()[::-1])
    for result in found["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=5e-3)
        assert "document" not in result
    assert found["usage"]["total_tokens"] == sum(map(len, pairs))

    held = client.get("/api/ps").json()["models"]
    assert [model["backend"] for model in held if model["name"].startswith("tiny-reranker")] == ["native"]

    asked = {"query": QUERY, "texts": DOCUMENTS}
    ranked = client.post("/rerank", json=asked | {"model": "tiny-reranker", "top_n": 2, "return_text": True}).json()
    expected_rows = [
        {"index": one["index"], "score": one["relevance_score"], "text": DOCUMENTS[one["index"]]}
        for one in found["results"][:2]
    ]
    assert ranked == expected_rows

    objects = [{"text": document} for document in DOCUMENTS]
    best = client.post("/rerank", json=body | {"documents": objects, "top_n": 1, "return_documents": True}).json()
    (first,) = best["results"]
    assert first == found["results"][0] | {"document": {"text": DOCUMENTS[first["index"]]}}


def test_what_cannot_be_ranked_is_refused_with_what_to_do(client: httpx.Client) -> None:
    body = {"model": "tiny-reranker", "query": QUERY, "documents": DOCUMENTS}
    long = ["panda " * 200]
    for changed, status, said in [
        ({"documents": []}, 400, "documents"),
        ({"documents": ["hi"] * 1025}, 400, "documents"),
        ({"top_n": 0}, 400, "top_n"),
        ({"documents": long}, 400, "the model accepts 96"),
        ({"query": long[0], "truncate": True}, 400, "the query alone has"),
        ({"model": "stories260K-Q8_0"}, 400, "not a reranker"),
        ({"model": "nothing"}, 404, "not found"),
    ]:
        answer = client.post("/v1/rerank", json=body | changed)
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert client.post("/v1/rerank", json=body | {"documents": long, "truncate": True}).status_code == 200
    vectors = client.post("/api/embed", json={"model": "tiny-reranker", "input": "hi"})
    assert (vectors.status_code, "/v1/rerank" in vectors.text) == (400, True)
    assert client.post("/api/show", json={"model": "tiny-reranker"}).json()["capabilities"] == ["reranking"]
