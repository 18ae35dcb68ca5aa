"""A folder of documents that stays open for questions."""

from collections.abc import Callable
from pathlib import Path

from localllm.quoting.excerpt import Excerpt
from localllm.settings import Settings
from localllm.text import counted
from localllm.wings.documents.answer import problems_in_words
from localllm.wings.documents.embeddings import OFFERED, EmbedProgress, MeaningSearch, find_embedding_model
from localllm.wings.documents.index import DocumentIndex, UpdateProgress
from localllm.wings.documents.search import DOUBT, find_excerpts


class IndexedFolder:
    """A folder's index, and an embedding model if there is one. For one thread at a time; `close` frees both."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Raises RequestError and what EmbeddingModel raises."""
        self.index = DocumentIndex(folder)
        found = find_embedding_model(settings)
        self._meaning = MeaningSearch(self.index, found.path, settings) if found else None
        self._embedder = found.name if found else ""
        self._unseen = 0  # chunks not embedded yet

    def update(self, indexed: UpdateProgress, embedded: EmbedProgress, most_s: float) -> None:
        """Index what has changed, and embed new chunks for about `most_s` seconds at most; words find the rest."""
        self._report = self.index.update(indexed)
        if self._meaning is not None:
            _, self._unseen, _ = self._meaning.embed_new(most_s, embedded)

    def excerpts(self, question: str, room: int, tokens: Callable[[str], int | None]) -> tuple[list[Excerpt], bool]:
        """The excerpts for a question, and whether they fit it. room, tokens: as in find_excerpts."""
        found = find_excerpts(self.index, question, self._meaning, room=room, tokens=tokens)
        return found.excerpts, found.fits

    def facts(self) -> list[tuple[str, str]]:
        """What was indexed and how it is searched, as names and sentences."""
        report = self._report
        indexed = f"{counted(report.files, 'file')}, {counted(report.chunks, 'chunk')}"
        offer = f"words; `localllm pull {OFFERED}` adds search by meaning"
        facts = [
            ("indexed", f"{indexed}, {report.read} read in {report.seconds:.1f} s"),
            ("found by", f"words, and meaning by {self._embedder}" if self._meaning else offer),
            ("answers", "quote the documents; each quotation is looked up word for word"),
        ]
        if self._unseen:
            facts.append(("later", f"{self._unseen} chunks are found by words only until they are embedded"))
        if problems := problems_in_words(report):
            facts.append(("problems", problems))
        return facts

    @property
    def doubt(self) -> str:
        """What to tell the user about excerpts that hardly fit a question."""
        return DOUBT

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._meaning is not None:
            self._meaning.close()
        self.index.close()
