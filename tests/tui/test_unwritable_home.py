"""The chat where its sessions cannot be kept."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tui import start
from tui.sessions.database import SessionError


def test_sessions_last_for_one_run_where_they_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "home"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setattr(start, "sessions_path", lambda: blocked / "sessions.db")
    with ExitStack() as stack:
        store = start._store(None, stack)
        store.create("builtin", {})
        store.close()
        assert store.file.exists()
    assert not store.file.exists()
    assert "--sessions FILE keeps it elsewhere" in capsys.readouterr().err
    with pytest.raises(SessionError), ExitStack() as stack:
        start._store(blocked / "named.db", stack)


def test_sessions_that_are_there_are_never_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "sessions.db"
    broken.write_text("no database, but somebody's file")
    monkeypatch.setattr(start, "sessions_path", lambda: broken)
    with pytest.raises(SessionError), ExitStack() as stack:
        start._store(None, stack)
