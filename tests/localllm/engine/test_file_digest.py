"""Digests of model files: computed once; and what the disk tier does before the digest is known."""

import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from gguf_io.model_file import FileState
from gguf_io.system import open_regular
from localllm import files
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.file_digest import FileDigest
from localllm.engine.request import GenerationRequest, SamplingParams
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.waiting import PATIENCE_S, eventually

LONG = tuple((at * 7) % 63 + 1 for at in range(300))


@pytest.fixture(autouse=True)
def files_of_now_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store digests even of files that were just written."""
    monkeypatch.setattr(files, "SETTLED_NS", -(10**9))


def written(path: Path, content: bytes) -> FileState:
    """A file as it is right after it was written."""
    path.write_bytes(content)
    with path.open("rb") as file:
        return FileState.of(path, file.fileno())


def value(files: list[FileState], store: Path) -> str | None:
    digest = FileDigest(files, store)
    digest.wait(PATIENCE_S)
    assert digest.failed == (digest.value is None)
    return digest.value


def test_it_is_sha_256_of_all_parts_and_kept(tmp_path: Path) -> None:
    contents, store = [b"first" * 1000, b"second"], tmp_path / "kept" / "digests.json"
    files = [written(tmp_path / f"part-{number}", content) for number, content in enumerate(contents)]
    parts = "".join(hashlib.sha256(content).hexdigest() for content in contents)
    assert value(files, store) == hashlib.sha256(parts.encode()).hexdigest()
    for file in files:
        file.path.unlink()
    assert FileDigest(files, store).value == hashlib.sha256(parts.encode()).hexdigest()  # nothing left to read


def test_another_models_file_that_cannot_be_examined_spoils_nothing(tmp_path: Path) -> None:
    """As on a network drive that is gone; here its name is too long."""
    file, store = written(tmp_path / "model", b"weights"), tmp_path / "digests.json"
    store.write_text(json.dumps({"/" + "long" * 100: [1, 2, 3, 4, "0" * 64]}))
    assert value([file], store) is not None
    assert list(json.loads(store.read_bytes())) == [str(file.path)]


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"a": 3}', b"\xff"])
def test_a_damaged_store_is_one_without_digests(damage: bytes, tmp_path: Path) -> None:
    file, store = written(tmp_path / "model", b"weights"), tmp_path / "digests.json"
    first = value([file], store)
    store.write_bytes(damage)
    assert first is not None
    assert value([file], store) == first


def test_a_file_that_has_changed_since_has_none(tmp_path: Path) -> None:
    file, store = written(tmp_path / "model", b"weights"), tmp_path / "digests.json"
    before = value([file], store)
    file.path.rename(tmp_path / "old")
    other = written(file.path, b"WEIGHTS")
    os.utime(file.path, ns=(file.modified_ns, file.modified_ns))
    assert value([other], tmp_path / "none.json") is None  # its times were reset after it was opened
    with file.path.open("rb") as opened:
        now = FileState.of(file.path, opened.fileno())
    assert value([now], store) not in (before, None)  # the entry under its path belongs to another file


def test_a_digest_may_become_known_while_the_engine_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileDigest, "when_known", lambda digest, known: known())
    files = [written(tmp_path / "model", b"weights")]
    disk = DiskCache(tmp_path / "kv", "layout", 2**20, digest=FileDigest(files, tmp_path / "digests.json"))
    Engine(FakeRunner(pages=400, max_rows=64), FakeVocabulary(), disk=disk).close()


def test_what_is_computed_before_the_digest_is_known_goes_to_the_disk_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def later(path: Path) -> int:
        may_go_on.wait(PATIENCE_S)
        return open_regular(path)

    monkeypatch.setattr("localllm.engine.file_digest.open_regular", later)

    def answer(content: bytes, engine_runs: bool = False) -> tuple[Engine, int]:
        files = [written(tmp_path / "model", content)]
        disk = DiskCache(tmp_path / "kv", "layout", 2**20, digest=FileDigest(files, tmp_path / "digests.json"))
        if may_go_on.is_set():
            disk.digest.wait(PATIENCE_S)
        engine = Engine(FakeRunner(pages=400, max_rows=64), FakeVocabulary(), disk=disk)
        if engine_runs:
            engine.start()
        stream = engine.submit(GenerationRequest(LONG, SamplingParams(temperature=0), max_tokens=1))
        while not engine_runs and engine.step():
            pass
        return engine, stream.collect().last.counts.cached_disk

    engine, _ = answer(b"weights", engine_runs=True)  # its digest is not known yet
    assert not list(tmp_path.glob("kv/*/*.kv"))
    may_go_on.set()
    eventually(lambda: len(list(tmp_path.glob("kv/*/*.kv"))) == 2, "the idle engine was not woken")
    engine.close()
    for content, found in ((b"weights", len(LONG) - 1), (b"WEIGHTS", 0)):
        engine, cached = answer(content)
        engine.close()
        assert cached == found
