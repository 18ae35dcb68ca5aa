"""The wall clock jumps: nothing waits for it, and what was stored is used."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from gguf_io.model_file import FileState
from localllm import files
from localllm.engine.file_digest import FileDigest
from localllm.files import STALE_S, stale, unsettled_s
from localllm.server.catalog import _moment
from localllm.server.metrics import Metrics
from localllm.wings.documents.index import DocumentIndex
from localllm.wings.lab.served import read_metrics
from localllm.wings.tools.journal import Journal
from tests.systems import use_own_places
from tests.waiting import PATIENCE_S

HOUR_NS = 3600 * 10**9
JUMPS = [-5 * HOUR_NS, 5 * HOUR_NS, -20 * 8766 * HOUR_NS, 20 * 8766 * HOUR_NS]


@pytest.fixture(params=JUMPS, ids=lambda jump: f"{jump // HOUR_NS} hours")
def jumped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The wall clock of this process jumps by so many nanoseconds; files keep the time of the system."""
    real, real_ns, jump = time.time, time.time_ns, int(request.param)
    monkeypatch.setattr(time, "time", lambda: real() + jump / 1e9)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + jump)
    return jump


def test_a_time_stamp_is_waited_for_only_while_it_may_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10**18
    monkeypatch.setattr(time, "time_ns", lambda: now)
    assert [unsettled_s(now - ago * 10**9) for ago in (3, 2, 1, 0, -1, -2, -3, -3600)] == [0, 0, 1, 2, 3, 4, 0, 0]


def test_files_written_before_a_jump_are_settled(tmp_path: Path, jumped: int) -> None:
    path, store = tmp_path / "model.gguf", tmp_path / "digests.json"
    path.write_bytes(b"weights")
    with path.open("rb") as file:
        state = FileState.of(path, file.fileno())
    assert unsettled_s(max(state.modified_ns, state.changed_ns)) == 0.0
    digest = FileDigest([state], store)
    digest.wait(PATIENCE_S)
    path.unlink()
    parts = hashlib.sha256(b"weights").hexdigest()
    assert digest.value == hashlib.sha256(parts.encode()).hexdigest()
    assert FileDigest([state], store).value == digest.value, "it was not kept"


def test_a_server_says_how_long_it_has_run(jumped: int) -> None:
    seconds = read_metrics(Metrics().text().decode()).seconds
    assert seconds is not None and 0 <= seconds < PATIENCE_S


def test_an_index_reads_files_of_another_time_once(
    tmp_path: Path, jumped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_own_places(tmp_path, monkeypatch)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text("The harbour was built in 1931.\n")
    with DocumentIndex(folder) as index:
        assert index.update().read == 1
        assert index.update().read == 0
        (folder / "a.txt").write_text("The harbour was built in 1932.\n")
        assert index.update().read == 1


def test_files_in_use_are_not_taken_for_left_ones_when_the_clock_goes_back(tmp_path: Path) -> None:
    path = tmp_path / f"{files.TEMPORARY}x.tmp"
    path.write_bytes(b"")
    for ahead_s, is_stale in ((10 * STALE_S, False), (0, False), (-10 * STALE_S, True)):
        os.utime(path, (time.time() + ahead_s,) * 2)
        assert stale(path) == is_stale


def test_changes_are_undone_newest_first_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, path, now = Journal(tmp_path / "changes.db", tmp_path), tmp_path / "a.txt", time.time()
    path.write_bytes(b"0")
    for number, moved_s in enumerate((0, 5 * 3600, -5 * 3600)):
        monkeypatch.setattr(time, "time", lambda moved_s=moved_s: now + moved_s)
        journal.write(path, b"%d" % number, b"%d" % (number + 1))
    for left in (b"2", b"1", b"0"):
        change = journal.newest()
        assert change is not None and journal.undo(change)
        assert path.read_bytes() == left


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "1970-01-01T00:00:00Z"), (1e9, "2001-09-09T01:46:40Z"), (1e13, "9999-12-31T23:59:59Z")],
)
def test_files_of_times_beyond_the_calendar_are_listed(seconds: float, shown: str) -> None:
    assert _moment(seconds) == shown
