"""Copies of prefixes in main memory: what leaves the runner comes back unchanged, within the limit."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine import disk_cache, memory_tier
from localllm.engine.engine import Engine
from localllm.engine.memory_tier import MemoryTier
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.sequence import KeySpace
from localllm.engine.stream import Completion
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

SPACE, OTHER = KeySpace(), KeySpace(namespace="other")
FIRST, SECOND = (tuple((at * step + step) % 63 + 1 for at in range(600)) for step in (7, 11))


class Copying(FakeRunner):
    """A runner with copies of up to so many bytes; counts imported and exported tokens."""

    def __init__(self, copies_bytes: int = 2**20) -> None:
        super().__init__(pages=2000, page_size=1, max_rows=64, copies_bytes=copies_bytes)
        self.moved = {"in": 0, "out": 0}

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        self.moved["out"] += stop - start
        return super().export_kv(sequence, start, stop)

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        self.moved["in"] += stop - start
        super().import_kv(sequence, start, stop, data)


def ask(engine: Engine, prompt: Sequence[int], most: int = 4) -> Completion:
    request = GenerationRequest(tuple(prompt), SamplingParams(temperature=0), max_tokens=most, ignore_eos=True)
    stream = engine.submit(request)
    while engine.step():
        engine.check_integrity()
    return stream.collect()


def alone(prompt: Sequence[int]) -> tuple[int, ...]:
    return ask(Engine(FakeRunner(pages=2000), FakeVocabulary()), prompt).token_ids


def taken(runner: FakeRunner) -> int:
    return runner.info.pages_total - runner.pages_free()


def test_an_idle_chat_is_moved_out_for_another_prompt_and_restored_on_continuation() -> None:
    runner = Copying()
    engine = Engine(runner, FakeVocabulary())
    answer = ask(engine, FIRST)
    assert (taken(runner), runner.moved["out"]) == (603, 603)  # copied, and still in the runner
    ask(engine, SECOND)
    assert taken(runner) == 603  # only the second
    turn = (*FIRST, *answer.token_ids, 5, 6)
    before = runner.rows_computed
    done = ask(engine, turn)
    assert (done.last.counts.cached_memory, done.last.counts.cached_disk) == (603, 0)
    assert runner.rows_computed - before == 3 + 3
    assert done.token_ids == alone(turn)
    assert engine.stats().reused_memory_tokens == 603
    # The source of a restore is not copied again.
    assert runner.moved == {"in": 603, "out": 603 + 603 + 97}
    engine.close()


def test_continuing_an_idle_chat_finds_its_kv_in_place() -> None:
    runner = Copying()
    engine = Engine(runner, FakeVocabulary())
    answer = ask(engine, FIRST)
    assert ask(engine, (*FIRST, *answer.token_ids, 9)).last.counts.cached_memory == 603
    assert runner.moved["in"] == 0
    engine.close()


def test_a_branch_uses_the_common_part_to_the_single_token() -> None:
    runner = Copying()
    engine = Engine(runner, FakeVocabulary())
    ask(engine, FIRST)
    ask(engine, SECOND)
    branch = (*FIRST[:300], 9, 8, 7)
    done = ask(engine, branch)
    assert (done.last.counts.cached_memory, done.token_ids) == (300, alone(branch))
    engine.close()


def test_what_has_no_copies_yet_stays() -> None:
    runner = Copying()
    engine = Engine(runner, FakeVocabulary())
    engine.submit(GenerationRequest(FIRST, SamplingParams(temperature=0), max_tokens=4, ignore_eos=True))
    while engine.stats().running or engine.stats().waiting:
        engine.step()
    engine.submit(GenerationRequest(SECOND, SamplingParams(temperature=0), max_tokens=4, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert taken(runner) > 603
    while engine.step():
        engine.check_integrity()
    ask(engine, (7, 7, 7))
    assert taken(runner) < 20
    engine.close()


def test_without_room_for_copies_all_stays() -> None:
    runner = Copying(copies_bytes=100)
    engine = Engine(runner, FakeVocabulary())
    ask(engine, FIRST)
    ask(engine, SECOND)
    assert taken(runner) == 2 * 603
    assert engine.stats().copies_bytes <= engine.stats().copies_limit == 100
    engine.close()


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory_tier, disk_cache):
        monkeypatch.setattr(module, "SEGMENT_TOKENS", 8)


def copy(tier: MemoryTier, tokens: list[int]) -> None:
    for start, stop in list(tier.missing(SPACE, tokens)):
        tier.store(SPACE, tokens[:stop], start, np.array(tokens[start:stop], np.int32).tobytes())


tokens_lists = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=40), min_size=1, max_size=12)


@given(texts=tokens_lists, asked=st.lists(st.integers(1, 3), min_size=1, max_size=40))
def test_nothing_is_found_for_other_tokens(texts: list[list[int]], asked: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (memory_tier, disk_cache):
            patch.setattr(module, "SEGMENT_TOKENS", 8)
        tier = MemoryTier(2**20)
        for text in texts:
            copy(tier, text)
            assert tier.holds(SPACE, text) and not list(tier.missing(SPACE, text))
        found = tier.find(SPACE, asked)
    at = 0
    for segment in found:
        assert segment.start == at and at < segment.useful <= segment.stop
        stored = np.frombuffer(segment.kv, np.int32).tolist()
        assert len(stored) == segment.stop - segment.start
        assert stored[: segment.useful - at] == asked[at : segment.useful]
        at = segment.stop
    best = max(len(common(text, asked)) for text in texts)
    assert (found[-1].useful if found else 0) == best
    assert tier.bytes == sum(len(node.kv) + 8 * len(node.tokens) for node in every(tier._roots[SPACE]))


def common(a: list[int], b: list[int]) -> list[int]:
    return a[: next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def every(node: memory_tier._Node) -> list[memory_tier._Node]:
    return [one for child in node.children for one in (child, *every(child))]


def test_spaces_share_nothing_but_the_limit(short_segments: None) -> None:
    tier = MemoryTier(2 * 8 * 12)
    copy(tier, [1] * 8)
    assert tier.holds(SPACE, [1] * 8) and not tier.holds(OTHER, [1] * 8) and not tier.find(OTHER, [1] * 8)
    for tokens in ([1] * 8, [2] * 8):
        tier.store(OTHER, tokens, 0, bytes(32))
    assert tier.holds(OTHER, [1] * 8) and tier.holds(OTHER, [2] * 8) and not tier.holds(SPACE, [1] * 8)


def test_over_the_limit_the_least_recently_used_go_from_their_ends(short_segments: None) -> None:
    tier = MemoryTier(3 * 8 * 12)  # three whole segments: per token 4 bytes of KV and 8 of its id
    old, new = [1] * 16, [2] * 16
    copy(tier, old)
    copy(tier, new)
    assert tier.bytes <= tier.limit
    assert tier.holds(SPACE, new) and tier.holds(SPACE, old[:8]) and not tier.holds(SPACE, old)
    tier.touch(SPACE, old)
    copy(tier, [3] * 8)
    assert tier.holds(SPACE, old[:8]) and tier.holds(SPACE, new[:8]) and not tier.holds(SPACE, new)
    copy(tier, [4] * 40)
    assert tier.bytes <= tier.limit


def test_a_grown_end_replaces_the_shorter_one(short_segments: None) -> None:
    tier = MemoryTier(2**20)
    for length in (11, 14, 30):
        copy(tier, list(range(1, length + 1)))
    assert [(one.start, one.stop) for one in tier.find(SPACE, list(range(1, 31)))] == [
        (0, 8),
        (8, 16),
        (16, 24),
        (24, 30),
    ]
    assert tier.bytes == 30 * 12


def test_long_chains_go_segment_by_segment_from_their_ends(short_segments: None) -> None:
    tier, old = MemoryTier(4 * 8 * 12), [1] * 32
    copy(tier, old)
    left = []
    for token in (2, 3, 4, 5):
        copy(tier, [token] * 8)
        left.append(max((one.useful for one in tier.find(SPACE, old)), default=0))
        assert tier.holds(SPACE, [token] * 8) and tier.bytes == tier.limit
    assert left == [24, 16, 8, 0]


def test_shared_prefixes_that_take_exactly_their_share_all_stay(short_segments: None) -> None:
    tier = MemoryTier(4 * 8 * 12)
    shared_prefixes = [1] * 8, [2] * 8  # half of the limit
    for shared_prefix in shared_prefixes:
        copy(tier, shared_prefix)
        tier.pin(SPACE, shared_prefix)
    for token in (3, 4, 5, 6):
        copy(tier, [token] * 8)
    assert all(tier.holds(SPACE, shared_prefix) for shared_prefix in shared_prefixes)
    copy(tier, [7] * 8)
    tier.pin(SPACE, [7] * 8)
    for token in (3, 4, 5, 6):
        copy(tier, [token] * 8)
    assert [tier.holds(SPACE, shared_prefix) for shared_prefix in (*shared_prefixes, [7] * 8)] == [False, True, True]


def test_a_segment_may_fill_the_limit_and_no_more(short_segments: None) -> None:
    tier = MemoryTier(8 * 12)
    copy(tier, [1] * 8)
    assert tier.holds(SPACE, [1] * 8)
    tier = MemoryTier(8 * 12 - 1)
    copy(tier, [1] * 8)
    assert (tier.bytes, tier.find(SPACE, [1] * 8)) == (0, [])


def test_a_segment_whose_beginning_has_no_copies_is_not_stored(short_segments: None) -> None:
    tier = MemoryTier(2**20)
    tokens = list(range(1, 25))
    tier.store(SPACE, tokens[:16], 8, bytes(32))
    assert (tier.bytes, tier.find(SPACE, tokens), tier.find(SPACE, tokens[8:])) == (0, [], [])
    tier.store(SPACE, tokens[:8], 0, bytes(32))
    tier.store(SPACE, tokens, 16, bytes(32))  # its second segment is missing
    assert [(one.start, one.stop) for one in tier.find(SPACE, tokens)] == [(0, 8)]
    assert not tier.find(SPACE, tokens[16:])
