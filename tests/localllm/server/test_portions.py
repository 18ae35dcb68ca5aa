"""Embedding many texts, and the loads for it, end when no client waits."""

import asyncio
import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gguf_io.runner_info import AdapterSet
from localllm.server import embeddings
from localllm.server.embeddings import EmbeddingModel, embed_all
from localllm.settings import Settings
from tests.gpu_offload.reranker_files import bert_reranker
from tests.oracle import llama_oracle
from tests.waiting import PATIENCE_S


class FakeEncoder:
    """Takes eight tokens at once; computes when the test lets it. A text's row is its length."""

    max_tokens = 8
    dimensions = 1

    def __init__(self) -> None:
        self.portions: list[list[list[int]]] = []
        self.begun, self.let = threading.Event(), threading.Event()

    def pooled(self, texts: list[list[int]], adapters: AdapterSet) -> Any:
        assert adapters == ()
        self.portions.append(texts)
        self.begun.set()
        assert self.let.wait(PATIENCE_S)
        return np.array([[len(text)] for text in texts], np.float32)

    def close(self) -> None:
        """Nothing to free."""


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> FakeEncoder:
    fake = FakeEncoder()
    monkeypatch.setattr(embeddings, "place_text_encoder", lambda *_: None)
    monkeypatch.setattr(embeddings, "open_text_encoder", lambda *_: (fake, SimpleNamespace(settings=Settings())))
    return fake


def test_texts_are_computed_in_portions_and_come_back_in_order(
    encoder: FakeEncoder, monkeypatch: pytest.MonkeyPatch, model_files: Path
) -> None:
    encoder.let.set()
    ids = [[1] * length for length in (3, 5, 1, 9, 2)]
    with contextlib.closing(EmbeddingModel(model_files / "stories260K-Q8_0.gguf", Settings())) as model:
        rows, tokens = asyncio.run(embed_all(model, ids, truncate=True, dimensions=None))
        assert [len(portion) for portion in encoder.portions] == [2, 1, 1, 1]
        assert rows.tolist() == [[1.0]] * 5 and tokens == 19
        monkeypatch.setattr(model, "_ranks", True)
        monkeypatch.setattr(
            model, "_pairs", SimpleNamespace(encode=lambda query, document: [1] * len(query + document))
        )
        scores, tokens = model.rank("a", ["b" * 7, "c", "dd"], truncate=False)
    assert scores.tolist() == [8, 2, 3] and tokens == 13


def test_who_leaves_ends_the_work_behind_the_portion_that_is_computed(encoder: FakeEncoder, model_files: Path) -> None:
    ended = threading.Event()

    class Watched(EmbeddingModel):
        def embed(self, *arguments: Any, **options: Any) -> Any:
            try:
                return super().embed(*arguments, **options)
            finally:
                ended.set()

    async def leave(model: EmbeddingModel) -> None:
        work = asyncio.create_task(embed_all(model, [[1] * 8] * 5, truncate=True, dimensions=None))
        assert await asyncio.to_thread(encoder.begun.wait, PATIENCE_S)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        encoder.let.set()
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)

    with contextlib.closing(Watched(model_files / "stories260K-Q8_0.gguf", Settings())) as model:
        asyncio.run(leave(model))
    assert len(encoder.portions) == 1


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("kind", ["embedder", "reranker"])
def test_a_load_can_be_stopped(kind: str, model_files: Path, tmp_path: Path) -> None:
    path = model_files / "stories260K-Q8_0.gguf"
    if kind == "reranker":
        path = tmp_path / "reranker.gguf"
        bert_reranker(path)
    told: list[str] = []

    def stop(phase: str, _share: float) -> None:
        told.append(phase)
        raise TimeoutError("nobody waits")

    with pytest.raises(TimeoutError, match="nobody waits"):
        EmbeddingModel(path, Settings(), stop)
    assert told == ["loading weights"]
