"""The database's schema, as the list of steps that led to it. Steps are only ever appended."""

import sqlite3
from collections.abc import Callable


def m001_sessions(db: sqlite3.Connection) -> None:
    """Sessions, each a tree of messages of which one path, ending in `leaf`, is shown."""
    db.execute(
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
        """
    )
    db.execute(
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
        """
    )
    db.execute("CREATE INDEX message_session ON message (session_id)")
    db.execute("CREATE INDEX message_parent ON message (parent_id)")
    db.execute("CREATE INDEX session_updated ON session (updated)")


def m002_remembered(db: sqlite3.Connection) -> None:
    """Small things that outlast a run: the theme, prompts that were sent."""
    db.execute("CREATE TABLE remembered (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
    db.execute("CREATE TABLE prompt (id INTEGER PRIMARY KEY, text TEXT NOT NULL)")


def m003_tool_calls(db: sqlite3.Connection) -> None:
    """Calls of tools, apart from what an answer says."""
    db.execute("ALTER TABLE message ADD COLUMN calls TEXT NOT NULL DEFAULT '[]'")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (m001_sessions, m002_remembered, m003_tool_calls)


def migrate(db: sqlite3.Connection) -> list[str]:
    """Apply the steps that this database lacks, all or none, and return their names.

    Raises ValueError where the database has a step that this program does not know.
    """
    with db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE IF NOT EXISTS migration (name TEXT PRIMARY KEY)")
        done = {name for (name,) in db.execute("SELECT name FROM migration")}
        unknown = done - {step.__name__ for step in MIGRATIONS}
        if unknown:
            raise ValueError(f"it was written by a newer version (step {min(unknown)})")
        due = [step for step in MIGRATIONS if step.__name__ not in done]
        for step in due:
            step(db)
            db.execute("INSERT INTO migration VALUES (?)", (step.__name__,))
    return [step.__name__ for step in due]
