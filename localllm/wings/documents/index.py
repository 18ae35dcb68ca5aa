"""The index of a folder: its files and their chunks, and how they are kept up to date."""

import json
import math
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from localllm.errors import RequestError
from localllm.extraction import Document, Extractor, UnreadableError, chunks, pages_of, read_file
from localllm.files import unsettled_s, user_path
from localllm.quoting.excerpt import Excerpt
from localllm.walk import MAX_FILES, FoundFile, found_files
from localllm.wings.documents.database import connect, database_errors, index_path
from localllm.wings.documents.words import (
    LEAST_COMMON,
    LEAST_CONTAINED,
    MAX_VARIANTS,
    begin_alike,
    content_words,
    folded,
    query,
    searchable,
    searchable_name,
)

# Called with files done and files in total. An exception ends the update; what was indexed stays.
UpdateProgress = Callable[[int, int], None]

_FILES_AHEAD = 64  # read ahead of writing
_FILES_PER_COMMIT = 200
_KEPT_PROMPTS = 200
_LOCK_S = 600.0


@dataclass(slots=True)
class IndexReport:
    """The result of an update. problems: by file name, why it is missing from the index or incomplete."""

    files: int = 0
    chunks: int = 0
    read: int = 0
    removed: int = 0
    seconds: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)
    too_many: bool = False


@dataclass(frozen=True, slots=True)
class WordMatches:
    """Chunks that have words of a question. scores: of each, best first, 1 for the best.

    coverage: the largest share of the question's words that one of them has, by weight.
    """

    scores: dict[int, float]
    coverage: float


@dataclass(frozen=True, slots=True)
class _Read:
    """The result of reading a file. document: None if its digest is unchanged, or it has a problem.

    lasting: whether a problem remains until the file changes.
    """

    file: FoundFile
    digest: str
    document: Document | None = None
    problem: str = ""
    lasting: bool = True


