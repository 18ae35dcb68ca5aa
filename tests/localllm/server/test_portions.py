"""Embedding many texts, and the loads for it, end when no client waits."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.server.embeddings import EmbeddingModel, embed_all, rank_all
from localllm.settings import Settings
from tests.gpu_offload.reranker_files import bert_reranker
from tests.oracle import llama_oracle
from tests.waiting import PATIENCE_S


class FakeModel:
    """Takes eight tokens at once, one per letter; computes when the test lets it."""

    max_tokens = 8

    def __init__(self) -> None:
        self.portions: list[list[Any]] = []
        self.begun, self.let = threading.Event(), threading.Event()

    batches = EmbeddingModel.batches

    def embed(self, texts: Any, **_options: Any) -> Any:
        return self._computed(list(texts), [[len(text)] for text in texts], sum(map(len, texts)))

    def rank(self, _query: str, documents: Any, **_options: Any) -> Any:
        return self._computed(list(documents), [len(document) for document in documents], len(documents))

    def _computed(self, portion: list[Any], rows: list[Any], tokens: int) -> Any:
        self.portions.append(portion)
        self.begun.set()
        assert self.let.wait(PATIENCE_S)
        return np.array(rows, np.float32), tokens


def model() -> Any:
    return FakeModel()


def test_texts_are_computed_in_portions_and_come_back_in_order() -> None:
    fake = model()
    fake.let.set()
    ids = [[1] * length for length in (3, 5, 1, 9, 2)]
    rows, tokens = asyncio.run(embed_all(fake, ids, truncate=True, dimensions=None))
    assert [len(portion) for portion in fake.portions] == [2, 1, 1, 1]
    assert rows[:, 0].tolist() == [3, 5, 1, 9, 2] and tokens == 20
    scores, _ = asyncio.run(rank_all(fake, "a", ["b" * 9, "c", "d"], truncate=False))
    assert scores.tolist() == [9, 1, 1]


def test_who_leaves_ends_the_work_behind_the_portion_that_is_computed() -> None:
    fake = model()

    async def leave() -> None:
        work = asyncio.create_task(embed_all(fake, [[1] * 8] * 5, truncate=True, dimensions=None))
        assert await asyncio.to_thread(fake.begun.wait, PATIENCE_S)
        work.cancel()
        await asyncio.sleep(0)
        fake.let.set()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(leave())
    assert len(fake.portions) == 1


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
