"""The SQLite file: how it is opened, and how its errors reach the user."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from localllm.errors import LocalLLMError
from tui.sessions.migrations import migrate

# Another instance writes for milliseconds; waiting longer would freeze the typing.
BUSY_S = 0.25


class SessionError(LocalLLMError):
    """Sessions cannot be read or written. The message names the file."""


def connect(path: Path) -> sqlite3.Connection:
    """Open the database, in WAL mode and of the newest schema. Raises SessionError."""
    with explained(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
        except OSError as error:
            raise SessionError(f"{path}: sessions cannot be kept: {error.strerror}. Check its permissions.") from error
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA foreign_keys = ON")
            migrate(db)
        except BaseException:
            db.close()
            raise
        return db


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise sqlite3's errors as SessionError."""
    try:
        yield
    except sqlite3.OperationalError as error:
        busy = error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        hint = "Another program holds it; try again." if busy else "Check the disk and the file's permissions."
        raise SessionError(f"{path}: sessions cannot be kept: {error}. {hint}") from error
    except (sqlite3.DatabaseError, ValueError) as error:
        raise SessionError(f"{path}: sessions cannot be read: {error}. Move the file away to begin anew.") from error
