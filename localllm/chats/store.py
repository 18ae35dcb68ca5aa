"""Sessions, their messages and tags in the database."""

import json
import random
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from localllm.answer.tool_calls import ToolCall
from localllm.chats.database import (
    PATIENT_S,
    SessionError,
    UnwritableError,
    be_patient,
    connect,
    explained,
    in_memory,
    synced,
)
from localllm.chats.records import PASTED, Attachment, Message, Role, SessionSummary
from localllm.errors import RequestError
from localllm.text import shortened

# How long a deletion can be undone; the first start after that removes the session.
UNDO_S = 7 * 24 * 3600
RETRY_S = 1.0  # between attempts to save pending changes
HISTORY = 500
TITLE_CHARS = 60

Statement = tuple[str, Sequence[Any]]


class SessionStore:
    """All sessions of one file. Not thread-safe; every method raises SessionError.

    Changes are on disk when a method returns and survive a power cut. If the disk is full or the file cannot be
    written, the store continues in memory, `unsaved` holds the reason, and pending changes are written once writing
    works again.
    """

    def __init__(self, file: Path, *, must_save: bool = True) -> None:
        """must_save: raise if the file cannot be written, instead of starting in memory."""
        self.file = file
        self.unsaved = ""
        self.on_saving: Callable[[str], None] = lambda _unsaved: None  # called when `unsaved` changes
        self._pending: list[Statement] = []
        self._retry_at = 0.0
        self._disk: sqlite3.Connection | None = None  # while _db is in memory
        try:
            self._db = connect(file)
        except UnwritableError as error:
            if must_save:
                raise
            self.unsaved = str(error)
            with self._explained():
                self._db = in_memory(file)
        try:
            self._write(("DELETE FROM session WHERE deleted < ?", (time.time() - UNDO_S,)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Write pending changes if possible, and close the file. Idempotent."""
        if self.unsaved:
            if self._disk is not None:
                be_patient(self._disk, PATIENT_S)
            self._save_pending()
        for db in (self._db, self._disk):
            if db is not None:
                db.close()

    def create(self, model: str, parameters: dict[str, Any]) -> int:
        """Create a session and return its id."""
        now, identity = time.time(), self._new_id("session")
        columns = "id, title, model, parameters, created, updated"
        values = (identity, "New chat", model, json.dumps(parameters), now, now)
        self._write((f"INSERT INTO session ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values))
        return identity

    def sessions(self, search: str = "", limit: int = 500, tags: Sequence[str] = ()) -> list[SessionSummary]:
        """Sessions with messages and all the given tags, newest first. `search` matches titles and messages,
        case-insensitively.
        """
        folded = search.casefold()
        tagged = "AND EXISTS (SELECT 1 FROM tag WHERE session_id = session.id AND name = ?)" * len(tags)
        rows = self._rows(
            f"""
            {_SUMMARY} WHERE deleted IS NULL AND leaf IS NOT NULL AND (has(title, ?) OR EXISTS (
                SELECT 1 FROM message WHERE session_id = session.id AND has(content, ?))) {tagged}
            ORDER BY updated DESC LIMIT ?
            """,
            (folded, folded, *tags, limit),
        )
        with self._explained():
            found = [_summary(row) for row in rows]
        return [replace(session, found=self._first_with(folded, session.id)) for session in found] if search else found

    def _first_with(self, folded: str, session_id: int) -> str:
        sql = "SELECT content FROM message WHERE session_id = ? AND has(content, ?) ORDER BY id LIMIT 1"
        rows = self._rows(sql, (session_id, folded))
        return str(rows[0]["content"]) if rows else ""

    def tag(self, session_id: int, name: str) -> None:
        """Add a tag to a session, if it does not have it."""
        self._write(("INSERT OR IGNORE INTO tag VALUES (?, ?)", (session_id, name)))

    def untag(self, session_id: int, name: str) -> None:
        """Remove a tag from a session."""
        self._write(("DELETE FROM tag WHERE session_id = ? AND name = ?", (session_id, name)))

    def tags(self) -> list[tuple[str, int]]:
        """All tags in use, with the number of sessions that have each."""
        sql = (
            "SELECT name, count(*) FROM tag JOIN session ON session.id = session_id WHERE deleted IS NULL GROUP BY name"
        )
        return [(str(name), int(count)) for name, count in self._rows(sql)]

    def knows(self, session_id: int) -> bool:
        """Whether there is such a session."""
        return bool(self._rows("SELECT 1 FROM session WHERE id = ?", (session_id,)))

    def foreign_changes(self) -> int:
        """A number that changes when another program changes the file."""
        (row,) = self._rows("PRAGMA data_version")
        return int(row["data_version"])

    def summary(self, session_id: int) -> SessionSummary:
        """One session, with its parameters."""
        rows = self._rows(f"{_SUMMARY} WHERE id = ?", (session_id,))
        with self._explained():
            return replace(_summary(rows[0]), parameters=dict(json.loads(rows[0]["parameters"])))

    def rename(self, session_id: int, title: str) -> None:
        """Set a session's title; the model no longer generates one."""
        self._write(("UPDATE session SET title = ?, titled = 1 WHERE id = ?", (title, session_id)))

    def set_parameters(self, session_id: int, model: str, parameters: dict[str, Any]) -> None:
        """Store a session's model and parameters."""
        values = (model, json.dumps(parameters), session_id)
        self._write(("UPDATE session SET model = ?, parameters = ? WHERE id = ?", values))

    def delete(self, session_id: int) -> None:
        """Hide a session; `restore` undoes this for UNDO_S."""
        self._write(("UPDATE session SET deleted = ? WHERE id = ?", (time.time(), session_id)))

    def restore(self, session_id: int) -> None:
        """Undo `delete`."""
        self._write(("UPDATE session SET deleted = NULL WHERE id = ?", (session_id,)))

    def add(self, message: Message) -> Message:
        """Store a new message as the end of the shown path, and return it with its id and creation time."""
        now, identity, session = time.time(), self._new_id("message"), message.session_id
        statements = [
            _insertion((identity, session, message.parent_id, message.role, now), message),
            ("UPDATE session SET leaf = ?, updated = ? WHERE id = ?", (identity, now, session)),
        ]
        if message.parent_id is None and message.role is Role.USER:
            title = shorten(_without_pasted(message), TITLE_CHARS, placeholder=" …") or "New chat"
            statements.append(("UPDATE session SET title = ? WHERE id = ? AND NOT titled", (title, session)))
        self._write(*statements)
        message.id, message.created = identity, now
        return message

    def update(self, message: Message, lasting: bool = True) -> None:
        """Store a message's changeable fields. lasting: False does not wait for the disk, so that a power cut may lose
        the change, but no end of the program.
        """
        columns = ", ".join(f"{name} = ?" for name in _CHANGING)
        self._write((f"UPDATE message SET {columns} WHERE id = ?", (*_changing(message), message.id)), lasting=lasting)

    def summarise(self, message: Message) -> None:
        """Store a message's summary, and nothing else of it: another instance may have changed the rest."""
        self._write(("UPDATE message SET summary = ? WHERE id = ?", (message.summary, message.id)))

    def has_changed(self, message: Message) -> bool:
        """Whether another instance has changed a message's text since it was read."""
        rows = self._rows("SELECT content, reasoning FROM message WHERE id = ?", (message.id,))
        return [tuple(row) for row in rows] != [(_writable(message.content), _writable(message.reasoning))]

    def path(self, session_id: int) -> list[Message]:
        """The messages shown, first to last."""
        rows = self._rows(
            """
            WITH RECURSIVE path (id, parent_id, depth) AS (
                SELECT message.id, message.parent_id, 0 FROM message JOIN session ON session.leaf = message.id
                WHERE session.id = ?1
                UNION ALL
                SELECT message.id, message.parent_id, depth + 1 FROM message JOIN path ON message.id = path.parent_id
                LIMIT 1 + (SELECT count(*) FROM message WHERE session_id = ?1)
            )
            SELECT message.* FROM path JOIN message ON message.id = path.id ORDER BY depth DESC
            """,
            (session_id,),
        )
        with self._explained():
            if len({row["id"] for row in rows}) < len(rows):
                raise ValueError("its messages follow each other in a circle")
            return [_message(row) for row in rows]

    def variants(self, message: Message) -> list[int]:
        """Ids of the messages with the same parent and role, including this one, oldest first."""
        rows = self._rows(
            "SELECT id FROM message WHERE session_id = ? AND parent_id IS ? AND role = ? ORDER BY id",
            (message.session_id, message.parent_id, message.role),
        )
        return sorted({message.id, *(row["id"] for row in rows)})

    def select(self, session_id: int, message_id: int) -> None:
        """Show the newest path through a message."""
        rows = self._rows(
            """
            WITH RECURSIVE below (id) AS (
                SELECT ? UNION
                SELECT (SELECT max(message.id) FROM message WHERE message.parent_id = below.id) FROM below
                WHERE EXISTS (SELECT 1 FROM message WHERE message.parent_id = below.id)
            )
            SELECT max(id) AS leaf FROM below
            """,
            (message_id,),
        )
        self.cut(session_id, rows[0]["leaf"])

    def cut(self, session_id: int, message_id: int | None) -> None:
        """End the shown path at this message; None makes it empty. Deletes nothing."""
        self._write(("UPDATE session SET leaf = ? WHERE id = ?", (message_id, session_id)))

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

    def add_session(
        self,
        summary: SessionSummary,
        created: float,
        messages: Sequence[Message],
        shown: int | None,
        lasting: bool = True,
    ) -> int:
        """Store a whole session with its title, model, parameters, tags and times, and return its id.

        messages: parents first, with ids of their own, one of which is `shown`, the last of the shown path. lasting: as
        in `update`.
        """
        session, first = self._new_id("session"), self._new_id("message")
        ids = {message.id: first + place for place, message in enumerate(messages)}
        columns = "id, title, titled, model, parameters, leaf, created, updated"
        parameters, leaf = json.dumps(summary.parameters), None if shown is None else ids[shown]
        values = (session, summary.title, summary.titled, summary.model, parameters, leaf, created, summary.updated)
        statements: list[Statement] = [
            (f"INSERT INTO session ({columns}) VALUES ({', '.join('?' * len(values))})", values),
            *(("INSERT INTO tag VALUES (?, ?)", (session, tag)) for tag in summary.tags),
        ]
        for message in messages:
            parent = None if message.parent_id is None else ids[message.parent_id]
            own = (ids[message.id], session, parent, message.role, message.created)
            statements.append(_insertion(own, message))
        self._write(*statements, lasting=lasting)
        return session

    def all_messages(self, session_id: int) -> list[Message]:
        """The messages of a session with those of other branches, oldest first."""
        rows = self._rows("SELECT * FROM message WHERE session_id = ? ORDER BY id", (session_id,))
        with self._explained():
            return [_message(row) for row in rows]

    def all_texts(self) -> Iterator[list[tuple[int, int | None, str, str]]]:
        """Of each session: id, parent's id, role and content of all messages, oldest first."""
        for session in self._rows("SELECT id FROM session WHERE deleted IS NULL AND leaf IS NOT NULL"):
            sql = "SELECT id, parent_id, role, content FROM message WHERE session_id = ? ORDER BY id"
            yield [(row[0], row[1], row[2], row[3]) for row in self._rows(sql, (session[0],))]

    def remember(self, name: str, value: str, lasting: bool = True) -> None:
        """Store a small value across runs. lasting: as in `update`."""
        self._write(("INSERT OR REPLACE INTO remembered VALUES (?, ?)", (name, value)), lasting=lasting)

    def remembered(self, name: str) -> str | None:
        """The value stored under a name; None if there is none."""
        rows = self._rows("SELECT value FROM remembered WHERE name = ?", (name,))
        return str(rows[0]["value"]) if rows else None

    def remembered_with(self, prefix: str) -> dict[str, str]:
        """The values stored under names with this prefix."""
        rows = self._rows("SELECT name, value FROM remembered WHERE substr(name, 1, ?) = ?", (len(prefix), prefix))
        return {str(row["name"]): str(row["value"]) for row in rows}

    def forget(self, name: str) -> None:
        """Remove the value stored under a name."""
        self._write(("DELETE FROM remembered WHERE name = ?", (name,)))

    def add_prompt(self, text: str) -> None:
        """Add to the prompt history, which keeps the last HISTORY entries."""
        self._write(
            ("INSERT INTO prompt (text) VALUES (?)", (text,)),
            ("DELETE FROM prompt WHERE id NOT IN (SELECT id FROM prompt ORDER BY id DESC LIMIT ?)", (HISTORY,)),
        )

    def prompts(self) -> list[str]:
        """The prompt history, oldest first."""
        return [str(row["text"]) for row in self._rows("SELECT text FROM prompt ORDER BY id")]

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.file)

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._explained():
            return self._db.execute(sql, values).fetchall()

    def _new_id(self, table: str) -> int:
        """An id above all existing ones that does not collide with those that other instances choose at the same time.

        It is the time, or above the last id by chance if the clock was set back.
        """
        (row,) = self._rows(f"SELECT max(id) AS last FROM {table}")
        last, now = row["last"] or 0, time.time_ns() // 1000
        return now if now > last else last + 1 + random.randrange(1 << 20)

    def _write(self, *statements: Statement, lasting: bool = True) -> None:
        """Execute changes in one transaction: on disk, else in memory."""
        clean = [(sql, [_writable(value) for value in values]) for sql, values in statements]
        if self.unsaved and time.monotonic() >= self._retry_at:
            self._save_pending()
        if not self.unsaved:
            try:
                with synced(self._db, lasting):
                    self._transact(self._db, clean)
                return
            except UnwritableError as error:
                with self._explained():
                    self._db, self._disk = in_memory(self._db), self._db
                self._retry_at = time.monotonic() + RETRY_S
                self._say_saving(str(error))
        self._transact(self._db, clean)
        self._pending += clean

    def _save_pending(self) -> None:
        """Write pending changes to disk and switch back to it; on failure, leave them for the next attempt."""
        self._retry_at = time.monotonic() + RETRY_S
        try:
            disk = self._disk = self._disk or connect(self.file)
            self._transact(disk, self._pending)
        except SessionError as error:
            self._say_saving(str(error))
            return
        self._db.close()
        self._db, self._disk = disk, None
        self._pending.clear()
        self._say_saving("")

    def _say_saving(self, unsaved: str) -> None:
        changed, self.unsaved = unsaved != self.unsaved, unsaved
        if changed:
            self.on_saving(unsaved)

    def _transact(self, db: sqlite3.Connection, statements: Sequence[Statement]) -> None:
        with self._explained(), db:
            db.execute("BEGIN IMMEDIATE")
            for sql, values in statements:
                db.execute(sql, values)


_SUMMARY = """
    SELECT id, title, titled, model, parameters, updated,
           (SELECT count(*) FROM message WHERE session_id = session.id) AS messages, deleted,
           (SELECT json_group_array(name) FROM (
               SELECT name FROM tag WHERE session_id = session.id ORDER BY name)) AS tags
    FROM session
"""

# Columns of a message that change while its answer streams, and those of them that are stored as JSON.
_CHANGING = ("content", "reasoning", "finish_reason", "error", "model", "stats", "attachments", "calls", "summary")
_JSON = ("stats", "attachments", "calls")


def _changing(message: Message) -> list[Any]:
    """The values of _CHANGING."""
    values = asdict(message)
    return [json.dumps(values[name]) if name in _JSON else values[name] for name in _CHANGING]


def _insertion(own: tuple[Any, ...], message: Message) -> Statement:
    """Inserts a message. own: id, session_id, parent_id, role and created."""
    columns = "id, session_id, parent_id, role, created, " + ", ".join(_CHANGING)
    values = (*own, *_changing(message))
    return f"INSERT INTO message ({columns}) VALUES ({', '.join('?' * len(values))})", values


def _writable(value: Any) -> Any:
    """Replace lone surrogates in text: file names can contain them, and SQLite rejects them."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _without_pasted(message: Message) -> str:
    """A message's text without the names of pasted texts, unless it has nothing else."""
    words = " ".join(word for word in message.content.split() if not PASTED.fullmatch(word.removeprefix("@")))
    pasted = next((file.label for file in message.attachments if PASTED.fullmatch(file.name)), "")
    return words or pasted.capitalize() or message.content


def _summary(row: sqlite3.Row) -> SessionSummary:
    return SessionSummary(
        id=int(row["id"]),
        title=str(row["title"]),
        model=str(row["model"]),
        updated=float(row["updated"]),
        messages=int(row["messages"]),
        titled=bool(row["titled"]),
        tags=tuple(json.loads(row["tags"])),
        deleted=row["deleted"] is not None,
    )


def _message(row: sqlite3.Row) -> Message:
    """A stored message. Raises ValueError, TypeError or KeyError if it is damaged."""
    values = dict(row)
    values["role"] = Role(values["role"])
    values["stats"] = dict(json.loads(values["stats"]))
    values["attachments"] = tuple(Attachment.stored(file) for file in json.loads(values["attachments"]))
    values["calls"] = tuple(ToolCall(**call) for call in json.loads(values["calls"]))
    message = Message(**values)
    message.check()
    return message


_TAG = re.compile(r"[\w.+-]{1,32}")


def tag_of(word: str) -> str:
    """The tag for a word with or without "#". Raises RequestError if it is not a valid tag."""
    name = word.removeprefix("#").casefold()
    if not _TAG.fullmatch(name) or name.startswith("-"):
        raise RequestError(f"{shortened(word)} is not a valid tag: use letters, digits and _ . + -, at most 32.")
    return name


def change_tags(store: SessionStore, session_id: int, text: str) -> None:
    """Add the tags listed in a text to a session, and remove those with a leading minus. Raises RequestError."""
    words = [(word.startswith("-"), tag_of(word.removeprefix("-"))) for word in text.replace(",", " ").split()]
    has = store.summary(session_id).tags
    for removed, name in words:
        if removed and name not in has:
            raise RequestError(f"This chat has no tag {name}. It has: {', '.join(has) or 'none'}.")
        (store.untag if removed else store.tag)(session_id, name)


def split_search(text: str) -> tuple[str, list[str]]:
    """Split a search into its text and its tags, which are words such as #work."""
    words = text.split()
    tags = [word[1:].casefold() for word in words if len(word) > 1 and word.startswith("#")]
    return (" ".join(word for word in words if not word.startswith("#")), tags) if "#" in text else (text, [])
