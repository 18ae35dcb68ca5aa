"""The index of a folder: only changed files are read, missing ones are removed, and it is outside of the folder."""

import contextlib
import itertools
import multiprocessing
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import RequestError
from localllm.settings import indexes_folder
from localllm.wings.documents import database
from localllm.wings.documents import index as index_module
from localllm.wings.documents.database import DocumentIndexError, index_path
from localllm.wings.documents.index import DocumentIndex, IndexReport
from localllm.wings.documents.search import find_excerpts
from tests.pdf_files import pdf_of
from tests.systems import CAN_LINK, needs_links

LONG_AGO = 1_700_000_000


@pytest.fixture(autouse=True)
def old_files(folder: Path) -> None:
    settle(folder)


def settle(folder: Path) -> None:
    """Make all files old enough that no change can go unnoticed."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mtime > LONG_AGO + 10**6:
            os.utime(path, (LONG_AGO, LONG_AGO))


def best(index: DocumentIndex, question: str) -> str:
    identities = list(index.best_words(question, 1).scores)
    return index.excerpts(identities)[identities[0]].label if identities else ""


def test_questions_find_lines(folder: Path) -> None:
    with DocumentIndex(folder) as index:
        report = index.update()
        assert (report.files, report.read, report.removed, report.problems) == (2, 2, 0, {})
        assert best(index, "When is the museum open? Is it closed?").startswith("notes.md:")
        assert best(index, "high water").startswith("code/tides.py:1")
        assert best(index, "tides").startswith("code/tides.py")  # found by its name
        assert best(index, "zeppelin") == best(index, "?!") == ""


def test_only_what_changed_is_read(folder: Path) -> None:
    with DocumentIndex(folder) as index:
        index.update()
        assert index.update().read == 0
        (folder / "notes.md").write_text("The harbour was built in 1931.\n")
        (folder / "new.txt").write_text("A lighthouse.\n")
        settle(folder)
        (folder / "code" / "tides.py").unlink()
        report = index.update()
        assert (report.read, report.removed, report.files) == (2, 1, 2)
        assert best(index, "lighthouse") == "new.txt:1"
        (excerpt,) = find_excerpts(index, "harbour 1931", count=1).excerpts
        assert excerpt.text == "The harbour was built in 1931."
        assert best(index, "museum") == best(index, "water") == ""  # nothing of the old content is left


def test_a_file_that_was_touched_keeps_its_chunks(folder: Path) -> None:
    with DocumentIndex(folder) as index:
        index.update()
        before = index.best_words("harbour museum", 9)
        os.utime(folder / "notes.md", (LONG_AGO + 5, LONG_AGO + 5))
        assert index.update().read == 1  # its digest is unchanged
        assert index.best_words("harbour museum", 9) == before


def test_a_change_within_the_tick_of_the_clock_is_seen(folder: Path) -> None:
    path = folder / "notes.md"
    path.write_text("one\n")
    now = path.stat().st_mtime_ns
    with DocumentIndex(folder) as index:
        index.update()
        path.write_text("two\n")
        os.utime(path, ns=(now, now))
        index.update()
        assert best(index, "two") == "notes.md:1"
        assert best(index, "one") == ""


def test_the_index_is_private_and_outside_the_folder(folder: Path) -> None:
    before = sorted(path for path in folder.rglob("*"))
    with DocumentIndex(folder) as index:
        index.update()
        assert sorted(path for path in folder.rglob("*")) == before
        assert index.path.parent == indexes_folder()
        if sys.platform != "win32":  # which has lists of access
            assert index.path.stat().st_mode & 0o077 == 0


def test_hidden_files_links_and_other_peoples_code_are_left_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("a needle outside\n")
    if CAN_LINK:
        (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
        (folder / "way").symlink_to(tmp_path)
    (folder / ".env").write_text("a needle\n")
    for name in (".git", "node_modules"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text("a needle\n")
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe.txt")
    with DocumentIndex(folder) as index:
        assert index.update().files == 2
        assert best(index, "needle") == ""


@needs_links
def test_a_file_that_becomes_a_link_while_it_is_indexed_is_not_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.txt").write_text("a needle outside\n")
    found = index_module.found_files

    def swapped(root: Path) -> object:
        files = list(found(root))
        (folder / "notes.md").unlink()
        (folder / "notes.md").symlink_to(tmp_path / "secret.txt")
        return files

    monkeypatch.setattr(index_module, "found_files", swapped)
    with DocumentIndex(folder) as index:
        assert "cannot be read" in index.update().problems["notes.md"]
        assert best(index, "needle") == ""


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: path.write_bytes(b"a\0b"), "is not text"),
        (lambda path: path.write_bytes("schön".encode("latin-1")), "is not UTF-8 text"),
        (lambda path: path.write_bytes(b" " * (4 * 2**20 + 1)), "is larger than 4 MiB"),
    ],
)
def test_a_file_that_is_not_text_is_reported_once(folder: Path, write: Callable[[Path], object], problem: str) -> None:
    write(folder / "strange.txt")
    settle(folder)
    with DocumentIndex(folder) as index:
        assert index.update().problems == {"strange.txt": problem}
        again = index.update()
        assert (again.read, again.problems) == (0, {"strange.txt": problem})
        (folder / "strange.txt").write_text("now it is text\n")
        assert index.update().problems == {}


def test_other_encodings_with_a_mark_are_read(folder: Path) -> None:
    (folder / "a.txt").write_bytes("höher".encode("utf-16"))
    (folder / "b.txt").write_bytes("tiefer".encode("utf-8-sig"))
    with DocumentIndex(folder) as index:
        assert index.update().problems == {}
        assert (best(index, "hoher"), best(index, "tiefer")) == ("a.txt:1", "b.txt:1")


def test_words_without_blanks_between_them_are_found(folder: Path) -> None:
    (folder / "zh.txt").write_text("我们的港口有三个码头。\n")
    with DocumentIndex(folder) as index:
        index.update()
        assert best(index, "码头在哪里?") == "zh.txt:1"


@pytest.mark.parametrize("question", ['name: "crane" OR NOT (b* - ^c) NEAR/2', '"""', "crane^ NEAR(", "text:crane AND"])
def test_questions_are_not_query_syntax(question: str, folder: Path) -> None:
    with DocumentIndex(folder) as index:
        index.update()
        assert best(index, question).startswith("notes.md:") is ("crane" in question)