class DocumentIndex:
    """The index of one folder, in localllm's data folder. Thread-safe. Every method raises DocumentIndexError.

    folder: as given. root: its real path.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create it. Raises RequestError if there is no such folder."""
        self.folder = folder
        self.root = Path(os.path.realpath(user_path(str(folder))))
        if not os.path.isdir(self.root):
            raise RequestError(f"{folder}: there is no such folder. Name one that has documents.")
        self.path = index_path(self.root)
        self._lock = threading.RLock()
        self._db = connect(self.root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._db.close()

    # Keeping up to date.

    def update(self, progress: UpdateProgress | None = None) -> IndexReport:
        """Index new and changed files, and remove missing ones. One process at a time; others wait.

        A file with unchanged size and time is not read; one with an unchanged digest is not split again.
        """
        began = time.monotonic()
        lock = FileLock(f"{self.path}.lock", mode=0o600)
        try:
            with database_errors(self.path), lock.acquire(timeout=_LOCK_S):
                report = self._update(progress)
        except Timeout as error:
            raise RequestError(f"{self.root}: another process has been indexing it for {_LOCK_S:.0f} s.") from error
        report.seconds = time.monotonic() - began
        return report

    def _update(self, progress: UpdateProgress | None) -> IndexReport:
        report = IndexReport()
        known = {row["name"]: row for row in self._rows("SELECT * FROM file")}
        found = list(found_files(self.root))
        if len(found) > MAX_FILES:
            found, report.too_many = found[:MAX_FILES], True
        gone = [known[name]["id"] for name in known.keys() - {file.name for file in found}]
        with self._changes() as db:
            for identity in gone:
                _remove_file(db, identity)
        report.removed = len(gone)
        stamps = {name: (row["size"], row["mtime"]) for name, row in known.items()}
        changed = [file for file in found if stamps.get(file.name) != (file.size, file.mtime)]
        digests = {name: row["digest"] for name, row in known.items()}
        done = len(found) - len(changed)
        read = _read_all(changed, digests)
        while batch := list(islice(read, _FILES_PER_COMMIT)):
            with self._changes() as db:
                for one in batch:
                    _store(db, one)
            report.read += len(batch)
            if progress is not None:
                progress(done + report.read, len(found))
        report.files = len(found)
        report.chunks = self.count_chunks()
        report.problems = {row["name"]: row["problem"] for row in self._rows("SELECT * FROM file WHERE problem <> ''")}
        return report

    # Looking things up.

    def best_words(self, question: str, count: int) -> WordMatches:
        """The chunks that best match the words of a question, or words related to them, by BM25."""
        words = {word: [word, *self._related(folded(word))] for word in content_words(question)}
        sql = "SELECT rowid, -bm25(words, 2.0, 1.0) AS score FROM words WHERE words MATCH ? ORDER BY score DESC, rowid"
        looked_up = query(dict.fromkeys(term for terms in words.values() for term in terms))
        rows = self._rows(f"{sql} LIMIT ?", (looked_up, count)) if looked_up else []
        if not rows:
            return WordMatches({}, 0.0)
        scores = {row["rowid"]: row["score"] / rows[0]["score"] for row in rows}
        return WordMatches(scores, self._coverage([query(terms) for terms in words.values()], [*scores]))

    def _coverage(self, queries: Sequence[str], chunks: Sequence[int]) -> float:
        """The largest share of a question's words in one of these chunks. Rare words count more, as in BM25.

        queries: for each word, of the word and those related to it.
        """
        marks = ", ".join("?" * len(chunks))
        total, found = 0.0, dict.fromkeys(chunks, 0.0)
        size = self.count_chunks()
        for one in queries:
            (have,) = self._rows("SELECT count(*) AS n FROM words WHERE words MATCH ?", (one,))
            weight = math.log(1 + (size - have["n"] + 0.5) / (have["n"] + 0.5))
            total += weight
            for row in self._rows(
                f"SELECT rowid FROM words WHERE words MATCH ? AND rowid IN ({marks})", (one, *chunks)
            ):
                found[row["rowid"]] += weight
        return max(found.values()) / total

    def _related(self, word: str) -> list[str]:
        """Indexed words that begin like a folded one; if it has no such word, those that contain it, or it them."""
        if len(word) < LEAST_COMMON:
            return []
        start = word[:LEAST_COMMON]
        sql = "SELECT term FROM terms WHERE term >= ? AND term < ? ORDER BY doc DESC"
        terms = [row["term"] for row in self._rows(sql, (start, start + "\U0010ffff"))]
        alike = [term for term in terms if begin_alike(word, term)]
        if alike or word in terms or len(word) < LEAST_CONTAINED:
            return alike[:MAX_VARIANTS]
        parts = {word[at:end] for at in range(len(word)) for end in range(at + LEAST_CONTAINED, len(word) + 1)}
        sql = "SELECT term FROM terms WHERE instr(term, ?) OR term IN (SELECT value FROM json_each(?)) LIMIT ?"
        return [row["term"] for row in self._rows(sql, (word, json.dumps(sorted(parts)), MAX_VARIANTS))]

    def count_chunks(self) -> int:
        """Number of chunks."""
        return int(self._rows("SELECT count(*) AS n FROM chunk")[0]["n"])

    def all_chunks(self, most: int) -> list[int]:
        """Ids of the first chunks, in the order in which they were indexed."""
        return [row["id"] for row in self._rows("SELECT id FROM chunk ORDER BY id LIMIT ?", (most,))]

    def excerpts(self, identities: Sequence[int]) -> dict[int, Excerpt]:
        """The chunks with these ids; missing ones are left out."""
        marks = ", ".join("?" * len(identities))
        sql = f"SELECT chunk.*, name FROM chunk JOIN file ON file.id = chunk.file WHERE chunk.id IN ({marks})"
        rows = self._rows(sql, tuple(identities))
        return {row["id"]: Excerpt(row["name"], row["text"], row["line"], row["page"]) for row in rows}

    def textless(self, most: int) -> list[int]:
        """Ids of the first pages without text, in the order in which they were indexed."""
        return [row["id"] for row in self._rows("SELECT id FROM chunk WHERE text = '' ORDER BY id LIMIT ?", (most,))]

    def drawn(self, excerpts: Sequence[Excerpt]) -> tuple[dict[Excerpt, bytes], list[str]]:
        """Pages without text as pictures, without those that show nothing, and why files cannot be drawn."""
        found: dict[Excerpt, bytes] = {}
        problems: list[str] = []
        pages = [each for each in excerpts if each.is_picture]
        for name in dict.fromkeys(each.name for each in pages):
            of_file = {each.page: each for each in pages if each.name == name}
            try:
                data, _ = read_file(self.root / name)
                found |= {of_file[one.page]: one.data for one in pages_of(data, sorted(of_file))}
            except UnreadableError as error:
                problems.append(f"{name}: its pages without text are left out: {error}.")
        return found, problems

    def without_vector(self, model: str, count: int) -> list[tuple[int, str]]:
        """Chunks (id, text) that have text, and no vector of this embedding model."""
        sql = (
            "SELECT id, text FROM chunk WHERE text <> '' AND id NOT IN (SELECT chunk FROM vector WHERE model = ?) "
            "ORDER BY id LIMIT ?"
        )
        return [(row["id"], row["text"]) for row in self._rows(sql, (model, count))]

    def count_without_vector(self, model: str) -> int:
        """How many chunks with text have no vector of this embedding model."""
        sql = (
            "SELECT (SELECT count(*) FROM chunk WHERE text <> '') - (SELECT count(*) FROM vector WHERE model = ?) AS n"
        )
        return int(self._rows(sql, (model,))[0]["n"])

    def add_vectors(self, model: str, rows: Iterable[tuple[int, bytes]]) -> None:
        """Store vectors of chunks, as bytes; those of missing chunks are dropped."""
        with self._changes() as db:
            for chunk, numbers in rows:
                sql = "INSERT OR REPLACE INTO vector SELECT id, ?, ? FROM chunk WHERE id = ?"
                db.execute(sql, (model, numbers, chunk))

    def remove_vectors(self, model: str) -> None:
        """Remove the vectors stored under this key."""
        if self._rows("SELECT 1 FROM vector WHERE model = ? LIMIT 1", (model,)):
            with self._changes() as db:
                db.execute("DELETE FROM vector WHERE model = ?", (model,))

    def vectors(self, model: str) -> tuple[list[int], bytes]:
        """Ids of the chunks that have a vector of this model, and their vectors, concatenated."""
        rows = self._rows("SELECT chunk, numbers FROM vector WHERE model = ? ORDER BY chunk", (model,))
        return [row["chunk"] for row in rows], b"".join(row["numbers"] for row in rows)

    def prompts(self) -> list[list[int]]:
        """The chunks of earlier prompts, in prompt order; newest prompt first."""
        return [json.loads(row["chunks"]) for row in self._rows("SELECT chunks FROM prompt ORDER BY id DESC")]

    def keep_prompt(self, identities: Sequence[int]) -> None:
        """Store a prompt's chunks, in prompt order."""
        with self._changes() as db:
            db.execute("INSERT OR REPLACE INTO prompt (chunks) VALUES (?)", (json.dumps(list(identities)),))
            oldest = "SELECT id FROM prompt ORDER BY id DESC LIMIT ?"
            db.execute(f"DELETE FROM prompt WHERE id NOT IN ({oldest})", (_KEPT_PROMPTS,))

    def _rows(self, sql: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        with database_errors(self.path), self._lock:
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def _changes(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        with database_errors(self.path), self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db


def _read_all(files: Sequence[FoundFile], digests: dict[str, str]) -> Iterator[_Read]:
    """Read files on up to eight threads, and yield the results in order."""
    workers = min(os.cpu_count() or 1, 8)
    local = threading.local()
    extractors: list[Extractor] = []

    def work(file: FoundFile) -> _Read:
        if not hasattr(local, "extractor"):
            local.extractor = Extractor()
            extractors.append(local.extractor)
        return _read(file, digests.get(file.name), local.extractor)

    waiting: deque[Future[_Read]] = deque()
    executor = ThreadPoolExecutor(workers, "documents")
    try:
        for file in files:
            waiting.append(executor.submit(work, file))
            if len(waiting) > _FILES_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)
        for extractor in extractors:
            extractor.close()


def _read(file: FoundFile, known: str | None, extractor: Extractor) -> _Read:
    digest = ""
    try:
        data, digest = read_file(file.path)
        if digest == known:
            return _Read(file, digest)
        return _Read(file, digest, extractor.extract(file.path, data))
    except UnreadableError as error:
        return _Read(file, digest, problem=str(error), lasting=error.lasting)


def _store(db: sqlite3.Connection, one: _Read) -> None:
    """Write a file's row, and its chunks if it was read again."""
    file, document = one.file, one.document
    mtime = file.mtime if one.lasting and not unsettled_s(file.mtime) else -1  # -1: it is read again the next time
    if document is None and not one.problem:
        db.execute("UPDATE file SET size = ?, mtime = ? WHERE name = ?", (file.size, mtime, file.name))
        return
    row = db.execute("SELECT id FROM file WHERE name = ?", (file.name,)).fetchone()
    if row is not None:
        _remove_file(db, row["id"])
    problem = one.problem or (document.cut if document else "")
    values = (file.name, file.size, mtime, "" if one.problem else one.digest, problem)
    identity = db.execute("INSERT INTO file (name, size, mtime, digest, problem) VALUES (?, ?, ?, ?, ?)", values)
    textless = document.without_text if document else ()
    for number, lines in enumerate(document.pages if document else (), 1):
        page = number if document and document.is_paged else 0
        for line, text in [(1, "")] if number in textless else chunks(lines):
            clean = text.encode(errors="replace").decode()  # of lone surrogates, which SQLite refuses
            chunk = (identity.lastrowid, page, line, clean)
            added = db.execute("INSERT INTO chunk (file, page, line, text) VALUES (?, ?, ?, ?)", chunk)
            words = (added.lastrowid, searchable_name(file.name), searchable(clean))
            db.execute("INSERT INTO words (rowid, name, text) VALUES (?, ?, ?)", words)


def _remove_file(db: sqlite3.Connection, file: int) -> None:
    """Remove a file with its chunks and their words; the words table stores no text, so it must be passed again."""
    sql = "SELECT chunk.id, name, text FROM chunk JOIN file ON file.id = chunk.file WHERE file.id = ?"
    for row in db.execute(sql, (file,)).fetchall():
        words = (row["id"], searchable_name(row["name"]), searchable(row["text"]))
        db.execute("INSERT INTO words (words, rowid, name, text) VALUES ('delete', ?, ?, ?)", words)
    db.execute("DELETE FROM file WHERE id = ?", (file,))
