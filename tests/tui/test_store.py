"""The database: two programs at once, newer versions, damaged files, and deleted chats."""

import asyncio
import contextlib
import sqlite3
import time
from pathlib import Path

import pytest

from localllm.chats import Message, Role, SessionStore
from localllm.chats.database import MIGRATIONS, SessionError
from localllm.chats.store import UNDO_S
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.systems import needs_modes
from tests.tui.chatting import answered, loaded, say, until
from tests.tui.conftest import MakeApp


def talk(store: SessionStore, *texts: str) -> int:
    session, parent = store.create("m", {}), None
    for number, text in enumerate(texts):
        role = Role.ASSISTANT if number % 2 else Role.USER
        parent = store.add(Message(0, session, parent, role, text)).id
    return session


def test_a_locked_database_costs_no_text_and_no_chat(make_app: MakeApp, store: SessionStore) -> None:
    other = sqlite3.connect(store.file, isolation_level=None)

    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()])).run_test() as pilot:
            chat = await loaded(pilot)
            other.execute("BEGIN IMMEDIATE")
            await say(pilot, "Precious words")
            assert (await answered(pilot)).content == "One."
            assert "another program is writing" in str(chat.notice.content)
            assert "not saved" in str(chat.status_line.content)
            other.execute("ROLLBACK")
            await until(pilot, lambda: not (store.remember("a", "b"), store.unsaved)[1])
            await until(pilot, lambda: "not saved" not in str(chat.status_line.content))
        with contextlib.closing(SessionStore(store.file)) as again:
            (session,) = again.sessions()
        assert [message.content for message in store.path(session.id)] == ["Precious words", "One."]

    asyncio.run(flow())
    other.close()


def test_two_programs_write_one_file(tmp_path: Path) -> None:
    first, second = SessionStore(tmp_path / "s.db"), SessionStore(tmp_path / "s.db")
    talk(first, "One")
    talk(second, "Two")
    assert sorted(session.title for session in first.sessions()) == ["One", "Two"]
    first.close()
    second.close()


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    SessionStore(tmp_path / "s.db").close()
    db = sqlite3.connect(tmp_path / "s.db")
    db.execute("INSERT INTO migration VALUES ('m999_future')")
    db.commit()
    db.close()
    with pytest.raises(SessionError, match="newer version"):
        SessionStore(tmp_path / "s.db")


def test_a_file_that_is_not_a_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_bytes(b"not a database, but long enough to have a header" * 40)
    with pytest.raises(SessionError, match=r"s\.db: is not a chat database"):
        SessionStore(tmp_path / "s.db")


@needs_modes
def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    SessionStore(tmp_path / "new" / "s.db").close()
    assert (tmp_path / "new" / "s.db").stat().st_mode & 0o077 == 0


def test_a_deleted_chat_goes_after_the_time_for_undo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SessionStore(tmp_path / "s.db")
    session = talk(store, "Question", "Answer")
    store.delete(session)
    store.close()
    store = SessionStore(tmp_path / "s.db")
    store.restore(session)
    assert [message.content for message in store.path(session)] == ["Question", "Answer"]
    store.delete(session)
    store.close()
    now = time.time()
    monkeypatch.setattr("localllm.chats.store.time.time", lambda: now + UNDO_S + 60)
    store = SessionStore(tmp_path / "s.db")
    assert store.path(session) == []
    store.close()


def test_search_takes_wildcards_as_they_are(store: SessionStore) -> None:
    talk(store, "100% sure")
    talk(store, "100 sure")
    assert [session.title for session in store.sessions("0%")] == ["100% sure"]


def test_choosing_a_variant_shows_the_newest_path_below_it(store: SessionStore) -> None:
    session = talk(store, "Question", "First")
    question, first = store.path(session)
    second = store.add(Message(0, session, question.id, Role.ASSISTANT, "Second"))
    later = store.add(Message(0, session, second.id, Role.USER, "Go on"))
    store.select(session, first.id)
    assert [message.content for message in store.path(session)] == ["Question", "First"]
    store.select(session, second.id)
    assert store.path(session)[-1].id == later.id


def test_a_file_of_an_older_version_is_brought_up_to_date(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    db.execute("CREATE TABLE migration (name TEXT PRIMARY KEY)")
    for name in ("m001_sessions", "m002_remembered"):
        for statement in MIGRATIONS[name]:
            db.execute(statement)
        db.execute("INSERT INTO migration VALUES (?)", (name,))
    db.execute("INSERT INTO session (id, title, model, created, updated, leaf) VALUES (1, 'Old', 'm', 1, 1, 1)")
    db.execute("INSERT INTO message (id, session_id, role, content, created) VALUES (1, 1, 'user', 'Hello', 1)")
    db.close()
    store = SessionStore(tmp_path / "s.db")
    (message,) = store.path(1)
    assert (message.content, message.calls) == ("Hello", ())
    store.close()


def test_a_file_that_another_program_writes_at_the_start_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    SessionStore(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(SessionError, match=r"s\.db: chats cannot be saved: another program is writing to it"):
        SessionStore(path)
    other.execute("ROLLBACK")
    other.close()
    SessionStore(path).close()
