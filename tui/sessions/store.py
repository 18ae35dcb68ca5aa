"""Sessions and their messages in the database."""

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

from localllm.answer.tool_calls import ToolCall
from tui.sessions.database import connect, explained
from tui.sessions.records import Attachment, Message, Role, SessionSummary

# A deletion can be undone for so long; then the next start removes it.
UNDO_S = 7 * 24 * 3600
HISTORY = 500
TITLE_CHARS = 60


class SessionStore:
    """All sessions of one file. One thread; every method raises SessionError. Changes are on disk when it returns."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._db = connect(file)
        with self._explained():
            self._db.execute("DELETE FROM session WHERE deleted < ?", (time.time() - UNDO_S,))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    def create(self, model: str, parameters: dict[str, Any], title: str = "New chat") -> int:
        """Begin a session and return its id."""
        now = time.time()
        return self._insert(
            "INSERT INTO session (title, model, parameters, created, updated) VALUES (?, ?, ?, ?, ?)",
            (title, model, json.dumps(parameters), now, now),
        )

    def sessions(self, search: str = "", limit: int = 500) -> list[SessionSummary]:
        """Sessions with messages, newest first; `search` is looked for in titles and messages."""
        pattern = "%" + search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        rows = self._rows(
            f"""
            {_SUMMARY} WHERE deleted IS NULL AND leaf IS NOT NULL AND (title LIKE ?1 ESCAPE '\\' OR EXISTS (
                SELECT 1 FROM message WHERE session_id = session.id AND content LIKE ?1 ESCAPE '\\'))
            ORDER BY updated DESC LIMIT ?2
            """,
            (pattern, limit),
        )
        return [_summary(row) for row in rows]

    def summary(self, session_id: int) -> SessionSummary:
        """One session."""
        return _summary(self._rows(f"{_SUMMARY} WHERE id = ?", (session_id,))[0])

    def rename(self, session_id: int, title: str) -> None:
        """Give a session a title that is not replaced by one of the model's."""
        self._execute("UPDATE session SET title = ?, titled = 1 WHERE id = ?", (title, session_id))

    def set_parameters(self, session_id: int, model: str, parameters: dict[str, Any]) -> None:
        """Remember by which model and how a session is answered."""
        self._execute(
            "UPDATE session SET model = ?, parameters = ? WHERE id = ?", (model, json.dumps(parameters), session_id)
        )

    def delete(self, session_id: int) -> None:
        """Hide a session; `restore` brings it back for UNDO_S."""
        self._execute("UPDATE session SET deleted = ? WHERE id = ?", (time.time(), session_id))

    def restore(self, session_id: int) -> None:
        """Undo `delete`."""
        self._execute("UPDATE session SET deleted = NULL WHERE id = ?", (session_id,))

    def add(self, message: Message) -> Message:
        """Store a new message as the end of the shown path, and return it with its id and time."""
        now = time.time()
        with self._explained(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            message.id = self._insert(
                """
                INSERT INTO message
                (session_id, parent_id, role, content, reasoning, finish_reason, error, model, stats, attachments,
                 calls, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
                """,
                (message.session_id, message.parent_id, message.role, *_changing(message), now),
            )
            self._db.execute(
                "UPDATE session SET leaf = ?, updated = ? WHERE id = ?", (message.id, now, message.session_id)
            )
            if message.parent_id is None and message.role is Role.USER:
                title = shorten(message.content, TITLE_CHARS, placeholder=" …") or "New chat"
                self._db.execute(
                    "UPDATE session SET title = ? WHERE id = ? AND NOT titled", (title, message.session_id)
                )
        message.created = now
        return message

    def update(self, message: Message) -> None:
        """Store what has changed of a message."""
        self._execute(
            """
            UPDATE message SET content = ?, reasoning = ?, finish_reason = ?, error = ?, model = ?, stats = ?,
            attachments = ?, calls = ? WHERE id = ?
            """,
            (*_changing(message), message.id),
        )

    def path(self, session_id: int) -> list[Message]:
        """The messages shown, first to last."""
        rows = self._rows(
            """
            WITH RECURSIVE path (id, parent_id, depth) AS (
                SELECT message.id, message.parent_id, 0 FROM message JOIN session ON session.leaf = message.id
                WHERE session.id = ?
                UNION ALL
                SELECT message.id, message.parent_id, depth + 1 FROM message JOIN path ON message.id = path.parent_id
            )
            SELECT message.* FROM path JOIN message ON message.id = path.id ORDER BY depth DESC
            """,
            (session_id,),
        )
        return [_message(row) for row in rows]

    def variants(self, message: Message) -> list[int]:
        """Ids of the messages that share its parent, itself included, oldest first."""
        rows = self._rows(
            "SELECT id FROM message WHERE session_id = ? AND parent_id IS ? AND role = ? ORDER BY id",
            (message.session_id, message.parent_id, message.role),
        )
        return [row["id"] for row in rows]

    def select(self, session_id: int, message_id: int) -> None:
        """Show the newest path through a message."""
        rows = self._rows(
            """
            WITH RECURSIVE below (id) AS (
                SELECT ? UNION ALL
                SELECT (SELECT max(message.id) FROM message WHERE message.parent_id = below.id) FROM below
                WHERE EXISTS (SELECT 1 FROM message WHERE message.parent_id = below.id)
            )
            SELECT max(id) AS leaf FROM below
            """,
            (message_id,),
        )
        self.cut(session_id, rows[0]["leaf"])

    def cut(self, session_id: int, message_id: int | None) -> None:
        """Let the shown path end in this message, or be empty. Nothing is lost."""
        self._execute("UPDATE session SET leaf = ? WHERE id = ?", (message_id, session_id))

    def fork(self, session_id: int, message_id: int) -> int:
        """Copy the shown path up to a message into a new session, and return its id."""
        summary = self.summary(session_id)
        copy = self.create(summary.model, summary.parameters)
        parent: int | None = None
        for message in self.path(session_id):
            original = message.id
            message.session_id, message.parent_id = copy, parent
            parent = self.add(message).id
            if original == message_id:
                break
        self.rename(copy, f"{summary.title} (fork)")
        return copy

    def remember(self, name: str, value: str) -> None:
        """Keep a small value across runs."""
        self._execute("INSERT OR REPLACE INTO remembered VALUES (?, ?)", (name, value))

    def remembered(self, name: str) -> str | None:
        """What was kept under a name."""
        rows = self._rows("SELECT value FROM remembered WHERE name = ?", (name,))
        return rows[0]["value"] if rows else None

    def add_prompt(self, text: str) -> None:
        """Add to the history of prompts, of which the last HISTORY are kept."""
        self._execute("INSERT INTO prompt (text) VALUES (?)", (text,))
        self._execute("DELETE FROM prompt WHERE id <= (SELECT max(id) FROM prompt) - ?", (HISTORY,))

    def prompts(self) -> list[str]:
        """The history of prompts, oldest first."""
        return [row["text"] for row in self._rows("SELECT text FROM prompt ORDER BY id")]

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.file)

    def _execute(self, sql: str, values: Sequence[Any]) -> None:
        with self._explained():
            self._db.execute(sql, values)

    def _insert(self, sql: str, values: Sequence[Any]) -> int:
        with self._explained():
            identity = self._db.execute(sql, values).lastrowid
        assert identity is not None  # sqlite3 sets it after every INSERT
        return identity

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._explained():
            cursor = self._db.cursor()
            cursor.row_factory = sqlite3.Row
            return cursor.execute(sql, values).fetchall()


_SUMMARY = """
    SELECT id, title, titled, model, parameters, updated,
           (SELECT count(*) FROM message WHERE session_id = session.id) AS messages
    FROM session
"""


def _summary(row: sqlite3.Row) -> SessionSummary:
    return SessionSummary(
        id=row["id"],
        title=row["title"],
        model=row["model"],
        updated=row["updated"],
        messages=row["messages"],
        parameters=json.loads(row["parameters"]),
        titled=bool(row["titled"]),
    )


def _changing(message: Message) -> tuple[Any, ...]:
    """The columns that change while an answer is written."""
    return (
        message.content,
        message.reasoning,
        message.finish_reason,
        message.error,
        message.model,
        json.dumps(message.stats),
        json.dumps([asdict(file) for file in message.attachments]),
        json.dumps([asdict(call) for call in message.calls]),
    )


def _message(row: sqlite3.Row) -> Message:
    values = dict(row)
    values["role"] = Role(values["role"])
    values["stats"] = json.loads(values["stats"])
    values["attachments"] = tuple(Attachment(**file) for file in json.loads(values["attachments"]))
    values["calls"] = tuple(ToolCall(**call) for call in json.loads(values["calls"]))
    return Message(**values)
