"""What a request would reuse and compute: foretold exactly, and asking changes nothing."""

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path

import numpy as np
import pytest

from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, Counts, GenerationRequest, SamplingParams
from localllm.engine.restore_costs import COMPUTED, DISK, LEAST_RESTORES, MEMORY, RestoreCosts
from localllm.errors import ContextOverflowError
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary


def asking(prompt: Sequence[int], most: int = 3, **options: object) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), SamplingParams(temperature=0), max_tokens=most, ignore_eos=True, **options)  # type: ignore[arg-type]


def told(engine: Engine, request: GenerationRequest) -> Counts:
    future = engine.expected_counts(request)
    engine.step()
    return future.result(timeout=0)


def counted(engine: Engine, request: GenerationRequest) -> Counts:
    stream = engine.submit(request)
    while engine.step():
        pass
    engine.check_integrity()
    return stream.collect().last.counts


def engine_of(folder: Path, costs: RestoreCosts | None, **described: object) -> Engine:
    """With a disk tier, or copies in memory: how much waits for the disk's thread depends on time."""
    runner = FakeRunner(pages=300, max_rows=64, **described)  # type: ignore[arg-type]
    disk = None if runner.info.copies_bytes else DiskCache(folder, "fake", 1 << 30)
    return Engine(runner, FakeVocabulary(), disk=disk, costs=costs)


def costs_with(restored_s: float) -> RestoreCosts:
    costs = RestoreCosts()
    for _ in range(LEAST_RESTORES):
        costs.observe(COMPUTED, 100, 0.1)
        costs.observe(DISK, 100, 100 * restored_s)
        costs.observe(MEMORY, 100, 50 * restored_s)
    costs.observe = lambda *_: None  # type: ignore[method-assign] - the clock of a test says nothing
    return costs


@pytest.mark.parametrize("restored_s", [None, 1e-5, 1.0])
@pytest.mark.parametrize("kind", ["pages", "copies", "states"])
def test_the_counts_are_those_with_which_the_request_then_starts(
    tmp_path: Path, kind: str, restored_s: float | None
) -> None:
    """Beside an engine that is never asked: both must do the same."""
    described = {"copies": {"copies_bytes": 1 << 14}, "states": {"can_truncate": False}}.get(kind, {})

    def engines() -> list[Engine]:
        found = []
        for name in ("asked", "silent"):
            costs = None if restored_s is None else costs_with(restored_s)
            found.append(engine_of(tmp_path / name, costs, **described))
        return found

    random = np.random.default_rng(3)
    chats = [random.integers(1, 64, size=400).tolist() for _ in range(4)]
    asked, silent = engines()
    reused = 0
    for turn in range(24):
        if turn % 8 == 7:
            for engine in (asked, silent):
                engine.close()
            asked, silent = engines()
        first, other = chats[random.integers(4)], chats[random.integers(4)]
        prompt = [*first[: random.integers(20, 300)], *other[: random.integers(1, 40)]]
        request = asking(prompt, shared_prefix=16 if turn % 3 else 0)
        before = asked.stats(), asked.kv.cache.tree()
        foretold = [told(asked, asking(each)) for each in (*chats, prompt)]
        assert (asked.stats(), asked.kv.cache.tree()) == before
        found = counted(asked, request)
        assert found == counted(silent, request)
        assert (found.prompt, found.cached, found.cached_disk, found.recomputed) == (
            foretold[-1].prompt,
            foretold[-1].cached,
            foretold[-1].cached_disk,
            foretold[-1].recomputed,
        )
        assert asked.stats() == silent.stats()
        reused += found.cached
    assert reused
    for engine in (asked, silent):
        engine.close()


def test_a_running_answer_counts_as_computed(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, None)
    prompt = [at % 60 + 1 for at in range(200)]
    stream = engine.submit(asking(prompt, 20))
    engine.step()  # the first chunk
    assert told(engine, asking([*prompt, 5])).cached == 200 - 1
    stream.cancel()
    while engine.step():
        pass
    engine.close()


def test_what_was_dropped_is_not_counted(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, None, max_context=128)
    with pytest.raises(ContextOverflowError):
        engine.expected_counts(asking([1] * 200))
    rolled = told(engine, asking([1] * 200, context_policy=ContextPolicy.ROLLING))
    assert 0 < rolled.prompt < 128 and rolled.dropped_tokens == 200 - rolled.prompt
    engine.close()


def test_a_stopped_engine_tells_nothing(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, None)
    waiting: Future[Counts] = engine.expected_counts(asking([1, 2, 3]))
    engine.close()
    for future in (waiting, engine.expected_counts(asking([1, 2, 3]))):
        with pytest.raises(CancelledError):
            future.result(timeout=0)
