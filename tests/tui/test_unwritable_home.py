"""The chat if its sessions cannot be saved: at the start, in the middle, and until it works again."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from localllm.chats import Message, Role, SessionStore
from localllm.chats.database import MIGRATIONS, SessionError, UnwritableError, connect, in_memory
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, loaded
from tui.app import ChatApp
from tui.start import _close


def full(file: sqlite3.Connection) -> None:
    """Prevent the file from growing, as on a full disk."""
    (used,) = file.execute("PRAGMA page_count").fetchone()
    file.execute(f"PRAGMA max_page_count = {used}")


def test_a_chat_works_where_it_cannot_be_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "home"
    blocked.write_text("a file where the folder should be")
    with pytest.raises(UnwritableError):
        SessionStore(blocked / "named.db")
    store = SessionStore(blocked / "sessions.db", must_save=False)

    async def flow() -> None:
        app = ChatApp(FakeBackend([said("One."), ended()]), store, "tiny")
        async with app.run_test() as pilot:
            chat = await loaded(pilot)
            assert str(blocked) in str(chat.notice.content)
            assert (await ask(pilot, "Hello")).content == "One."
            assert "not saved" in str(chat.status_line.content)

    asyncio.run(flow())
    assert [session.title for session in store.sessions()] == ["Hello"]
    _close(store)
    assert "--sessions FILE" in capsys.readouterr().err
    assert blocked.read_text() == "a file where the folder should be"


def test_stored_chats_can_be_read_where_they_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.chats.database.PATIENT_S", 0.1)
    path = tmp_path / "sessions.db"
    store = SessionStore(path)
    session = store.create("m", {})
    store.add(Message(0, session, None, Role.USER, "Kept"))
    store.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store = SessionStore(path, must_save=False)
    assert store.unsaved and [each.title for each in store.sessions()] == ["Kept"]
    store.rename(session, "Renamed")
    other.execute("ROLLBACK")
    other.close()
    store.close()
    with contextlib.closing(SessionStore(path)) as again:
        assert [each.title for each in again.sessions()] == ["Renamed"]


def test_a_disk_that_fills_up_costs_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[sqlite3.Connection] = []

    def open_database(path: Path) -> sqlite3.Connection:
        opened.append(connect(path))
        return opened[-1]

    monkeypatch.setattr("localllm.chats.store.connect", open_database)
    monkeypatch.setattr("localllm.chats.store.RETRY_S", 0.0)
    store = SessionStore(tmp_path / "sessions.db")
    session, parent = store.create("m", {}), None
    (file,) = opened
    full(file)
    said_so: list[str] = []
    store.on_saving = said_so.append
    for number in range(4):
        role = Role.ASSISTANT if number % 2 else Role.USER
        parent = store.add(Message(0, session, parent, role, f"{number} " + "x" * 20_000)).id
    assert len(said_so) == 1 and "full" in said_so[0] and store.unsaved
    again = SessionStore(tmp_path / "sessions.db")  # another program writes meanwhile
    other = again.create("m", {})
    again.add(Message(0, other, None, Role.USER, "Elsewhere"))
    file.execute("PRAGMA max_page_count = 1000000")
    last = store.add(Message(0, session, parent, Role.USER, "The end"))
    assert said_so[1:] == [""] and not store.unsaved
    assert [message.content[:7] for message in again.path(session)] == [
        "0 xxxxx",
        "1 xxxxx",
        "2 xxxxx",
        "3 xxxxx",
        "The end",
    ]
    assert again.path(session)[-1].id == last.id and {each.title for each in again.sessions()} >= {"Elsewhere"}
    again.close()
    store.close()


def test_a_file_of_somebody_elses_is_never_written(tmp_path: Path) -> None:
    text, foreign = tmp_path / "notes.txt", tmp_path / "places.sqlite"
    text.write_text("no database, but somebody's file")
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE session (id INTEGER)")
    db.commit()
    db.close()
    for path in (text, foreign):
        before = path.read_bytes(), path.stat().st_mtime_ns
        for must_save in (True, False):
            with pytest.raises(SessionError, match="is not a chat database"):
                SessionStore(path, must_save=must_save)
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "places.sqlite"}


def test_what_is_said_to_be_saved_is_on_the_disk(tmp_path: Path) -> None:
    """SQLite syncs each commit to disk with FULL; NORMAL may lose the last ones in a power cut."""
    db = connect(tmp_path / "sessions.db")
    assert db.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    copy = in_memory(db)
    assert copy.execute("SELECT count(*) FROM migration").fetchone()[0] == len(MIGRATIONS)
    copy.close()
    db.close()
