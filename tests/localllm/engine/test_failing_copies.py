"""A runner, or a store, that fails to copy keys, values and states: requests go on, and the log says so once."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_io.model_file import FileState
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.file_digest import FileDigest
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.engine.stream import Completion
from localllm.errors import LocalLLMError
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.waiting import eventually

ONE, TWO = (tuple((at * step + 3) % 63 + 1 for at in range(600)) for step in (7, 11))
FAILURES = [RuntimeError("the device is lost"), MemoryError(), LocalLLMError("no cells left"), OSError(5, "I/O error")]


class Failing(FakeRunner):
    """Keeps states beside keys and values. Calls named in `broken` raise `failure`, imports after a part was added."""

    def __init__(self, failure: Exception, broken: Iterable[str], **described: Any) -> None:
        super().__init__(pages=2000, max_rows=64, **described)
        self.failure, self.broken = failure, set(broken)

    def _meet(self, name: str) -> None:
        if name in self.broken:
            raise self.failure

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        self._meet("export_kv")
        return super().export_kv(sequence, start, stop)

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        if "import_kv" in self.broken and stop - start > 2:
            super().import_kv(sequence, start, stop - 2, data[:-8])
        self._meet("import_kv")
        super().import_kv(sequence, start, stop, data)

    def export_state(self, sequence: int, length: int) -> bytes:
        self._meet("export_state")
        return b"state"

    def import_state(self, sequence: int, data: bytes | memoryview) -> None:
        self._meet("import_state")

    def page_holders(self) -> NDArray[np.int32]:
        self._meet("page_holders")
        return super().page_holders()


def ask(engine: Engine, *prompts: tuple[int, ...]) -> list[Completion]:
    """Answers computed together."""
    streams = [
        engine.submit(GenerationRequest(prompt, SamplingParams(temperature=0), max_tokens=4, ignore_eos=True))
        for prompt in prompts
    ]
    while engine.step():
        engine.check_integrity()
    return [stream.collect() for stream in streams]


def alone(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return ask(Engine(FakeRunner(pages=2000, max_rows=64), FakeVocabulary()), prompt)[0].token_ids


def check(answers: list[Completion], *prompts: tuple[int, ...]) -> None:
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.last.finish_reason is FinishReason.LENGTH
        assert answer.token_ids == alone(prompt)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("broken", ["export_kv", "export_state"])
def test_what_cannot_be_exported_is_not_stored(
    failure: Exception, broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Failing(failure, [broken])
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, "fake", 2**20))
    check(ask(engine, ONE, TWO), ONE, TWO)
    longer = (*ONE, 5, 6)
    check(ask(engine, longer), longer)
    assert [record.message for record in caplog.records if "could not be copied" in record.message] == [
        f"Keys and values could not be copied: {type(failure).__name__}{f': {failure}' if str(failure) else ''}. "
        "Answers go on without copies."
    ]
    runner.broken.clear()  # a failure may pass
    third = (9, *TWO)
    check(ask(engine, third), third)
    engine.close()
    fresh = Failing(failure, [])
    again = Engine(fresh, FakeVocabulary(), disk=DiskCache(tmp_path, "fake", 2**20))
    check(ask(again, third), third)
    assert fresh.rows_computed < 10
    again.close()


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_copies_in_memory_that_cannot_be_made(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    runner = Failing(failure, ["export_kv"], page_size=1, copies_bytes=2**20)
    engine = Engine(runner, FakeVocabulary())
    for prompt in (ONE, TWO, (*ONE, 5)):
        check(ask(engine, prompt), prompt)
    assert caplog.text.count("could not be copied") == 1
    engine.close()


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("broken", ["import_kv", "import_state"])
def test_what_cannot_be_imported_is_computed_again(
    failure: Exception, broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Engine(Failing(failure, []), FakeVocabulary(), disk=DiskCache(tmp_path, "fake", 2**20))
    ask(first, ONE, TWO)
    first.close()
    runner = Failing(failure, [broken])
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, "fake", 2**20))
    answers = ask(engine, (*ONE, 5), (*TWO, 6))
    check(answers, (*ONE, 5), (*TWO, 6))
    assert [(each.last.counts.cached_disk, each.last.counts.cached_memory) for each in answers] == [(0, 0)] * 2
    assert runner.rows_computed >= 1200
    assert caplog.text.count("could not be restored") == 1
    assert engine.stats().reused_disk_tokens == 0
    engine.close()


def test_copies_in_memory_that_cannot_be_imported(caplog: pytest.LogCaptureFixture) -> None:
    runner = Failing(RuntimeError("the device is lost"), ["import_kv"], page_size=1, copies_bytes=2**20)
    engine = Engine(runner, FakeVocabulary())
    for prompt in (ONE, TWO, (*ONE, 5), (*TWO, 7)):
        check(ask(engine, prompt), prompt)
    assert caplog.text.count("could not be restored") == 1
    engine.close()


def test_a_store_that_cannot_be_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory for the header")

    monkeypatch.setattr(DiskCache, "find", fail)
    first = Engine(FakeRunner(pages=2000, max_rows=64), FakeVocabulary(), disk=DiskCache(tmp_path, "fake", 2**20))
    for prompt in (ONE, (*ONE, 5), TWO):
        check(ask(first, prompt), prompt)
    first.close()
    assert caplog.text.count("could not be looked up") == 1


def test_a_snapshot_that_cannot_be_taken_ends_only_its_wish(caplog: pytest.LogCaptureFixture) -> None:
    runner = Failing(RuntimeError("the device is lost"), ["page_holders"])
    engine = Engine(runner, FakeVocabulary())
    asked = engine.inspect()
    check(ask(engine, ONE), ONE)
    assert asked.cancelled()
    runner.broken.clear()
    asked = engine.inspect()
    check(ask(engine, TWO), TWO)
    assert len(asked.result(0).page_holders) == 2000
    engine.close()


@pytest.mark.parametrize("failure", [MemoryError(), RuntimeError("no thread")])
def test_a_digest_that_fails_only_turns_the_store_off(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Callable[[], None]:
        raise failure

    monkeypatch.setattr("localllm.engine.file_digest.hashlib.sha256", fail)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    with model.open("rb") as file:
        digest = FileDigest([FileState.of(model, file.fileno())], tmp_path / "digests.json")
    eventually(lambda: digest.failed, "the digest has ended")
    runner = FakeRunner(pages=2000, max_rows=64)
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path / "kv", "fake", 2**20, digest=digest))
    check(ask(engine, ONE), ONE)
    engine.close()
    assert caplog.text.count("the digest of the model failed") == 1
