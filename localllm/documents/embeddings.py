"""Semantic search: vectors of chunks and questions from a local embedding model."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gguf_io import ModelFile, open_model
from gguf_io.pooling import is_reranker
from localllm.documents.index import DocumentIndex
from localllm.errors import LocalLLMError
from localllm.library.entry import LibraryModel
from localllm.library.lookup import find, users_models
from localllm.server.embeddings import EmbeddingModel
from localllm.settings import Settings

OFFERED = "nomic-embed-text"
MANY_CHUNKS = 256  # read from the index at once

# A model's prefixes for questions and for documents, by a part of its name, from the model cards.
_PREFIXES = (
    ("nomic", "search_query: ", "search_document: "),
    ("e5", "query: ", "passage: "),
    ("gemma", "task: search result | query: ", "title: none | text: "),
    ("qwen3", "Instruct: Given a question, retrieve passages that answer it\nQuery:", ""),
    ("bge", "Represent this sentence for searching relevant passages: ", ""),
    ("mxbai", "Represent this sentence for searching relevant passages: ", ""),
    ("arctic", "Represent this sentence for searching relevant passages: ", ""),
)

# Called with chunks done and chunks in total; returning False ends the work, and what was computed stays.
EmbedProgress = Callable[[int, int], bool]


def find_embedding_model(settings: Settings, name: str | None = None) -> LibraryModel | None:
    """The model of that name, or without a name the first embedding model on this machine; None if there is none.

    Raises LibraryError for a name that is not found.
    """
    if name is not None:
        return find(name, settings)
    for model in users_models(settings):
        try:
            with open_model(model.path) as file:
                if f"{file.architecture}.pooling_type" in file.metadata and not is_reranker(file):
                    return model
        except LocalLLMError:  # `localllm list` says what is wrong with it
            continue
    return None


class MeaningSearch:
    """An embedding model and the vectors of one index. For one thread at a time; `close` frees the model."""

    def __init__(self, index: DocumentIndex, path: Path, settings: Settings) -> None:
        """Load the model. Raises what EmbeddingModel raises."""
        self._index = index
        self._model = EmbeddingModel(path, settings)
        self._query, self._document = _prefixes(self._model.file)
        self.name, *former = _keys(self._model.file, self._model.tokenizer.version)
        """The key of this model's vectors in the index."""
        for key in former:
            index.remove_vectors(key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._model.close()

    def embed_new(self, most_s: float, progress: EmbedProgress) -> tuple[int, int, float]:
        """Embed chunks that have no vector yet, for about `most_s` seconds at most.

        Returns the tokens computed, the chunks left, and the seconds taken.
        """
        began, tokens, done = time.monotonic(), 0, 0
        total = self._index.count_without_vector(self.name)
        while chunks := self._index.without_vector(self.name, MANY_CHUNKS):
            chunks.sort(key=lambda chunk: len(chunk[1]))  # texts of similar length batch best
            sizes = [len(text) // 3 + 1 for _, text in chunks]
            for batch in self._model.batches(sizes):
                ids, texts = zip(*chunks[batch], strict=True)
                rows, count = self._rows([self._document + text for text in texts])
                self._index.add_vectors(self.name, zip(ids, map(np.ndarray.tobytes, rows), strict=True))
                tokens += count
                done += len(ids)
                if not progress(done, total) or time.monotonic() - began > most_s:
                    return tokens, total - done, time.monotonic() - began
        return tokens, 0, time.monotonic() - began

    def best(self, question: str, count: int) -> list[int]:
        """Ids of the chunks nearest to a question in meaning, best first, among those with a vector."""
        ids, data = self._index.vectors(self.name)
        if not ids:
            return []
        (query,), _ = self._rows([self._query + question])
        rows = np.frombuffer(data, np.float16).reshape(len(ids), -1)
        scores = rows.astype(np.float32) @ query.astype(np.float32)
        return [ids[place] for place in np.argsort(-scores, kind="stable")[:count]]

    def _rows(self, texts: Sequence[str]) -> tuple[NDArray[np.float16], int]:
        rows, tokens = self._model.embed(texts, truncate=True, dimensions=None)
        return rows.astype(np.float16), tokens


def _prefixes(file: ModelFile) -> tuple[str, str]:
    """What the model expects before questions and before documents."""
    name = f"{file.path.stem}:{file.name}".lower()
    return next(((query, text) for part, query, text in _PREFIXES if part in name), ("", ""))


def _keys(file: ModelFile, tokenizer: int) -> list[str]:
    """The keys under which vectors are stored, which identify the file and the tokenizer's version; newest first."""
    name = f"{file.name}:{file.size_bytes}:{file.path.name}"
    return [f"{name}:tokenizer {version}" if version > 1 else name for version in range(tokenizer, 0, -1)]