def test_an_index_of_stems_gets_its_words_again_and_keeps_its_vectors(folder: Path) -> None:
    with DocumentIndex(folder) as index:
        index.update()
        chunk = next(iter(index.best_words("museum", 1).scores))
        index.add_vectors("model", [(chunk, b"\0\0")])
    with contextlib.closing(sqlite3.connect(index_path(folder))) as db:
        db.executescript(
            "DROP TABLE terms; DROP TABLE words; CREATE VIRTUAL TABLE words USING fts5(name, text, content='', "
            "tokenize='porter unicode61 remove_diacritics 2'); PRAGMA user_version = 1"
        )
    with DocumentIndex(folder) as index:
        assert best(index, "museums").startswith("notes.md")
        assert index.vectors("model") == ([chunk], b"\0\0")
        assert index.update().read == 0
        (folder / "notes.md").write_text("An aquarium.\n")
        index.update()
        assert best(index, "museum") == ""


@pytest.mark.parametrize("damage", [b"", b"SQLite format 3\0" + b"\xff" * 4000, b"no database"])
def test_a_damaged_index_is_made_anew(folder: Path, damage: bytes) -> None:
    with DocumentIndex(folder) as index:
        index.update()
    index_path(folder).write_bytes(damage)
    with DocumentIndex(folder) as index:
        assert index.update().read == 2
        assert best(index, "museum").startswith("notes.md")


def test_another_programs_file_is_not_touched(folder: Path) -> None:
    path = index_path(folder)
    path.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE mine (a)")
    before = path.read_bytes()
    with pytest.raises(RequestError, match="Move it away"):
        DocumentIndex(folder)
    assert path.read_bytes() == before


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such folder"):
        DocumentIndex(tmp_path / "none")


def test_an_interrupted_update_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_FILES_PER_COMMIT", 1)

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with DocumentIndex(folder) as index:
        with pytest.raises(KeyboardInterrupt):
            index.update(stop)
        assert index.update().read == 1


def _index(folder: Path) -> IndexReport:
    with DocumentIndex(folder) as index:
        return index.update()


def test_two_processes_index_one_after_the_other(folder: Path) -> None:
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"number{number}\n")
    settle(folder)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        reports = pool.map(_index, [folder, folder])
    assert sorted(report.read for report in reports) == [0, 62]


@pytest.mark.parametrize("number", range(5))
def test_an_index_that_another_process_creates_meanwhile_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """number: of the statement before which the other one tries to create it."""
    connect, statements = sqlite3.connect, itertools.count()
    monkeypatch.setattr(database, "BUSY_S", 0.0)

    def create(_statement: str) -> None:
        if next(statements) == number:
            monkeypatch.setattr(sqlite3, "connect", connect)
            with contextlib.suppress(DocumentIndexError):
                DocumentIndex(folder).close()

    def traced(*given: Any, **more: Any) -> sqlite3.Connection:
        db = connect(*given, **more)
        db.set_trace_callback(create)
        return db

    monkeypatch.setattr(sqlite3, "connect", traced)
    with DocumentIndex(folder) as index:
        assert index.update().read == 2


def test_pages_of_a_pdf_have_lines_of_their_own(folder: Path) -> None:
    pytest.importorskip("pypdf")
    (folder / "report.pdf").write_bytes(pdf_of([["First page."], ["Second page.", "The crane (small) is blue."]]))
    with DocumentIndex(folder) as index:
        assert index.update().problems == {}
        assert best(index, "Which crane is blue?") == "report.pdf, page 2, lines 1-2"


def test_a_folder_that_moves_away_meanwhile_is_an_empty_one(folder: Path) -> None:
    with DocumentIndex(folder) as index:
        index.update()
        shutil.rmtree(folder)
        assert (index.update().removed, best(index, "museum")) == (2, "")
