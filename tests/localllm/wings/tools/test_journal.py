"""File changes are undone exactly, even after kill -9 at any moment."""

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from localllm.actions.action import Toolbox, ToolError
from localllm.actions.folder import Folder
from localllm.answer.tool_calls import ToolCall
from localllm.wings.tools.editing import editing_tool
from localllm.wings.tools.journal import Journal
from tests.systems import KILL, KILLED

NEVER = threading.Event()
ROOT = Path(__file__).resolve().parents[4]

# Edits a file and kills itself with kill -9 just before or after the named call.
CHILD = (
    f"KILL = {KILL:d}"
    + """
import os, sys, threading
from pathlib import Path
from localllm.wings.tools import journal
database, folder, path, module, name, when = sys.argv[1:]
target = os if module == "os" else Path if module == "Path" else journal
original = getattr(target, name)
def deadly(*arguments, **options):
    if module == "Path" and not str(arguments[0]).startswith(folder):  # the journal's own folder
        return original(*arguments, **options)
    if when == "before":
        os.kill(os.getpid(), KILL)
    original(*arguments, **options)
    os.kill(os.getpid(), KILL)
setattr(target, name, deadly)
file = Path(folder) / path
before = file.read_bytes() if file.exists() else None
journal.Journal(Path(database), Path(folder), "chat 1").write(file, before, b"changed\\n")
"""
)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Every path in a folder with its mode and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


def take_back(journal: Journal) -> bool:
    change = journal.newest()
    assert change is not None
    return journal.undo(change)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "script.sh").write_bytes(b"#!/bin/sh\r\necho one\r\n")
    (made / "script.sh").chmod(0o751)
    return made


@pytest.fixture
def journal(tmp_path: Path, folder: Path) -> Journal:
    return Journal(tmp_path / "data" / "changes.db", folder, "chat 1")


def edit(folder: Path, journal: Journal, path: str, old: str, new: str) -> str:
    tools = Toolbox([editing_tool(Folder(folder), journal)])
    return tools.plan(ToolCall("edit_file", {"path": path, "old_text": old, "new_text": new})).result(NEVER)


def test_edits_are_taken_back_in_turn_with_modes_line_ends_and_new_folders(folder: Path, journal: Journal) -> None:
    states, mode = [snapshot(folder)], (folder / "script.sh").stat().st_mode
    for path, old, new in (
        ("script.sh", "echo one\n", "echo two\necho three\n"),
        ("new/deep/file.txt", "", "text\n"),
        ("script.sh", "two", "2"),
    ):
        assert edit(folder, journal, path, old, new).startswith("Changed:\n--- ")
        states.append(snapshot(folder))
    assert (folder / "script.sh").read_bytes() == b"#!/bin/sh\r\necho 2\r\necho three\r\n"
    assert (folder / "script.sh").stat().st_mode == mode
    for state in reversed(states[:-1]):
        assert take_back(journal)
        assert snapshot(folder) == state
    assert journal.newest() is None


MOMENTS = [
    ("journal", "write_whole", "before"),
    ("os", "fsync", "before"),
    ("os", "replace", "before"),
    ("os", "replace", "after"),
    ("journal", "write_whole", "after"),
]


@pytest.mark.parametrize(
    ("path", "module", "name", "when"),
    [
        *[("script.sh", *moment) for moment in MOMENTS],
        *[("new/deep/file.txt", *moment) for moment in [*MOMENTS, ("Path", "mkdir", "after")]],
    ],
)
def test_undo_after_kill_9(folder: Path, journal: Journal, path: str, module: str, name: str, when: str) -> None:
    before = snapshot(folder)
    arguments = [str(journal.file), str(folder), path, module, name, when]
    child = subprocess.run([sys.executable, "-c", CHILD, *arguments], cwd=ROOT, check=False)
    assert child.returncode == KILLED
    assert take_back(journal) == (when == "after" and name != "mkdir")
    assert snapshot(folder) == before


def test_kill_9_while_a_change_is_taken_back(folder: Path, journal: Journal) -> None:
    before = snapshot(folder)
    edit(folder, journal, "script.sh", "one", "two")
    child = f"""
import os, sys
from pathlib import Path
from localllm.wings.tools.journal import Journal
journal = Journal(Path({str(journal.file)!r}), Path({str(folder)!r}))
os.replace = lambda *_: os.kill(os.getpid(), {KILL:d})
journal.undo(journal.newest())
"""
    assert subprocess.run([sys.executable, "-c", child], cwd=ROOT, check=False).returncode == KILLED
    assert take_back(journal)
    assert snapshot(folder) == before


def test_what_somebody_else_changed_since_is_left_alone(folder: Path, journal: Journal) -> None:
    edit(folder, journal, "script.sh", "one", "two")
    (folder / "script.sh").write_text("mine\n")
    with pytest.raises(ToolError, match="changed by something else since"):
        take_back(journal)
    assert (folder / "script.sh").read_text() == "mine\n"


def test_a_file_that_changed_after_the_diff_was_shown_is_left_alone(folder: Path, journal: Journal) -> None:
    tools = Toolbox([editing_tool(Folder(folder), journal)])
    action = tools.plan(ToolCall("edit_file", {"path": "script.sh", "old_text": "one", "new_text": "two"}))
    (folder / "script.sh").write_text("mine\n")
    assert "changed since the call was shown" in action.result(NEVER)
    assert (folder / "script.sh").read_text() == "mine\n"
    assert journal.newest() is None


def test_nothing_is_changed_without_a_journal(folder: Path, tmp_path: Path) -> None:
    before = snapshot(folder)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    content = foreign.read_bytes()
    (tmp_path / "file").write_text("no folder")
    for file in (foreign, tmp_path / "file" / "changes.db"):
        assert "Error: " in edit(folder, Journal(file, folder), "script.sh", "one", "two")
    assert snapshot(folder) == before
    assert foreign.read_bytes() == content


def test_a_change_that_fails_is_not_in_the_journal(
    folder: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = snapshot(folder)
    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in edit(folder, journal, "script.sh", "one", "two")
    assert (snapshot(folder), journal.newest()) == (before, None)


def test_old_text_must_occur_once(folder: Path, journal: Journal) -> None:
    (folder / "twice.txt").write_text("a\na\n")
    for path, old, said in (
        ("twice.txt", "a", "occurs 2 times"),
        ("twice.txt", "b", "occurs 0 times"),
        ("none.txt", "a", "no such file"),
        ("twice.txt", "", "exists already"),
    ):
        with pytest.raises(ToolError, match=said):
            edit(folder, journal, path, old, "c")
