"""Semantic search: vectors of chunks and questions from a local embedding model."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gguf_io import ModelFile, open_model
from gguf_io.pooling import is_reranker
from localllm.errors import LocalLLMError
from localllm.library.entry import LibraryModel
from localllm.library.lookup import find, users_models
from localllm.library.places import Places
from localllm.server.embeddings import EmbeddingModel
from localllm.settings import Settings
from localllm.wings.documents.index import DocumentIndex

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

# Texts about anything, in several languages, which embedding models tell apart: a question is as near to one of these
# as to most texts that do not answer it.
_BACKGROUND = """\
The committee approved the minutes of its last meeting without changes.
She walked along the river until the lights of the town came into view.
The function returns the number of items that match the condition.
Mix the flour with water and let the dough rest for an hour.
The treaty was signed in the spring after long negotiations.
Press the button for three seconds until the lamp blinks.
Light from the star takes eleven years to reach us.
The company's profit fell by four per cent in the third quarter.
Her doctor advised rest and plenty of fluids.
Open the configuration file and set the value to true.
The team scored twice in the last ten minutes of the match.
Trains to the coast leave every half hour from platform two.
Der Ausschuss hat das Protokoll der letzten Sitzung genehmigt.
Den Teig eine Stunde ruhen lassen und dann kneten.
Die Mannschaft schoss in den letzten Minuten zwei Tore.
Züge an die Küste fahren jede halbe Stunde von Gleis zwei.
Le comité a approuvé le procès-verbal de la dernière réunion.
Laisser reposer la pâte pendant une heure.
Les trains pour la côte partent toutes les demi-heures.
El comité aprobó el acta de la última reunión.
El equipo marcó dos goles en los últimos diez minutos.
Il comitato ha approvato il verbale dell'ultima riunione.
A comissão aprovou a ata da última reunião.
De commissie heeft de notulen van de vergadering goedgekeurd.
Комитет утвердил протокол последнего заседания.
委員会は前回の議事録を承認しました。
生地を一時間休ませてください。
委员会批准了上次会议的记录。
把面团放置一个小时。
위원회는 지난 회의록을 승인했습니다.
اعتمدت اللجنة محضر الاجتماع الأخير.
समिति ने पिछली बैठक के कार्यवृत्त को मंज़ूरी दी।
""".splitlines()

# Called with chunks done and chunks in total; returning False ends the work, and what was computed stays.
EmbedProgress = Callable[[int, int], bool]


def find_embedding_model(where: Places, name: str | None = None) -> LibraryModel | None:
    """The model of that name, or without a name the first embedding model on this machine; None if there is none.

    Raises LibraryError for a name that is not found.
    """
    if name is not None:
        return find(name, where)
    for model in users_models(where):
        try:
            with open_model(model.path) as file:
                if f"{file.architecture}.pooling_type" in file.metadata and not is_reranker(file):
                    return model
        except LocalLLMError:  # `localllm list` says what is wrong with it
            continue
    return None


@dataclass(frozen=True, slots=True)
class Nearest:
    """Cosines of chunks with a question. background: the largest cosine that a text about anything has with it."""

    cosines: dict[int, float]
    background: float


class MeaningSearch:
    """An embedding model and the vectors of one index. For one thread at a time; `close` frees the model."""

    def __init__(self, index: DocumentIndex, path: Path, settings: Settings) -> None:
        """Load the model. Raises what EmbeddingModel raises."""
        self._index = index
        self._model = EmbeddingModel(path, settings)
        self._query, self._document = _prefixes(self._model.file)
        self.name, *former = _keys(self._model.file, self._model.tokenizer.version)
        """The key of this model's vectors in the index."""
        self._background: NDArray[np.float16] | None = None
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

    def nearest(self, question: str, count: int, others: Iterable[int]) -> Nearest | None:
        """The chunks nearest to a question in meaning, and `others` if they have a vector; None without any vectors."""
        ids, data = self._index.vectors(self.name)
        if not ids:
            return None
        if self._background is None:
            self._background, _ = self._rows([self._document + text for text in _BACKGROUND])
        (query,), _ = self._rows([self._query + question])
        wanted = query.astype(np.float32)
        scores = np.frombuffer(data, np.float16).reshape(len(ids), -1).astype(np.float32) @ wanted
        kept, others = np.argsort(-scores, kind="stable")[:count], set(others)
        cosines = {ids[place]: float(scores[place]) for place in kept}
        cosines |= {chunk: float(score) for chunk, score in zip(ids, scores, strict=True) if chunk in others}
        return Nearest(cosines, float((self._background.astype(np.float32) @ wanted).max()))

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
