"""Vectors and scores of many texts, in portions: who leaves meanwhile leaves no more than one of them behind."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from anyio import to_thread
from numpy.typing import NDArray

from localllm.server.embedding_model import EmbeddingModel
from localllm.server.front.model import ForeignEmbedder

Embedder = EmbeddingModel | ForeignEmbedder
T = TypeVar("T")

# Characters that a token has at least, as a guess: a portion is computed at once or nearly so.
_TOKEN_CHARS = 3


async def embed_all(
    model: Embedder, texts: Sequence[str | Sequence[int]], *, truncate: bool, dimensions: int | None
) -> tuple[NDArray[np.float32], int]:
    """The vectors of texts or token ids, and how many tokens were read; see EmbeddingModel.embed."""

    def work(portion: Sequence[str | Sequence[int]]) -> tuple[NDArray[np.float32], int]:
        tokens: list[Any] = [model.tokenise(text) if isinstance(text, str) else text for text in portion]
        return model.embed(tokens, truncate=truncate, dimensions=dimensions)

    return await _together(work, _portions(model, texts, _tokens))


async def rank_all(
    model: Embedder, query: str, documents: Sequence[str], *, truncate: bool
) -> tuple[NDArray[np.float32], int]:
    """The score of each document, and how many tokens were read; see EmbeddingModel.rank."""

    def work(portion: Sequence[str]) -> tuple[NDArray[np.float32], int]:
        return model.rank(query, portion, truncate=truncate)

    return await _together(work, _portions(model, documents, lambda document: _tokens(query) + _tokens(document)))


async def _together(
    work: Callable[[Sequence[T]], tuple[NDArray[np.float32], int]], portions: Iterator[Sequence[T]]
) -> tuple[NDArray[np.float32], int]:
    """Each portion on another thread; cancelling this ends it behind the one that is being computed."""
    found = [await to_thread.run_sync(work, portion) for portion in portions]
    return np.concatenate([rows for rows, _ in found]), sum(tokens for _, tokens in found)


def _portions(model: Embedder, texts: Sequence[T], size: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """As many texts at once as the model computes together; a server elsewhere gets all of them in one request."""
    if isinstance(model, ForeignEmbedder):
        yield texts
        return
    first, total = 0, 0
    for index, text in enumerate(texts):
        total += min(size(text), model.max_tokens)
        if total > model.max_tokens and index > first:
            yield texts[first:index]
            first, total = index, min(size(text), model.max_tokens)
    yield texts[first:]


def _tokens(text: str | Sequence[int]) -> int:
    """About how many tokens a text has."""
    return len(text) // _TOKEN_CHARS + 1 if isinstance(text, str) else len(text)
