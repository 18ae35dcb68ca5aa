"""Restoring is chosen where it is faster, by costs that the test sets: no real time decides."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine import measured, restore_costs
from localllm.engine.disk_cache import DiskCache, Segment
from localllm.engine.engine import Engine
from localllm.engine.measured import MOST_KEPT, Measured, key_of
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.restore_costs import COMPUTED, DISK, LEAST_RESTORES, MEMORY, RestoreCosts
from localllm.engine.sequence import KeySpace
from localllm.engine.stream import Completion
from tests.fakes.fake_runner import USUAL, FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

LONG = tuple(at * 11 % 63 + 1 for at in range(1000))
OTHER = tuple(at * 13 % 63 + 1 for at in range(1000))


class Timed(FakeRunner):
    """A device whose clock advances by a fixed time for each row computed, and for each token restored."""

    def __init__(self, computed_s: float, restored_s: float, **described: object) -> None:
        super().__init__(pages=2000, max_rows=256, **described)
        self.now, self.computed_s, self.restored_s = 0.0, computed_s, restored_s

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        self.now += self.computed_s * len(tokens)
        return super().run(tokens, positions, sequences, wanted)

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        self.now += self.restored_s * (stop - start)
        super().import_kv(sequence, start, stop, data)


def engine_on(runner: Timed, folder: Path, costs: RestoreCosts | None) -> Engine:
    disk = DiskCache(folder, "fake", 1 << 30)
    return Engine(runner, FakeVocabulary(), disk=disk, clock=lambda: runner.now, costs=costs)


def ask(engine: Engine, prompt: Sequence[int]) -> Completion:
    stream = engine.submit(
        GenerationRequest(tuple(prompt), SamplingParams(temperature=0), max_tokens=4, ignore_eos=True)
    )
    while engine.step():
        pass
    engine.check_integrity()
    return stream.collect()


def asked_anew(runner: Timed, folder: Path, costs: RestoreCosts | None, prompt: Sequence[int] = LONG) -> Completion:
    """The answer of a new engine, which finds on disk what the one before has left."""
    engine = engine_on(runner, folder, costs)
    done = ask(engine, prompt)
    engine.close()
    return done


@pytest.mark.parametrize("restored_s", [1e-4, 9.9e-4, 1.01e-3, 2e-3, 1.0])
def test_a_prefix_is_restored_from_disk_only_where_that_is_faster(tmp_path: Path, restored_s: float) -> None:
    """Computing takes a millisecond for each token. Two restores are needed to know what they cost."""
    costs = RestoreCosts()
    first = asked_anew(Timed(1e-3, restored_s), tmp_path, costs)
    assert first.last.counts.cached == first.last.counts.recomputed == 0
    for _ in range(LEAST_RESTORES):
        done = asked_anew(Timed(1e-3, restored_s), tmp_path, costs)
        assert done.last.counts.cached_disk == len(LONG) - 1 and done.token_ids == first.token_ids
        assert done.last.timings.restore_s == pytest.approx(restored_s * 1000, rel=0.03)
    done = asked_anew(Timed(1e-3, restored_s), tmp_path, costs)
    assert done.token_ids == first.token_ids
    slower = 1000 * (restored_s - 1e-3) > restore_costs.LEAST_SAVED_S
    assert done.last.counts.cached_disk == (0 if slower else len(LONG) - 1)
    assert done.last.counts.recomputed == (len(LONG) - 1 if slower else 0)
    ttft = done.last.timings.ttft_s
    assert ttft <= min(1.0, restored_s * 1000) + restore_costs.LEAST_SAVED_S + 0.05


def test_without_costs_everything_stored_is_restored(tmp_path: Path) -> None:
    for count in (0, *(4 * [len(LONG) - 1])):
        assert asked_anew(Timed(1e-3, 1.0), tmp_path, None).last.counts.cached_disk == count


def test_restoring_is_tried_again_and_taken_once_it_is_fast(tmp_path: Path) -> None:
    """A disk that was busy is not avoided for ever."""
    costs = RestoreCosts()
    for _ in range(LEAST_RESTORES + 2):
        last = asked_anew(Timed(1e-3, 2e-3), tmp_path, costs)
    assert last.last.counts.recomputed
    tries = 0
    while not asked_anew(Timed(1e-3, 1e-4), tmp_path, costs).last.counts.cached_disk:
        tries += 1
        assert tries < 200
    assert tries > 20  # a restore that is twice as slow is rare
    assert asked_anew(Timed(1e-3, 1e-4), tmp_path, costs).last.counts.cached_disk


def test_copies_in_memory_and_the_disk_have_costs_of_their_own(tmp_path: Path) -> None:
    costs = RestoreCosts()
    for _ in range(LEAST_RESTORES):
        costs.observe(COMPUTED, 100, 0.1)
        costs.observe(DISK, 100, 0.2)
        costs.observe(MEMORY, 100, 0.01)
    assert costs.saved_s(MEMORY, 1000) == pytest.approx(0.9) and costs.saved_s(DISK, 1000) == pytest.approx(-1.0)
    assert costs.pays(MEMORY, 1000) and not costs.pays(DISK, 1000)
    assert costs.pays(DISK, 4)  # what would be saved is too little to be sure of


def test_fewer_copies_in_memory_are_taken_before_more_on_a_slow_disk(tmp_path: Path) -> None:
    """Costs decide between the tiers too."""
    costs = RestoreCosts()
    for _ in range(LEAST_RESTORES):
        costs.observe(COMPUTED, 100, 0.1)
        costs.observe(DISK, 100, 0.09)
        costs.observe(MEMORY, 100, 0.001)
    asked_anew(Timed(1e-3, 1e-4), tmp_path, None)
    for kept, expected in ((0, "disk"), (600, "memory")):
        runner = Timed(1e-3, 1e-4, copies_bytes=1 << 20)
        engine = engine_on(runner, tmp_path, costs)
        if kept:
            copies = engine.kv.copies
            assert copies is not None
            sequence = runner.create_sequence()
            for first in range(0, 512, 256):
                rows = range(first, first + 256)
                runner.run(LONG[first : first + 256], rows, [sequence] * 256, [])
                copies.store(KeySpace(), LONG[: first + 256], first, runner.export_kv(sequence, first, first + 256))
            runner.free_sequence(sequence)
        counts = ask(engine, LONG).last.counts
        engine.close()
        assert counts.cached_disk == (999 if expected == "disk" else 0)
        assert counts.cached_memory == (0 if expected == "disk" else 512)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    files: dict[str, bytes] = {}
    monkeypatch.setattr(measured, "read_measured", files.get)
    monkeypatch.setattr(measured, "write_measured", files.__setitem__)
    yield files


def test_what_was_measured_is_known_in_the_next_process(tmp_path: Path, kept: dict[str, bytes]) -> None:
    for _ in range(LEAST_RESTORES + 1):
        asked_anew(Timed(1e-3, 2e-3), tmp_path, RestoreCosts(key_of(USUAL, "here")))
    for placed, recomputed in (("here", len(LONG) - 1), ("on another device", 0)):
        done = asked_anew(Timed(1e-3, 2e-3), tmp_path, RestoreCosts(key_of(USUAL, placed)))
        assert done.last.counts.recomputed == recomputed


@pytest.mark.parametrize("data", [b"[]", b"{}", b'{"key": 1}', b'{"key": {"disk": [0, 3], "computed": "x"}}'])
def test_invalid_costs_are_not_used(kept: dict[str, bytes], data: bytes) -> None:
    kept["restore_costs"] = data
    costs = RestoreCosts("key")
    assert costs.saved_s(DISK, 100) == 100
    costs.observe(COMPUTED, 100, 1.0)
    costs.keep()
    assert RestoreCosts("key").saved_s(DISK, 100) == pytest.approx(1.0)


def test_costs_of_few_models_are_kept(kept: dict[str, bytes]) -> None:
    for number in range(MOST_KEPT + 10):
        costs = RestoreCosts(f"model {number}")
        costs.observe(COMPUTED, 100, 1.0)
        costs.keep()
    read = [Measured("restore_costs", f"model {number}").read() for number in range(MOST_KEPT + 10)]
    assert [bool(each) for each in read] == [False] * 10 + [True] * MOST_KEPT
    assert RestoreCosts("model 0").saved_s(DISK, 100) == 100


class WatchedDisk(DiskCache):
    """Notes which segments are being read, or were."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "fake", 1 << 30)
        self.begun: dict[int, threading.Event] = {}

    def load(self, segment: Segment) -> memoryview | None:
        self.begun.setdefault(segment.start, threading.Event()).set()
        return super().load(segment)


class Waiting(FakeRunner):
    """Imports a segment only while the next one is being read."""

    disk: WatchedDisk

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        if stop < 900:
            assert self.disk.begun.setdefault(stop, threading.Event()).wait(60)
        super().import_kv(sequence, start, stop, data)


def test_segments_are_read_while_others_are_imported(tmp_path: Path) -> None:
    first = asked_anew(Timed(1e-3, 1e-4), tmp_path, None)
    runner = Waiting(pages=2000, max_rows=256)
    runner.disk = WatchedDisk(tmp_path)
    engine = Engine(runner, FakeVocabulary(), disk=runner.disk)
    done = ask(engine, LONG)
    assert done.token_ids == first.token_ids and done.last.counts.cached_disk == len(LONG) - 1
    assert {*runner.disk.begun} >= {0, 256, 512, 768}
    engine.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("kv-reader")]
