"""The journal of file changes: stores a file's content before it is changed, so that every change can be undone.

It is safe to kill the process at any moment: a change is in the journal before the file is touched, files are replaced
by an atomic rename, and undo checks the file's current content.
"""

import contextlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf_io.system import make_folder, sync_folder
from localllm.actions.action import ToolError
from localllm.actions.folder import Files
from localllm.files import TEMPORARY, usual_mode, write_whole

APPLICATION_ID = int.from_bytes(b"lllj", "big")
KEPT_S = 30 * 24 * 3600
BUSY_S = 5.0


@dataclass(frozen=True, slots=True)
class Change:
    """A file change. before: the previous content, None if there was no file. owner: the chat that made it."""

    id: int
    owner: str
    path: Path
    before: bytes | None
    after: bytes


class Journal:
    """The changes made in one folder. owner: recorded with new changes. Thread-safe; methods raise ToolError."""

    def __init__(self, file: Path, folder: Path, owner: str = "", files: Files | None = None) -> None:
        self.file = file
        self.folder = Path(os.path.realpath(folder))
        self.owner = owner
        self._files = files or Files()

    def content(self, path: Path) -> bytes | None:
        """A file's content; None if there is none."""
        try:
            return self._files.read(path)
        except FileNotFoundError:
            return None

    def write(self, path: Path, before: bytes | None, after: bytes) -> None:
        """Record a file's old and new content in the journal, then write the new one. Creates missing folders.

        Raises ToolError, and changes nothing, if the file's content is not `before` or the journal cannot be written;
        OSError or ToolError if the file cannot be written.
        """
        if self.content(path) != before:
            raise ToolError(f"{path.name}: has changed since the call was shown; nothing was changed.")
        mode = path.stat().st_mode & 0o7777 if os.path.exists(path) else usual_mode()
        temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}.tmp"
        made = [str(parent) for parent in path.parents if not os.path.exists(parent)]
        row = (str(self.folder), self.owner, str(path), before, after, mode, str(temporary), json.dumps(made))
        with self._open() as db:
            db.execute("DELETE FROM change WHERE at < ?", (time.time() - KEPT_S,))
            columns = "folder, owner, path, before, after, mode, temporary, made, at"
            db.execute(f"INSERT INTO change ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, time.time()))
        try:
            for folder in reversed(made):
                Path(folder).mkdir()
            if not self._files.write(path, after):
                write_whole(path, after, mode=mode, temporary=temporary)
        except (OSError, ToolError):
            with self._open() as db:
                db.execute("DELETE FROM change WHERE temporary = ?", (str(temporary),))
            raise

    def newest(self) -> Change | None:
        """The last change in the folder by any owner; None if there is none."""
        with self._open() as db:
            row = db.execute(
                "SELECT id, owner, path, before, after FROM change WHERE folder = ? ORDER BY id DESC LIMIT 1",
                (str(self.folder),),
            ).fetchone()
        return None if row is None else Change(row[0], row[1], Path(row[2]), row[3], row[4])

    def undo(self, change: Change) -> bool:
        """Restore the file's content and mode, and delete the change; False if it had never been applied.

        Raises ToolError, and changes nothing, if the file has been changed since.
        """
        with self._open() as db:
            row = db.execute("SELECT mode, temporary, made FROM change WHERE id = ?", (change.id,)).fetchone()
        if row is None:
            raise ToolError(f"{change.path}: this change was undone already.")
        mode, temporary, made = row[0], Path(row[1]), json.loads(row[2])
        if Path(os.path.realpath(change.path)) != change.path:
            raise ToolError(f"{change.path}: a folder on the way is a link now. Nothing was changed.")
        now = self.content(change.path)
        if now not in (change.before, change.after):
            raise ToolError(f"{change.path}: was changed by something else since. Nothing was changed.")
        try:
            if now != change.before and change.before is not None:
                if not self._files.write(change.path, change.before):
                    write_whole(change.path, change.before, mode=mode, temporary=temporary)
            elif now is not None and change.before is None:
                change.path.unlink()
                sync_folder(change.path.parent)
            temporary.unlink(missing_ok=True)  # left by a process that was killed
            for folder in made:
                with contextlib.suppress(OSError):  # not empty, or never created
                    Path(folder).rmdir()
        except OSError as error:
            raise ToolError(f"{change.path}: cannot be undone: {error.strerror}.") from error
        with self._open() as db:
            db.execute("DELETE FROM change WHERE id = ?", (change.id,))
        return now != change.before

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The database in one transaction, which is on disk when the block exits."""
        try:
            make_folder(self.file.parent)
            self.file.touch(mode=0o600)
            with contextlib.closing(sqlite3.connect(self.file, timeout=BUSY_S, isolation_level=None)) as db:
                db.execute("PRAGMA synchronous = FULL")
                db.execute("BEGIN IMMEDIATE")
                (known,) = db.execute("PRAGMA application_id").fetchone()
                (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if tables and known != APPLICATION_ID:
                    raise ToolError(f"{self.file}: is not localllm's journal of changes. Move it away.")
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(
                    "CREATE TABLE IF NOT EXISTS change (id INTEGER PRIMARY KEY AUTOINCREMENT, folder TEXT NOT NULL, "
                    "owner TEXT NOT NULL, path TEXT NOT NULL, before BLOB, after BLOB NOT NULL, mode INTEGER NOT NULL, "
                    "temporary TEXT NOT NULL, made TEXT NOT NULL, at REAL NOT NULL)"
                )
                yield db
                db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise ToolError(f"{self.file}: changes cannot be journalled: {error}. Nothing was changed.") from error
