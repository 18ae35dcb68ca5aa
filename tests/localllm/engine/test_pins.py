"""What requests pin outlasts other chats until its time is over, within a share of the memory."""

from collections.abc import Sequence

import pytest

from localllm.engine.engine import Engine
from localllm.engine.memory_tier import MemoryTier
from localllm.engine.pins import Pin
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
