"""Meaning and words together: the weights, what is not embedded yet, and when nothing fits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.settings import Settings
from localllm.wings.documents.embeddings import MeaningSearch, Nearest
from localllm.wings.documents.index import DocumentIndex
from localllm.wings.documents.search import LEAST_FIT, MEANING_WEIGHT, WORDS_WEIGHT, find_excerpts, rank


class Cosines:
    """Stands for MeaningSearch: cosines by file name, for every question."""

    def __init__(self, index: DocumentIndex, cosines: dict[str, float], background: float = 0.1) -> None:
        chunks = index.excerpts(index.all_chunks(100))
        names = {each.name: identity for identity, each in chunks.items()}
        self._found = Nearest({names[name]: value for name, value in cosines.items()}, background)

    def nearest(self, question: str, count: int, others: Any) -> Nearest | None:
        return self._found if self._found.cosines else None


@pytest.fixture
def index(folder: Path) -> Any:
    for number, text in enumerate(("the harbour crane", "the harbour", "an empty page", "another page")):
        (folder / f"{number}.txt").write_text(text)
    with DocumentIndex(folder) as made:
        made.update()
        yield made


def ranked(index: DocumentIndex, question: str, meaning: Any) -> list[str]:
    found = rank(index, question, meaning)
    names = index.excerpts(list(found.scores))
    return [names[identity].name for identity in found.scores]


def test_a_score_is_cosine_and_words_by_their_weights(index: DocumentIndex) -> None:
    meaning: Any = Cosines(index, {"0.txt": 0.3, "1.txt": 0.3, "2.txt": 0.5, "3.txt": 0.2})
    assert ranked(index, "crane", meaning)[0] == "0.txt"  # 0.24 + 0.2 is above 0.4
    assert ranked(index, "crane zeppelin airship balloon", meaning)[0] == "2.txt"  # one word of four says little
    assert ranked(index, "what is it", meaning)[0] == "2.txt"
    found = rank(index, "crane", meaning)
    assert max(found.scores.values()) == pytest.approx(MEANING_WEIGHT * 0.3 + WORDS_WEIGHT)


def test_chunks_without_a_vector_count_as_the_last_with_one(index: DocumentIndex) -> None:
    meaning: Any = Cosines(index, {"2.txt": 0.5, "3.txt": 0.2})
    found = ranked(index, "crane", meaning)
    assert found.index("0.txt") < found.index("3.txt")
    assert found[0] == "2.txt"  # 0.4 is above 0.16 + 0.2


def test_without_vectors_words_decide(index: DocumentIndex) -> None:
    meaning: Any = Cosines(index, {})
    assert ranked(index, "crane", meaning) == ranked(index, "crane", None)
    assert rank(index, "crane", meaning).fits


@pytest.mark.parametrize(("above", "fits"), [(0.01, True), (-0.01, False)])
def test_the_best_must_be_above_texts_about_anything(above: float, fits: bool, index: DocumentIndex) -> None:
    best = 0.4 + (LEAST_FIT + above) / MEANING_WEIGHT
    meaning: Any = Cosines(index, {"2.txt": best, "3.txt": 0.1}, background=0.4)
    assert rank(index, "zeppelins", meaning).fits is fits
    found = find_excerpts(index, "zeppelins", meaning)
    assert found.fits is fits
    assert found.excerpts


class Model:
    """An embedding model for MeaningSearch, whose vectors are of the letters of a text."""

    file = SimpleNamespace(name="letters", size_bytes=1, path=Path("letters.gguf"))
    tokenizer = SimpleNamespace(version=1)

    def embed(self, texts: list[str], *, truncate: bool, dimensions: None) -> tuple[Any, int]:
        rows = np.array([[text.lower().count(letter) + 1e-3 for letter in "abcdefghijkl"] for text in texts])
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), len(texts)


def test_nearest_has_the_best_and_the_asked(index: DocumentIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.wings.documents.embeddings.EmbeddingModel", lambda _path, _settings: Model())
    meaning = MeaningSearch(index, Model.file.path, Settings())
    assert meaning.nearest("crane", 2, ()) is None
    chunks = index.without_vector(meaning.name, 100)
    rows, _ = Model().embed([text for _, text in chunks], truncate=True, dimensions=None)
    vectors = [row.astype(np.float16).tobytes() for row in rows]
    index.add_vectors(meaning.name, zip([identity for identity, _ in chunks], vectors, strict=True))
    every = meaning.nearest("crane", 100, ())
    assert every is not None
    order = list(every.cosines)
    assert list(every.cosines.values()) == sorted(every.cosines.values(), reverse=True)
    found = meaning.nearest("crane", 1, [order[-1], 10**9])
    assert found is not None
    assert found.cosines == {order[0]: every.cosines[order[0]], order[-1]: every.cosines[order[-1]]}
    assert 0 < found.background <= 1
