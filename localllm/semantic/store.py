"""The stored answers: a SQLite file in the cache folder, which only its user can read."""

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from numpy.typing import NDArray

from gguf_io.system import make_folder
from localllm.errors import LocalLLMError, RequestError
from localllm.semantic.facts import same_facts

APPLICATION_ID = int.from_bytes(b"llsc", "big")
BUSY_S = 10.0
_ENTRY_BYTES = 256  # of a row beside its texts and vector
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, scope TEXT NOT NULL, model TEXT NOT NULL, question TEXT NOT NULL, vector BLOB NOT NULL,
    reasoning TEXT NOT NULL, content TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, created REAL NOT NULL,
    used REAL NOT NULL, hits INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS entry_scope ON entry (scope);
"""


class SemanticCacheError(LocalLLMError):
    """The file of stored answers cannot be used."""


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """A stored answer. scope: a digest of all but the question that the answer depends on. created, used: Unix time."""

    id: int
    model: str
    question: str
    reasoning: str
    content: str
    prompt_tokens: int
    created: float
    used: float
    hits: int
    bytes: int


def store_path() -> Path:
    """The file, e.g. ~/.cache/localllm/semantic.db. It need not exist."""
    return Path(platformdirs.user_cache_dir("localllm", appauthor=False)) / "semantic.db"


class AnswerStore:
    """Stored answers of up to `most_bytes`, each for `ttl_s` seconds. Thread-safe.

    Over the limit, the least recently used are removed.
    """

    def __init__(
        self, path: Path, most_bytes: int, ttl_s: float = float("inf"), clock: Callable[[], float] = time.time
    ) -> None:
        """Open or create the file. Raises SemanticCacheError, and RequestError for a file of another program."""
        self._path, self._most, self._ttl, self._clock = path, most_bytes, ttl_s, clock
        self._lock = threading.Lock()
        with self._errors():
            make_folder(path.parent)
            if not os.path.exists(path):
                path.touch(mode=0o600)
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(path)
            except BaseException:
                self._db.close()
                raise

    def _prepare(self, path: Path) -> None:
        """Make the tables. Raises RequestError for another program's file."""
        # In one statement, since another process may be creating it.
        kind, tables = self._db.execute(
            "SELECT application_id, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id"
        ).fetchone()
        if tables and kind != APPLICATION_ID:
            raise RequestError(f"{path} is another program's file. Move it elsewhere.")
        self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self._db.executescript(_SCHEMA)

    def nearest(
        self, scope: str, question: str, vector: NDArray[np.float32], least: float
    ) -> tuple[CachedAnswer, float] | None:
        """The answer to the nearest question of a scope, and its cosine, if that is at least `least`.

        Questions that differ in a fact are passed over. Counts the hit.
        """
        with self._lock, self._errors():
            self._remove_expired()
            rows = self._db.execute("SELECT id, question, vector FROM entry WHERE scope = ?", (scope,)).fetchall()
            near = [(float(np.frombuffer(row[2], np.float32) @ vector), row[0], row[1]) for row in rows]
            for cosine, number, known in sorted(near, reverse=True):
                if cosine < least:
                    return None
                if same_facts(known, question):
                    self._db.execute("UPDATE entry SET hits = hits + 1, used = ? WHERE id = ?", (self._clock(), number))
                    return self._entries("WHERE id = ?", number)[0], cosine
        return None

    def add(
        self, scope: str, model: str, question: str, vector: NDArray[np.float32], answer: tuple[str, str, int]
    ) -> None:
        """Store an answer: its reasoning, its content and the prompt's tokens. Replaces that to the same question."""
        reasoning, content, tokens = answer
        size = len(json.dumps([question, reasoning, content]).encode()) + vector.nbytes + _ENTRY_BYTES
        if size > self._most:
            return
        now = self._clock()
        with self._lock, self._errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM entry WHERE scope = ? AND question = ?", (scope, question))
            self._db.execute(
                "INSERT INTO entry (scope, model, question, vector, reasoning, content, prompt_tokens,"
                " created, used, bytes)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (scope, model, question, vector.tobytes(), reasoning, content, tokens, now, now, size),
            )
            self._remove_expired()
            while (self._db.execute("SELECT sum(bytes) FROM entry").fetchone()[0] or 0) > self._most:
                self._db.execute("DELETE FROM entry WHERE id = (SELECT id FROM entry ORDER BY used, id LIMIT 1)")

    def entries(self) -> list[CachedAnswer]:
        """All stored answers, the most recently used first."""
        with self._lock, self._errors():
            self._remove_expired()
            return self._entries("ORDER BY used DESC, id DESC")

    def delete(self, number: int | None = None) -> int:
        """Delete an answer, or all; returns how many there were."""
        with self._lock, self._errors():
            where, values = ("", ()) if number is None else (" WHERE id = ?", (number,))
            return self._db.execute(f"DELETE FROM entry{where}", values).rowcount

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _entries(self, which: str, *values: object) -> list[CachedAnswer]:
        names = ", ".join(CachedAnswer.__dataclass_fields__)
        return [CachedAnswer(*row) for row in self._db.execute(f"SELECT {names} FROM entry {which}", values)]

    def _remove_expired(self) -> None:
        """Remove what is too old, and what a clock that was set back would keep for longer."""
        now = self._clock()
        self._db.execute("DELETE FROM entry WHERE created < ? OR created > ?", (now - self._ttl, now + 60))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise SemanticCacheError(
                f"{self._path}: stored answers cannot be used: {error}. Delete the file, or check the disk."
            ) from error
