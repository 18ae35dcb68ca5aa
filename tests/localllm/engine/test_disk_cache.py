"""The disk tier: what a new process finds, and what it must not trust."""

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gguf_io.model_file import FileState
from localllm.engine import disk_cache
from localllm.engine.disk_cache import SEGMENT_TOKENS, DiskCache
from localllm.engine.engine import Engine
from localllm.engine.file_digest import FileDigest
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.stream import Completion
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.systems import needs_modes
from tests.waiting import PATIENCE_S, eventually

LONG = tuple((at * 7) % 63 + 1 for at in range(600))


def turn(folder: Path, prompt: tuple[int, ...], runner: FakeRunner | None = None) -> tuple[Completion, FakeRunner]:
    """One turn as if in a new process: nothing is in memory."""
    runner = runner or FakeRunner(pages=400, max_rows=64)
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(folder, runner.info.kv_layout, 2**20))
    stream = engine.submit(GenerationRequest(prompt, sampling=SamplingParams(temperature=0), max_tokens=4))
    while engine.step():
        engine.check_integrity()
    done = stream.collect()
    engine.close()
    return done, runner


def test_a_new_process_computes_only_what_is_new(tmp_path: Path) -> None:
    first, cold = turn(tmp_path, LONG)
    assert cold.rows_computed == 603
    second, warm = turn(tmp_path, (*LONG, *first.token_ids, 5, 6))
    # The first answer's last token was never computed; it and the two new ones are, then three are decoded.
    assert (second.last.counts.cached_disk, warm.rows_computed) == (603, 3 + 3)
    third, warm = turn(tmp_path, (*LONG, *first.token_ids, 5, 6, *second.token_ids, 7))
    assert (third.last.counts.cached_disk, warm.rows_computed) == (609, 2 + 3)
    assert (
        third.token_ids == turn(tmp_path / "other", (*LONG, *first.token_ids, 5, 6, *second.token_ids, 7))[0].token_ids
    )


def test_a_branch_uses_the_common_part_to_the_single_token(tmp_path: Path) -> None:
    turn(tmp_path, LONG)
    branch = (*LONG[:300], 1, 2, 3)
    done, _ = turn(tmp_path, branch)
    assert done.last.counts.cached_disk == 300
    assert done.token_ids == turn(tmp_path / "other", branch)[0].token_ids


def test_other_models_and_short_prompts_find_nothing(tmp_path: Path) -> None:
    turn(tmp_path, LONG)
    other = FakeRunner(pages=400, kv_layout="another model")
    assert turn(tmp_path, LONG, other)[0].last.counts.cached_disk == 0
    turn(tmp_path / "short", LONG[:20])
    assert not list((tmp_path / "short").glob("*/*.kv"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "other tokens", "garbage", "empty"])
def test_damaged_segments_are_computed_again(tmp_path: Path, damage: str) -> None:
    honest, _ = turn(tmp_path, LONG)
    for path in tmp_path.glob("*/*.kv"):
        data = bytearray(path.read_bytes())
        data[-40] ^= damage == "flip"
        data[13] ^= damage == "other tokens"
        shortened = {"truncate": data[: len(data) // 2], "garbage": os.urandom(500), "empty": b""}
        path.write_bytes(shortened.get(damage, data))
    again, runner = turn(tmp_path, LONG)
    assert again.token_ids == honest.token_ids
    assert again.last.counts.cached_disk == 0 and runner.rows_computed == 603


def test_a_damaged_state_is_rejected_but_its_kv_is_used(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "model", 2**20)
    cache.store(LONG[:100], 0, bytes(1000), b"state" * 50)
    (segment,) = cache.find(LONG)
    assert (cache.load(segment), cache.load_state(segment)) == (bytes(1000), b"state" * 50)
    data = bytearray(segment.path.read_bytes())
    data[-20] ^= 1
    segment.path.write_bytes(data)
    assert cache.load(segment) == bytes(1000)
    assert cache.load_state(segment) is None and not segment.path.exists()


@needs_modes
def test_folders_and_files_are_private(tmp_path: Path) -> None:
    turn(tmp_path / "kv", LONG)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv").rglob("*.kv")}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "kv", *(tmp_path / "kv").iterdir()]}
    assert (modes, folders) == ({0o600}, {0o700})


def test_the_limit_holds_and_the_oldest_go(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "model", 20_000)
    for conversation in range(40):
        cache.store([conversation] * 100, 0, bytes(1000))
        os.utime(max(tmp_path.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns), (conversation, conversation))
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= 20_000
    assert cache.find([39] * 100) and not cache.find([0] * 100)


def test_a_grown_tail_replaces_the_shorter_one(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "model", 2**20)
    tokens = list(LONG[: SEGMENT_TOKENS + 80])
    for length in (SEGMENT_TOKENS + 20, SEGMENT_TOKENS + 80):
        for start, stop in list(cache.missing(tokens[:length])):
            cache.store(tokens[:stop], start, bytes(10))
    assert [(segment.start, segment.stop) for segment in cache.find(tokens)] == [(0, 256), (256, 336)]
    assert len(list(tmp_path.glob("*/*.kv"))) == 2
    assert not list(cache.missing(tokens))


def test_a_full_disk_turns_it_off_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_cache.os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        done, _ = turn(tmp_path, LONG)
    assert len(done.token_ids) == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "No space left" in caplog.text
    assert not [path for path in tmp_path.glob("*/*") if path.is_file()]


def test_an_unusable_folder_turns_it_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert not DiskCache(tmp_path / "file" / "kv", "model").enabled
    assert "no longer kept on disk" in caplog.text


def test_a_folder_that_cannot_be_written_when_a_shared_prefix_is_pinned_turns_it_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made once the model files' digest is known, which may be long after the start."""
    (tmp_path / "model").write_bytes(b"weights")
    with (tmp_path / "model").open("rb") as file:
        digest = FileDigest([FileState.of(tmp_path / "model", file.fileno())], tmp_path / "digests.json")
    cache = DiskCache(tmp_path / "kv", "model", 2**20, digest=digest)
    cache.digest.wait(PATIENCE_S)
    assert cache.ready
    for folder in (tmp_path / "kv").iterdir():
        folder.rmdir()
    (tmp_path / "kv").rmdir()
    cache.pin(LONG)
    assert cache.enabled and list(tmp_path.glob("kv/*/*.trunk"))
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").touch()
    cache.pin(LONG)
    assert not cache.enabled
    assert "no longer kept on disk" in caplog.text


def test_a_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    cache = DiskCache(tmp_path, "model", 2**20)
    cache.store(LONG[:100], 0, bytes(1000))
    monkeypatch.setattr(disk_cache.os, "utime", read_only)
    (segment,) = cache.find(LONG)
    assert cache.load(segment) == bytes(1000)


def test_a_folder_that_another_process_has_freed_is_created_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "model", 2**20)
    for _ in range(2):
        assert not cache.find(LONG)
        cache.store(LONG[:100], 0, bytes(1000))
        assert cache.find(LONG)
        shutil.rmtree(next(tmp_path.iterdir()))


def test_a_segment_larger_than_the_limit_evicts_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "model", 20_000)
    cache.store(LONG[:100], 0, bytes(1000))
    cache.store(LONG[100:300], 0, bytes(30_000))
    assert cache.find(LONG) and not cache.find(LONG[100:300])


