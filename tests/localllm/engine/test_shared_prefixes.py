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
SHARED_PREFIX = tuple((at * 7) % 63 + 1 for at in range(300))


def answered(engine: Engine, prompt: Sequence[int], shared_prefix: int = 0) -> tuple[Counts, tuple[int, ...]]:
    stream = engine.submit(
        GenerationRequest(tuple(prompt), GREEDY, max_tokens=3, ignore_eos=True, shared_prefix=shared_prefix)
    )
    while engine.step():
        engine.check_integrity()
    done = stream.collect()
    return done.last.counts, done.token_ids


def others(count: int, length: int = 200) -> list[tuple[int, ...]]:
    """Chats that share nothing with the shared prefix or with each other."""
    return [(chat + 2, *((at * chat) % 61 + 1 for at in range(length))) for chat in range(1, count + 1)]


def agent(*turns: int) -> tuple[int, ...]:
    return (*SHARED_PREFIX, 9, *turns)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_only_new_tokens_are_computed_after_other_chats_have_filled_the_cache(can_truncate: bool) -> None:
    engine = Engine(FakeRunner(pages=160, can_truncate=can_truncate), FakeVocabulary())
    first, _ = answered(engine, agent(1, 2, 3), len(SHARED_PREFIX))
    assert first.cached == 0
    for chat in others(20):
        answered(engine, chat)
    assert engine.stats().evicted_tokens > 1000
    again, tokens = answered(engine, agent(4, 5, 6), len(SHARED_PREFIX))
    shared = len(SHARED_PREFIX)
    assert again.cached_memory in (shared, shared + 1)  # the 9 follows the shared prefix in both
    engine.close()
    fresh = Engine(FakeRunner(pages=160, can_truncate=can_truncate), FakeVocabulary())
    assert answered(fresh, agent(4, 5, 6))[1] == tokens
    fresh.close()


def test_without_a_shared_prefix_the_same_chats_evict_it() -> None:
    engine = Engine(FakeRunner(pages=160), FakeVocabulary())
    answered(engine, agent(1, 2, 3))
    for chat in others(20):
        answered(engine, chat)
    assert answered(engine, agent(4, 5, 6))[0].cached == 0
    engine.close()


def test_a_shared_prefix_that_is_a_leaf_is_extended_by_a_child() -> None:
    """Compaction: everything after the shared prefix is dropped, and the conversation restarts from there."""
    engine = Engine(FakeRunner(pages=400), FakeVocabulary())
    answered(engine, agent(1, 2, 3), len(SHARED_PREFIX))
    for turn in range(5):
        while engine.stats().cached_tokens > len(SHARED_PREFIX):
            engine.kv.cache.evict(1)
        counts, _ = answered(engine, agent(turn, turn, turn), len(SHARED_PREFIX))
        assert counts.cached >= len(SHARED_PREFIX)
    engine.close()


def test_shared_prefixes_take_their_share_and_no_more() -> None:
    """Shared prefixes beyond half of the memory are evicted like any chat, least recently used first."""
    engine = Engine(FakeRunner(pages=200), FakeVocabulary())
    shared_prefixes = [(chat, *SHARED_PREFIX[1:]) for chat in (1, 2, 3)]
    for shared_prefix in shared_prefixes:
        answered(engine, (*shared_prefix, 5), len(shared_prefix))
    for chat in others(20):
        answered(engine, chat)
    cached = [answered(engine, (*shared_prefix, 6), 0)[0].cached for shared_prefix in reversed(shared_prefixes)]
    assert [count >= len(SHARED_PREFIX) for count in cached] == [True, False, False]
    engine.close()


def test_a_request_that_needs_all_memory_gets_it_in_spite_of_shared_prefixes() -> None:
    engine = Engine(FakeRunner(pages=100), FakeVocabulary())
    for first in range(1, 5):
        answered(engine, (first, *SHARED_PREFIX[:150], 5), 151)
    counts, tokens = answered(engine, others(1, 380)[0])
    assert counts.generated == 3 and len(tokens) == 3
    engine.close()


def test_a_shared_prefix_stays_on_disk_through_other_chats_and_restarts(tmp_path: Path) -> None:
    long = SHARED_PREFIX * 3
    limit = 80_000

    def process(*prompts: tuple[tuple[int, ...], int]) -> list[Counts]:
        runner = FakeRunner(pages=1000, max_rows=256)
        engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, runner.info.kv_layout, limit))
        found = [answered(engine, prompt, shared_prefix)[0] for prompt, shared_prefix in prompts]
        engine.close()
        return found

    process(((*long, 9, 1), len(long)))
    for chat in others(20, 900):
        process((chat, 0))
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) <= limit
    (counts,) = process(((*long, 9, 2), len(long)))
    assert counts.cached_disk >= len(long) // SEGMENT_TOKENS * SEGMENT_TOKENS


def test_copies_of_a_shared_prefix_go_last() -> None:
    space, tier = KeySpace((), ""), MemoryTier(60_000)

    def stored(tokens: list[int]) -> None:
        tier.touch(space, tokens)
        for start, stop in [*tier.missing(space, tokens)]:
            tier.store(space, tokens[:stop], start, bytes(8 * (stop - start)))

    stored([*SHARED_PREFIX, 1])
    tier.pin(space, SHARED_PREFIX)
    for chat in others(30, 300):
        stored([*chat])
    assert tier.find(space, SHARED_PREFIX)[-1].useful == len(SHARED_PREFIX)
    assert tier.bytes <= tier.limit and not tier.find(space, others(1, 300)[0])
