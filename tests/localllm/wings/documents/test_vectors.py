"""Vectors in the index: those of another tokenizer's rules are computed again."""

import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from localllm.settings import Settings
from localllm.wings.documents.embeddings import MeaningSearch
from localllm.wings.documents.index import DocumentIndex
from tests.gguf_files import copying, finish
from tests.gpu_offload.reranker_files import bert_reranker


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A tiny embedding model with word pieces."""
    bert_reranker(tmp_path / "plain.gguf", pooling=False, head=False)
    reader, writer = copying(tmp_path / "plain.gguf", tmp_path / "embedder.gguf")
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    return finish(writer)


def embedded(index: DocumentIndex, path: Path) -> tuple[str, int]:
    """The key of the model's vectors, and how many tokens were computed."""
    with MeaningSearch(index, path, Settings(backend="native")) as meaning:
        tokens, left, _ = meaning.embed_new(math.inf, lambda _done, _total: True)
        assert left == 0
        return meaning.name, tokens


@pytest.mark.parametrize("version", [2, 3])
def test_vectors_of_other_rules_are_computed_again(
    version: int, folder: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DocumentIndex(folder) as index:
        index.update()
        monkeypatch.setattr("gguf_io.tokenizer.tokenizer._VERSIONS", {"bert": version - 1})
        former, _ = embedded(index, encoder)
        ids, data = index.vectors(former)
        index.add_vectors("another model", [(ids[0], b"\0\0")])
        monkeypatch.setattr("gguf_io.tokenizer.tokenizer._VERSIONS", {"bert": version})
        name, tokens = embedded(index, encoder)
        assert name != former
        assert tokens
        assert index.vectors(former) == ([], b"")
        assert index.vectors("another model") == ([ids[0]], b"\0\0")
        again, rows = index.vectors(name)
        assert again == ids
        np.testing.assert_array_equal(np.frombuffer(rows, np.float16), np.frombuffer(data, np.float16))
        assert embedded(index, encoder) == (name, 0)


def test_word_pieces_have_their_own_version(folder: Path, encoder: Path) -> None:
    with DocumentIndex(folder) as index:
        index.update()
        assert embedded(index, encoder)[0].endswith(":tokenizer 2")
