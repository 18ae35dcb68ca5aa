"""The chats' SQLite file: recognising and opening it, its schema, and the translation of its errors."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from gguf_io.system import make_folder, read_file, sync_folder
from localllm.errors import LocalLLMError

# Another instance holds the lock for milliseconds; waiting longer would block typing. At the start and the end of the
# program nobody types.
BUSY_S, PATIENT_S = 0.25, 10.0
# In the file's header (https://www.sqlite.org/fileformat.html#application_id), to avoid changing a foreign file.
APPLICATION_ID = int.from_bytes(b"lllm", "big")
_HEADER, _ID_AT = b"SQLite format 3\0", slice(68, 72)
_WRITING = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


# NORMAL may lose the last changes in a power cut, though not if only the program ends.
_SYNCED, _UNSYNCED = "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL"


class SessionError(LocalLLMError):
    """Sessions cannot be read or written. The message names the file."""


class UnwritableError(SessionError):
    """Sessions cannot be written now; stored ones may still be readable."""


def connect(path: Path) -> sqlite3.Connection:
    """Open the database, creating it if needed. Raises SessionError, also for a file that is not a chat database."""
    with explained(path):
        try:
            if not os.path.exists(path):
                make_folder(path.parent)
                path.touch(mode=0o600)
                sync_folder(path.parent)
            new = _is_new(path)
        except OSError as error:
            raise UnwritableError(f"{path}: chats cannot be saved: {error.strerror}.") from error
        db = sqlite3.connect(path, timeout=PATIENT_S, isolation_level=None)
        try:
            if new:
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            _prepare(db)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(_SYNCED)
            migrate(db)
            be_patient(db, BUSY_S)
        except BaseException:
            db.close()
            raise
        return db


def be_patient(db: sqlite3.Connection, seconds: float) -> None:
    """Set how long a change waits for other instances."""
    db.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")


def in_memory(source: sqlite3.Connection | Path) -> sqlite3.Connection:
    """An in-memory copy of a database that cannot be written; empty if it cannot be read either."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    try:
        if isinstance(source, Path):
            # immutable=1 if not even a lock file can be written. Opening a pipe would wait for its writer.
            for mode in ("mode=ro", "immutable=1") if os.path.isfile(source) else ():
                with contextlib.suppress(sqlite3.Error):
                    readable = sqlite3.connect(f"file:{quote(str(source))}?{mode}", uri=True)
                    with contextlib.closing(readable):
                        readable.backup(memory)
                    break
        else:
            source.backup(memory)
        _prepare(memory)
        migrate(memory)
    except BaseException:
        memory.close()
        raise
    return memory


@contextlib.contextmanager
def synced(db: sqlite3.Connection, wanted: bool) -> Iterator[None]:
    """Whether transactions within wait for the disk."""
    if wanted:
        yield
        return
    db.execute(_UNSYNCED)
    try:
        yield
    finally:
        db.execute(_SYNCED)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Convert errors from reading or writing the database to SessionError, or UnwritableError if a write failed."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # the primary result code
        if code in _BUSY:
            raise UnwritableError(f"{path}: chats cannot be saved: another program is writing to it.") from error
        if code in _WRITING:
            raise UnwritableError(f"{path}: chats cannot be saved: {error}. Check the disk and the file.") from error
        raise SessionError(f"{path}: chats cannot be read: {error}. Move the file away to start over.") from error
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise SessionError(f"{path}: a chat is damaged and cannot be read: {error}.") from error


def _prepare(db: sqlite3.Connection) -> None:
    db.text_factory = lambda data: data.decode(errors="replace")  # one damaged byte must not hide a chat
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA foreign_keys = ON")
    db.create_function("has", 2, lambda text, folded: folded in str(text).casefold(), deterministic=True)


def _is_new(path: Path) -> bool:
    """Whether the file is empty. Raises SessionError, before writing anything, if another program made the file."""
    header = read_file(path, 100)
    if not header:
        return True
    if header.startswith(_HEADER) and int.from_bytes(header[_ID_AT], "big") != APPLICATION_ID:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?immutable=1", uri=True)) as db:
            # The first versions wrote files without an id.
            known = db.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('migration', 'session')").fetchone()
        if known[0] == 2:
            return False
    elif header.startswith(_HEADER):
        return False
    raise SessionError(f"{path}: is not a chat database. Name another file (--sessions), or move this one away.")


# The schema as a sequence of migrations: name -> statements. Only ever append.
MIGRATIONS: Mapping[str, Sequence[str]] = {
    # Sessions, each a tree of messages of which one path, ending in `leaf`, is shown.
    "m001_sessions": (
        """
        CREATE TABLE session (
            id INTEGER PRIMARY KEY,
            title TEXT NOT NULL,
            titled INTEGER NOT NULL DEFAULT 0,
            model TEXT NOT NULL,
            parameters TEXT NOT NULL DEFAULT '{}',
            leaf INTEGER,
            created REAL NOT NULL,
            updated REAL NOT NULL,
            deleted REAL
        )
        """,
        """
        CREATE TABLE message (
            id INTEGER PRIMARY KEY,
            session_id INTEGER NOT NULL REFERENCES session (id) ON DELETE CASCADE,
            parent_id INTEGER REFERENCES message (id) ON DELETE CASCADE,
            role TEXT NOT NULL,
            content TEXT NOT NULL,
            reasoning TEXT NOT NULL DEFAULT '',
            finish_reason TEXT,
            error TEXT,
            model TEXT NOT NULL DEFAULT '',
            stats TEXT NOT NULL DEFAULT '{}',
            attachments TEXT NOT NULL DEFAULT '[]',
            created REAL NOT NULL
        )
        """,
        "CREATE INDEX message_session ON message (session_id)",
        "CREATE INDEX message_parent ON message (parent_id)",
        "CREATE INDEX session_updated ON session (updated)",
    ),
    # State kept between runs: the theme, sent prompts.
    "m002_remembered": (
        "CREATE TABLE remembered (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE prompt (id INTEGER PRIMARY KEY, text TEXT NOT NULL)",
    ),
    # Tool calls, separate from an answer's text.
    "m003_tool_calls": ("ALTER TABLE message ADD COLUMN calls TEXT NOT NULL DEFAULT '[]'",),
    # Identifies the file as ours; new files have it from the start.
    "m004_application_id": (f"PRAGMA application_id = {APPLICATION_ID}",),
    # A summary that replaces a message and all before it in requests.
    "m005_summary": ("ALTER TABLE message ADD COLUMN summary TEXT NOT NULL DEFAULT ''",),
    # The user's tags of a session.
    "m006_tags": (
        """
        CREATE TABLE tag (
            session_id INTEGER NOT NULL REFERENCES session (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            PRIMARY KEY (session_id, name)
        ) WITHOUT ROWID
        """,
    ),
}


def migrate(db: sqlite3.Connection) -> None:
    """Apply missing migrations, all or none. Raises SessionError for a database of a newer version."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE IF NOT EXISTS migration (name TEXT PRIMARY KEY)")
        done = {row[0] for row in db.execute("SELECT name FROM migration")}
        unknown = done - MIGRATIONS.keys()
        if unknown:
            raise SessionError(
                f"The chats were written by a newer version of localllm ({min(unknown)}). Update it, or name another "
                "file (--sessions)."
            )
        for name, statements in MIGRATIONS.items():
            if name not in done:
                for statement in statements:
                    db.execute(statement)
                db.execute("INSERT INTO migration VALUES (?)", (name,))
