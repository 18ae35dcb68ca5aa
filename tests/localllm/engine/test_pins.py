"""What requests pin outlasts other chats until its time is over, within a share of the memory."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from localllm.engine.disk_cache import SEGMENT_TOKENS, DiskCache
from localllm.engine.engine import Engine
from localllm.engine.memory_tier import MemoryTier
from localllm.engine.pins import Pin, PinRecord
from localllm.engine.request import Counts, GenerationRequest, SamplingParams
from localllm.engine.sequence import KeySpace
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

GREEDY = SamplingParams(temperature=0)
BOOK = tuple((at * 7) % 63 + 1 for at in range(300))


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def engine_of(clock: Clock, share: float = 0.5, **runner: object) -> Engine:
    return Engine(
        FakeRunner(**{"pages": 640, **runner}),  # type: ignore[arg-type]
        FakeVocabulary(),
        clock=clock,
        pinned_share=share,
    )


def answered(engine: Engine, prompt: Sequence[int], *pins: Pin, background: bool = False) -> Counts:
    request = GenerationRequest(tuple(prompt), GREEDY, max_tokens=3, ignore_eos=True, pins=pins, background=background)
    stream = engine.submit(request)
    while engine.step():
        engine.check_integrity()
    return stream.collect().last.counts


def fill(engine: Engine, count: int = 20) -> None:
    """Chats that share nothing with the book or with each other."""
    for chat in range(1, count + 1):
        answered(engine, (chat + 2, *((at * chat) % 61 + 1 for at in range(200))))


def asked(*question: int) -> tuple[int, ...]:
    return (*BOOK, 9, *question)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_pinned_beginning_outlasts_other_chats_until_its_time_is_over(can_truncate: bool) -> None:
    clock = Clock()
    engine = engine_of(clock, can_truncate=can_truncate)
    first = answered(engine, asked(1, 2), Pin(len(BOOK), 300))
    assert (first.cached, first.pinned) == (0, len(BOOK))
    clock.now += 299
    fill(engine)
    again = answered(engine, asked(3, 4))
    assert again.cached in (len(BOOK), len(BOOK) + 1) and again.pinned == 0
    clock.now += 2
    fill(engine)
    assert answered(engine, asked(5, 6)).cached == 0
    engine.close()


def test_each_pinning_request_prolongs_the_time_and_tells_only_what_it_wrote() -> None:
    clock = Clock()
    engine = engine_of(clock)
    answered(engine, asked(1, 2), Pin(len(BOOK), 300))
    for _ in range(3):
        clock.now += 200
        fill(engine)
        counts = answered(engine, asked(3, 4), Pin(len(BOOK), 300))
        assert counts.cached >= len(BOOK) and counts.pinned == 0
    engine.close()


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_pinned_conversation_grows(can_truncate: bool) -> None:
    clock = Clock()
    engine = engine_of(clock, can_truncate=can_truncate)
    prompt, before = asked(1, 2), 0
    for turn in range(4):
        counts = answered(engine, prompt, Pin(len(prompt), 300))
        assert counts.pinned + counts.cached == len(prompt)
        assert counts.cached >= before - 20
        before = len(prompt)
        prompt = (*prompt, *((turn + at) % 60 + 1 for at in range(50)))
        fill(engine)
    engine.close()


def test_pins_take_their_share_and_no_more_by_priority() -> None:
    clock = Clock()
    engine = engine_of(clock, share=0.3)  # 768 tokens
    important, usual, later = ((chat, *BOOK) for chat in (1, 2, 3))
    answered(engine, (*usual, 9), Pin(301, 300))
    answered(engine, (*important, 9), Pin(301, 300, priority=-5))
    answered(engine, (*later, 9), Pin(301, 300))
    fill(engine)
    found = [answered(engine, (*one, 9)).cached >= 300 for one in (important, later, usual)]
    assert found == [True, True, False]
    engine.close()


def test_a_longer_pin_than_the_share_is_cut_to_it() -> None:
    engine = engine_of(Clock(), share=0.1)  # 256 tokens
    assert answered(engine, asked(1, 2), Pin(len(BOOK), 300)).pinned == 256
    fill(engine)
    assert answered(engine, asked(1, 2)).cached == 256
    engine.close()


def test_without_a_share_or_in_the_background_nothing_is_pinned() -> None:
    engine = engine_of(Clock(), share=0.0)
    assert answered(engine, asked(1, 2), Pin(len(BOOK), 300)).pinned == 0
    engine.close()
    engine = engine_of(Clock())
    assert answered(engine, asked(1, 2), Pin(len(BOOK), 300), background=True).pinned == 0
    engine.close()


def test_a_request_that_needs_all_memory_gets_it() -> None:
    engine = engine_of(Clock(), share=0.9)
    answered(engine, asked(1, 2), Pin(len(BOOK), 3600))
    long = tuple((at * 11) % 60 + 1 for at in range(158 * 16))
    counts = answered(engine, long)
    assert counts.prompt == len(long) and counts.generated == 3
    engine.close()


def test_copies_in_main_memory_keep_pins_last() -> None:
    clock = Clock()
    tier = MemoryTier(10_000, 5_000, clock)
    space = KeySpace()
    tier.store(space, [1] * 10, 0, b"x" * 3000)
    tier.keep(space, [1] * 10, Pin(10, 60))
    for token in range(2, 8):
        tier.store(space, [token] * 10, 0, b"x" * 3000)
    assert tier.holds(space, [1] * 10) and not tier.holds(space, [2] * 10)
    clock.now += 61
    for token in range(8, 12):
        tier.store(space, [token] * 10, 0, b"x" * 3000)
    assert not tier.holds(space, [1] * 10)


class Restarted:
    """Engines that share a folder on disk and nothing else, one after the other."""

    def __init__(self, folder: Path, limit: int, can_truncate: bool = True, share: float = 0.5) -> None:
        self.folder, self.clock = folder, Clock()
        self._limit, self._can_truncate, self._share = limit, can_truncate, share

    def answered(self, prompt: Sequence[int], *pins: Pin) -> Counts:
        runner = FakeRunner(pages=640, can_truncate=self._can_truncate)
        disk = DiskCache(self.folder, runner.info.kv_layout, self._limit, pinned_share=self._share, clock=self.clock)
        engine = Engine(runner, FakeVocabulary(), clock=self.clock, pinned_share=self._share, disk=disk)
        counts = answered(engine, prompt, *pins)
        engine.close()
        return counts

    def fill(self) -> None:
        """Chats that share nothing, more than fit on the disk."""
        for chat in range(1, 25):
            self.answered((chat, *((at * chat) % 61 + 1 for at in range(300))))

    def pins(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.pin"))


def bytes_of(folder: Path, tokens: int) -> int:
    """What so many tokens take on the disk."""
    Restarted(folder, 2**30).answered([1] * tokens)
    return sum(path.stat().st_size for path in folder.glob("*/*.kv"))


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_pin_outlasts_restarts_on_disk_until_its_time_is_over(can_truncate: bool, tmp_path: Path) -> None:
    process = Restarted(tmp_path / "kv", 8 * bytes_of(tmp_path / "one", 300), can_truncate)
    process.answered(asked(1, 2), Pin(len(BOOK), 3600))
    kept = len(BOOK) // SEGMENT_TOKENS * SEGMENT_TOKENS if can_truncate else len(BOOK)
    for _ in range(2):
        process.clock.now += 1700
        process.fill()
        assert process.answered(asked(3, 4)).cached_disk >= kept
    process.clock.now += 201
    process.fill()
    assert process.answered(asked(5, 6)).cached_disk == 0
    assert not process.pins()


def test_a_later_pin_prolongs_the_one_on_disk_and_a_shorter_one_does_not_cut_it(tmp_path: Path) -> None:
    process = Restarted(tmp_path, 2**30)
    for seconds, own, until, priority in ((300, 2, 1300, 2), (60, -1, 1300, -1), (600, 3, 1600, -1)):
        process.answered(asked(1), Pin(len(BOOK), seconds, own))
        (record,) = process.pins()
        assert json.loads(record.read_text()) == {"until": until, "seconds": until - 1000, "priority": priority}


def test_pins_on_disk_take_their_share_and_no_more_by_priority(tmp_path: Path) -> None:
    process = Restarted(tmp_path / "kv", 8 * bytes_of(tmp_path / "one", 300), share=0.15)  # two segments
    important, usual, later = ((chat, *BOOK) for chat in (1, 2, 3))
    process.answered((*usual, 9), Pin(301, 3000))
    process.clock.now += 1
    process.answered((*important, 9), Pin(301, 3000, priority=-5))
    process.clock.now += 1
    process.answered((*later, 9), Pin(301, 3000))
    process.fill()
    found = [process.answered((*one, 9)).cached_disk >= SEGMENT_TOKENS for one in (important, later, usual)]
    assert found == [True, True, False]


GOOD = asdict(PinRecord(2000.0, 1500.0, 0))


@pytest.mark.parametrize(
    ("content", "stays"),
    [
        (json.dumps(GOOD), True),
        (json.dumps(GOOD | {"until": 999.0}), False),
        (json.dumps(GOOD | {"until": 9000.0}), False),  # written by a clock that has been set back
        (json.dumps(GOOD | {"until": float("nan")}), False),
        (json.dumps(GOOD | {"until": "2000"}), False),
        (json.dumps(GOOD | {"priority": 0.5}), False),
        (json.dumps(GOOD | {"kind": "newer"}), False),
        (json.dumps({"until": 2000.0}), False),
        (json.dumps(GOOD)[:-5], False),
        ("[1, 2, 3]", False),
        ("[" * 1024, False),
        ("", False),
        (json.dumps(GOOD) + " " * 2000, True),
    ],
)
def test_old_and_damaged_records_are_dropped(content: str, stays: bool, tmp_path: Path) -> None:
    process = Restarted(tmp_path, 2**30)
    process.answered(asked(1), Pin(len(BOOK), 300))
    (record,) = process.pins()
    record.write_text(content)
    others = [record.with_name(name) for name in ("my.pin", f"{'a' * 31}.pin", "notes.txt")]
    for other in others:
        other.write_text(content)
    assert process.answered(asked(2)).cached_disk >= SEGMENT_TOKENS
    assert record.exists() == stays
    assert all(other.exists() for other in others)


def test_without_a_share_nothing_is_pinned_on_disk(tmp_path: Path) -> None:
    process = Restarted(tmp_path, 2**30, share=0.0)
    process.answered(asked(1), Pin(len(BOOK), 300))
    assert not process.pins()
