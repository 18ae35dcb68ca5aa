"""The common beginning of an agent's conversations outlasts other chats, in memory and on disk, and
changes no answer.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from localllm.engine.disk_cache import SEGMENT_TOKENS, DiskCache
from localllm.engine.engine import Engine
from localllm.engine.memory_tier import MemoryTier
from localllm.engine.request import Counts, GenerationRequest, SamplingParams
from localllm.engine.sequence import KeySpace
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

GREEDY = SamplingParams(temperature=0)
TRUNK = tuple((at * 7) % 63 + 1 for at in range(300))


def answered(engine: Engine, prompt: Sequence[int], trunk: int = 0) -> tuple[Counts, tuple[int, ...]]:
    stream = engine.submit(GenerationRequest(tuple(prompt), GREEDY, max_tokens=3, ignore_eos=True, trunk=trunk))
    while engine.step():
        engine.check_integrity()
    done = stream.collect()
    return done.last.counts, done.token_ids


def others(count: int, length: int = 200) -> list[tuple[int, ...]]:
    """Chats that share nothing with the trunk or with each other."""
    return [(chat + 2, *((at * chat) % 61 + 1 for at in range(length))) for chat in range(1, count + 1)]


def agent(*turns: int) -> tuple[int, ...]:
    return (*TRUNK, 9, *turns)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_only_new_tokens_are_computed_after_other_chats_have_filled_the_cache(can_truncate: bool) -> None:
    engine = Engine(FakeRunner(pages=160, can_truncate=can_truncate), FakeVocabulary())
    first, _ = answered(engine, agent(1, 2, 3), len(TRUNK))
    assert first.cached == 0
    for chat in others(20):
        answered(engine, chat)
    assert engine.stats().evicted_tokens > 1000
    again, tokens = answered(engine, agent(4, 5, 6), len(TRUNK))
    assert again.cached_memory in (len(TRUNK), len(TRUNK) + 1)  # the 9 follows the trunk in both
    engine.close()
    fresh = Engine(FakeRunner(pages=160, can_truncate=can_truncate), FakeVocabulary())
    assert answered(fresh, agent(4, 5, 6))[1] == tokens
    fresh.close()


def test_without_a_trunk_the_same_chats_evict_it() -> None:
    engine = Engine(FakeRunner(pages=160), FakeVocabulary())
    answered(engine, agent(1, 2, 3))
    for chat in others(20):
        answered(engine, chat)
    assert answered(engine, agent(4, 5, 6))[0].cached == 0
    engine.close()


def test_a_trunk_that_is_a_leaf_is_extended_by_a_child() -> None:
    """Compaction: everything after the trunk is dropped, and the conversation restarts from the trunk."""
    engine = Engine(FakeRunner(pages=400), FakeVocabulary())
    answered(engine, agent(1, 2, 3), len(TRUNK))
    for turn in range(5):
        while engine.stats().cached_tokens > len(TRUNK):
            engine.kv.cache.evict(1)
        counts, _ = answered(engine, agent(turn, turn, turn), len(TRUNK))
        assert counts.cached >= len(TRUNK)
    engine.close()


def test_trunks_take_their_share_and_no_more() -> None:
    """Trunks beyond half of the memory are evicted like any chat, least recently used first."""
    engine = Engine(FakeRunner(pages=200), FakeVocabulary())
    trunks = [(chat, *TRUNK[1:]) for chat in (1, 2, 3)]
    for trunk in trunks:
        answered(engine, (*trunk, 5), len(trunk))
    for chat in others(20):
        answered(engine, chat)
    cached = [answered(engine, (*trunk, 6), 0)[0].cached for trunk in reversed(trunks)]
    assert [count >= len(TRUNK) for count in cached] == [True, False, False]
    engine.close()


def test_a_request_that_needs_all_memory_gets_it_in_spite_of_trunks() -> None:
    engine = Engine(FakeRunner(pages=100), FakeVocabulary())
    for first in range(1, 5):
        answered(engine, (first, *TRUNK[:150], 5), 151)
    counts, tokens = answered(engine, others(1, 380)[0])
    assert counts.generated == 3 and len(tokens) == 3
    engine.close()


def test_a_trunk_stays_on_disk_through_other_chats_and_restarts(tmp_path: Path) -> None:
    long = TRUNK * 3
    limit = 80_000

    def process(*prompts: tuple[tuple[int, ...], int]) -> list[Counts]:
        runner = FakeRunner(pages=1000, max_rows=256)
        engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, runner.info.kv_layout, limit))
        found = [answered(engine, prompt, trunk)[0] for prompt, trunk in prompts]
        engine.close()
        return found

    process(((*long, 9, 1), len(long)))
    for chat in others(20, 900):
        process((chat, 0))
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= limit
    (counts,) = process(((*long, 9, 2), len(long)))
    assert counts.cached_disk >= len(long) // SEGMENT_TOKENS * SEGMENT_TOKENS


def test_copies_of_a_trunk_go_last() -> None:
    space, tier = KeySpace((), ""), MemoryTier(60_000)

    def stored(tokens: list[int]) -> None:
        tier.touch(space, tokens)
        for start, stop in [*tier.missing(space, tokens)]:
            tier.store(space, tokens[:stop], start, bytes(8 * (stop - start)))

    stored([*TRUNK, 1])
    tier.pin(space, TRUNK)
    for chat in others(30, 300):
        stored([*chat])
    assert tier.find(space, TRUNK)[-1].useful == len(TRUNK)
    assert tier.bytes <= tier.limit and not tier.find(space, others(1, 300)[0])
