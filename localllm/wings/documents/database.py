"""The SQLite file of a folder's index: where it is, and its schema."""

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from gguf_io.system import make_folder
from localllm.errors import LocalLLMError, RequestError
from localllm.settings import indexes_folder
from localllm.wings.documents.words import searchable, searchable_name

# In the file's header (https://www.sqlite.org/fileformat.html#application_id): files of other programs are not changed.
APPLICATION_ID = int.from_bytes(b"lldx", "big")
VERSION = 3  # of the schema and the chunking; an index of a newer version is rebuilt
_STEMMED = 1  # the version whose words were English stems: its words are indexed again
BUSY_S = 30.0

_SCHEMA = """
    CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE file (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        size INTEGER NOT NULL,
        mtime INTEGER NOT NULL,
        digest TEXT NOT NULL,
        problem TEXT NOT NULL
    );
    CREATE TABLE chunk (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        file INTEGER NOT NULL REFERENCES file (id) ON DELETE CASCADE,
        page INTEGER NOT NULL,
        line INTEGER NOT NULL,
        text TEXT NOT NULL
    );
    CREATE INDEX chunk_file ON chunk (file);
    CREATE TABLE vector (
        chunk INTEGER NOT NULL REFERENCES chunk (id) ON DELETE CASCADE,
        model TEXT NOT NULL,
        numbers BLOB NOT NULL,
        PRIMARY KEY (model, chunk)
    ) WITHOUT ROWID;
    CREATE INDEX vector_chunk ON vector (chunk);
    CREATE TABLE prompt (id INTEGER PRIMARY KEY, chunks TEXT NOT NULL UNIQUE)"""
_WORDS = """
    CREATE VIRTUAL TABLE words USING fts5(name, text, content='', tokenize='unicode61 remove_diacritics 2');
    CREATE VIRTUAL TABLE terms USING fts5vocab(words, row)"""


class DocumentIndexError(LocalLLMError):
    """The index cannot be written or read. The message names its file."""


def index_path(root: Path) -> Path:
    """The path of a folder's index, which is not in the folder."""
    return indexes_folder() / f"{hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}.db"


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Convert errors of SQLite and the disk to DocumentIndexError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise DocumentIndexError(f"{path}: the index of documents cannot be used: {why}. Check the disk.") from error


def connect(root: Path) -> sqlite3.Connection:
    """Open a folder's index, or create it. One that is damaged or of another version is rebuilt.

    Raises DocumentIndexError, and RequestError for a file that is not an index.
    """
    path = index_path(root)
    with database_errors(path):
        make_folder(path.parent)
        db = _opened(path)
        try:
            if not _is_current(db, path):
                db.close()
                for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
                    name.unlink(missing_ok=True)
                db = _opened(path)
            db.execute("PRAGMA journal_mode = WAL")
            with db:
                db.execute("BEGIN IMMEDIATE")  # another process may be creating it too
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0:
                    _make(db, root)
                elif version != VERSION:
                    _upgrade(db, version)
        except BaseException:
            db.close()
            raise
        return db


def _make(db: sqlite3.Connection, root: Path) -> None:
    for statement in f"{_SCHEMA};\n{_WORDS}".split(";\n"):
        db.execute(statement)
    db.execute("INSERT INTO about VALUES ('folder', ?)", (str(root),))
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _upgrade(db: sqlite3.Connection, version: int) -> None:
    """Change an index of an older version: files, chunks and vectors stay.

    PDFs are read again with the next update, since pages without text were left out.
    """
    if version == _STEMMED:
        _index_words_again(db)
    db.execute("UPDATE file SET mtime = -1, digest = '' WHERE name LIKE '%.pdf'")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _index_words_again(db: sqlite3.Connection) -> None:
    db.execute("DROP TABLE words")
    for statement in _WORDS.split(";\n"):
        db.execute(statement)
    for row in db.execute("SELECT chunk.id, name, text FROM chunk JOIN file ON file.id = chunk.file").fetchall():
        words = (row["id"], searchable_name(row["name"]), searchable(row["text"]))
        db.execute("INSERT INTO words (rowid, name, text) VALUES (?, ?, ?)", words)


def _opened(path: Path) -> sqlite3.Connection:
    if not os.path.exists(path):
        path.touch(mode=0o600)
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _is_current(db: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is empty or an index of this version. Raises RequestError for another program's file."""
    try:
        # In one statement, since another process may be creating it.
        kind, version, tables = db.execute(
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
            "FROM pragma_application_id, pragma_user_version"
        ).fetchone()
    except sqlite3.DatabaseError:
        return False  # damaged: rebuilding it only costs time
    if tables and kind != APPLICATION_ID:
        raise RequestError(f"{path}: is not an index of documents. Move it away.")
    return not tables or 0 < version <= VERSION
