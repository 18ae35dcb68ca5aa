"""A folder of documents that stays open for questions."""

from collections.abc import Callable
from pathlib import Path

from localllm.quoting.excerpt import Excerpt
from localllm.settings import Settings
from localllm.text import counted
from localllm.wings.documents.answer import problems_in_words
from localllm.wings.documents.embeddings import OFFERED, EmbedProgress, MeaningSearch, find_embedding_model
from localllm.wings.documents.index import DocumentIndex, UpdateProgress
from localllm.wings.documents.search import DOUBT, EXCERPTS, PICTURE_TOKENS, find_excerpts


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

    def excerpts(
        self, question: str, room: int, tokens: Callable[[str], int | None], sees: bool, most: int | None
    ) -> tuple[list[tuple[Excerpt, bytes]], list[str]]:
        """The excerpts for a question, with pictures of pages without text, and warnings for the user.

        room, tokens: as in find_excerpts. sees: whether the model reads pictures. most: of the tokens of each, None if
        that is not limited.
        """
        pictures = (most or PICTURE_TOKENS) if sees else None
        found = find_excerpts(self.index, question, self._meaning, EXCERPTS, room, tokens, pictures)
        drawn, problems = self.index.drawn(found.excerpts)
        shown = [(each, drawn.get(each, b"")) for each in found.excerpts]
        doubts = [] if found.fits or drawn else [DOUBT]
        return [(each, picture) for each, picture in shown if picture or not each.is_picture], [*doubts, *problems]

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

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._meaning is not None:
            self._meaning.close()
        self.index.close()
