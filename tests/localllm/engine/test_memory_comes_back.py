"""A closed engine's memory is free: neither its answers nor a slow disk keep it."""

import gc
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_io import open_model
from gguf_io.model_file import FileState
from gguf_io.system import open_regular
from localllm.answer.local import LocalModel
from localllm.answer.request import AnswerRequest
from localllm.engine import spill
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.file_digest import FileDigest
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.errors import LocalLLMError
from localllm.placement.loaded_model import load_model
from localllm.settings import Settings
from models import builtin
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

LONG = tuple(at * 7 % 63 + 1 for at in range(1000))


def greedy(prompt: Sequence[int], tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), SamplingParams(temperature=0), max_tokens=tokens, ignore_eos=True)


class Blocked(FakeRunner):
    """Stops inside the second step until the test lets it go on, or makes it fail."""

    def __init__(self, **described: Any) -> None:
        super().__init__(pages=2000, max_rows=256, **described)
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.failure: Exception | None = None

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        if self.batches:
            self.inside.set()
            self.go_on.wait(60)
            if self.failure is not None:
                raise self.failure
        return super().run(tokens, positions, sequences, wanted)


@pytest.mark.parametrize("how", ["cancelled", "failed", "failed within another error", "closed", "finished"])
def test_an_answer_that_is_kept_does_not_keep_the_engine(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("engine", "generation"):  # pytest keeps what is logged, with its traceback
        monkeypatch.setattr(logging.getLogger(f"localllm.engine.{name}"), "disabled", True)
    runner = Blocked()
    engine = Engine(runner, FakeVocabulary())
    engine.start()
    stream = engine.submit(greedy(LONG))
    assert runner.inside.wait(60)
    if how == "cancelled":
        stream.cancel()
    if how == "failed":
        runner.failure = LocalLLMError("the device is lost")
    if how == "failed within another error":
        runner.failure = RuntimeError("the device is lost")
        runner.failure.__context__ = ValueError("before")
    if how == "closed":
        threading.Timer(0.05, runner.go_on.set).start()
        engine.close()
    runner.go_on.set()
    events = [*stream]
    ends = {"cancelled": FinishReason.CANCELLED, "closed": FinishReason.CANCELLED, "finished": FinishReason.LENGTH}
    assert events[-1].finish_reason is ends.get(how, FinishReason.ERROR)
    engine.close()
    kept = weakref.ref(engine), weakref.ref(runner)
    del engine, runner
    gc.collect()
    assert [one() for one in kept] == [None, None]
    stream.cancel()
    assert stream.poll() == []


@pytest.fixture
def builtin_answer() -> Iterator[tuple[LocalModel, Any]]:
    with open_model(builtin.path()):
        pass
    loaded = load_model(builtin.path(), Settings(backend="native", ctx=512, threads=1, disk_cache=False, kv_mib=16))
    model = LocalModel("builtin", loaded)
    stream = model.prepare(AnswerRequest(prompt="Once upon a time", max_tokens=400)).submit()
    yield model, stream
    loaded.close()


def test_an_answer_of_the_cpu_engine_does_not_keep_its_weights(builtin_answer: tuple[LocalModel, Any]) -> None:
    model, stream = builtin_answer
    stream.cancel()
    for _ in stream:
        pass
    kept = weakref.ref(model.loaded.engine.runner)
    model.loaded.close()
    # What a closed model leaves behind is the model's own; the answer alone must not lead to it.
    found, seen = [stream], set()
    while found:
        one = found.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        assert one is not kept(), "the answer leads to the runner"
        found += [part for part in gc.get_referents(one) if not _shared(part)]


def _shared(part: object) -> bool:
    """Modules and their globals lead everywhere."""
    return type(part).__name__ in ("module", "builtin_function_or_method") or (
        isinstance(part, dict) and "__builtins__" in part
    )


class SlowDisk(DiskCache):
    """Writes nothing before the runner is closed."""

    runner: FakeRunner
    waited: list[bool]

    def store(self, tokens: Sequence[int], start: int, kv: bytes, state: bytes = b"") -> None:
        for _ in range(600):
            if self.runner.closed:
                break
            threading.Event().wait(0.05)
        self.waited.append(self.runner.closed)
        super().store(tokens, start, kv, state)


@pytest.mark.parametrize("digested", [True, False])
def test_a_slow_disk_does_not_keep_the_runner(tmp_path: Path, digested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "model").write_bytes(b"weights")
    digest = None
    if not digested:
        with open(file, "rb") as opened:
            state = FileState.of(file, opened.fileno())
        closed = threading.Event()

        def late(path: Path) -> int:
            closed.wait(60)
            return open_regular(path)

        monkeypatch.setattr("localllm.engine.file_digest.open_regular", late)
        monkeypatch.setattr(spill, "DIGEST_S", 60.0)
        digest = FileDigest([state], tmp_path / "digests")
    disk = SlowDisk(tmp_path / "kv", "fake", 1 << 30, digest=digest)
    disk.runner, disk.waited = FakeRunner(pages=2000, max_rows=256), []
    if not digested:
        close = disk.runner.close
        disk.runner.close = lambda: (close(), closed.set())  # type: ignore[method-assign, assignment]
    engine = Engine(disk.runner, FakeVocabulary(), disk=disk)
    stream = engine.submit(greedy(LONG))
    while engine.step():
        pass
    stream.collect()
    engine.close()
    assert disk.waited and all(disk.waited)
    found = disk.find(LONG)
    assert found and found[-1].useful == len(LONG)


def test_few_bytes_wait_for_the_disk_while_there_is_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then closing takes as long as the disk, and everything is still written."""
    monkeypatch.setattr(spill, "available_memory", lambda: 0)
    disk = DiskCache(tmp_path, "fake", 1 << 30)
    engine = Engine(FakeRunner(pages=2000, max_rows=256), FakeVocabulary(), disk=disk)
    stream = engine.submit(greedy(LONG))
    while engine.step():
        pass
    stream.collect()
    engine.close()
    assert disk.find(LONG)[-1].useful == len(LONG)