def test_a_shared_prefix_goes_with_the_segments_that_it_pins(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "model", 20_000)
    for first in range(1, 9):
        tokens = [first] * SEGMENT_TOKENS
        cache.store(tokens, 0, bytes(5000))
        cache.pin(tokens)
    ends = {path.name.split(".")[1] for path in tmp_path.glob("*/*.kv")}
    assert {path.stem for path in tmp_path.glob("*/*.trunk")} <= ends


def test_a_writer_without_memory_does_not_keep_the_engine_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(disk_cache, "write_segment", fail)
    runner = FakeRunner(pages=800, max_rows=64)
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, "fake", 2**20))
    stream = engine.submit(GenerationRequest(LONG * 4, SamplingParams(temperature=0), max_tokens=1))
    while not any(event.finish_reason for event in stream.poll()):
        engine.step()
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    eventually(lambda: not closing.is_alive(), "close waits for the writer")
    assert "was not written" in caplog.text and runner.closed


def test_an_engine_that_failed_ends_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    others = set(threading.enumerate())
    runner = FakeRunner(pages=800, max_rows=64)
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, "fake", 2**20))
    engine.start()
    assert engine.submit(GenerationRequest(LONG, SamplingParams(temperature=0), max_tokens=1)).collect().token_ids
    monkeypatch.setattr(runner, "run", fail)
    monkeypatch.setattr(runner, "export_kv", fail)
    failed = engine.submit(GenerationRequest(LONG, SamplingParams(temperature=0), max_tokens=1)).collect()
    assert "the device is lost" in str(failed.last.error)
    engine.close()
    assert set(threading.enumerate()) <= others


def test_a_shared_prefix_that_was_removed_is_written_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "model", 2**20)
    cache.pin(LONG)
    (shared_prefix,) = tmp_path.glob("*/*.trunk")
    content = shared_prefix.read_bytes()
    os.utime(shared_prefix, (1, 1))
    cache.pin(LONG)
    assert shared_prefix.stat().st_mtime > 1 and shared_prefix.read_bytes() == content
    shared_prefix.unlink()
    cache.pin(LONG)
    assert shared_prefix.exists() and cache.enabled


WRITER = """
import sys
from pathlib import Path
from localllm.engine.disk_cache import DiskCache
cache = DiskCache(Path(sys.argv[1]), "model", 300_000)
print("ready", flush=True)
number = 0
while True:
    number += 1
    tokens = [number % 50 + 1, *range(1, 100)]
    cache.store(tokens, 0, bytes([tokens[0]]) * 20_000)
"""


def test_two_processes_share_a_folder_and_one_is_killed(tmp_path: Path) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        cache = DiskCache(tmp_path, "model", 300_000)
        try:
            for writer in writers:
                assert writer.stdout is not None and writer.stdout.readline().strip() == b"ready"
            whole = 0
            while whole < 20:
                assert [writer.poll() for writer in writers] == [None, None]
                for first in range(1, 51):
                    for segment in cache.find([first, *range(1, 100)]):
                        data = cache.load(segment)
                        assert data is None or data == bytes([first]) * 20_000
                        whole += data is not None
        finally:
            for writer in writers:
                writer.kill()
                writer.wait()
                writer.stdout.close()  # type: ignore[union-attr]
    loaded = [cache.load(segment) for first in range(1, 51) for segment in cache.find([first, *range(1, 100)])]
    assert loaded and None not in loaded
