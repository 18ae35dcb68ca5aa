"""The radix trees of cached prefixes, without an engine: what is found, kept, released and evicted first."""

import struct
from collections.abc import Sequence

import pytest

from localllm.engine.pins import Pin
from localllm.engine.prefix_cache import PrefixCache
from localllm.engine.sequence import KeySpace
from tests.fakes.fake_runner import FakeRunner

SPACE, OTHER = KeySpace(), KeySpace(namespace="other")
SHARED = [1, 2, 3, 4, 5, 6, 7, 8]
LEFT, RIGHT = [*SHARED, 11, 12, 13, 14], [*SHARED, 21, 22, 23, 24]


class Cached:
    """A cache on a fake runner. `add` computes a prefix and hands its sequence over; `check` compares both sides."""

    def __init__(self, *prefixes: Sequence[int], **described: int) -> None:
        self.runner = FakeRunner(**described)  # type: ignore[arg-type]
        self.cache = PrefixCache(self.runner, pinned_tokens=40)
        self.add(*prefixes)

    def add(self, *prefixes: Sequence[int], space: KeySpace = SPACE) -> None:
        for tokens in prefixes:
            sequence = self.runner.create_sequence()
            self.runner.import_kv(sequence, 0, len(tokens), struct.pack(f"<{len(tokens)}i", *tokens))
            self.cache.insert(space, tokens, sequence)
        self.check()

    def check(self) -> None:
        owned = self.cache.check_integrity()
        assert len(owned) == len(self.cache)
        free = self.runner.pages_free()
        if not owned:
            assert (free, self.cache.tokens) == (self.runner.info.pages_total, 0)

    def found(self, *prefixes: Sequence[int]) -> list[int]:
        return [self.cache.match(SPACE, tokens) for tokens in prefixes]


def test_prefixes_are_found_to_the_single_token_and_shared_ones_count_once() -> None:
    cached = Cached(LEFT, RIGHT)
    assert cached.found(LEFT, [*SHARED[:5], 9], RIGHT[:10], [9]) == [12, 5, 10, 0]
    assert (len(cached.cache), cached.cache.tokens) == (2, 16)
    assert cached.cache.match(OTHER, LEFT) == 0


def test_a_fork_in_the_middle_of_an_edge_holds_exactly_the_asked_tokens() -> None:
    cached = Cached(LEFT)
    sequence = cached.cache.fork(SPACE, LEFT, 6)
    assert cached.runner.history(sequence) == LEFT[:6]
    cached.check()


def test_only_prefixes_that_are_stored_elsewhere_are_released() -> None:
    cached = Cached(LEFT, RIGHT)
    cached.cache.release_where(lambda space, tokens: tokens == LEFT)
    cached.check()
    assert cached.found(LEFT, RIGHT) == [8, 12]
    cached.cache.release_where(lambda space, tokens: False)
    assert cached.found(LEFT, RIGHT) == [8, 12]
    cached.cache.release_where(lambda space, tokens: tokens in (RIGHT, SHARED))
    cached.check()
    assert cached.found(LEFT, RIGHT) == [0, 0]


def test_a_released_end_leaves_the_shared_part_that_is_stored_nowhere_else() -> None:
    cached = Cached(LEFT, RIGHT)
    cached.cache.release_where(lambda space, tokens: tokens != SHARED)
    cached.check()
    assert cached.found(LEFT) == [8]


@pytest.mark.parametrize("by_request", [False, True])
def test_a_continuation_of_a_shared_prefix_or_a_pin_is_evicted_before_it(by_request: bool) -> None:
    cached = Cached(SHARED)
    if by_request:
        cached.cache.keep(SPACE, SHARED, Pin(len(SHARED), 1000))
    else:
        cached.cache.pin(SPACE, SHARED)
    other = [31, 32, 33, 34]
    cached.add(LEFT, other)
    assert cached.cache.evict(1)  # the end of the conversation, which was used before the other
    cached.check()
    assert cached.found(LEFT, other) == [8, 4]
    assert cached.cache.evict(1)
    cached.check()
    assert cached.found(SHARED, other) == [8, 0]


def test_evicting_goes_from_the_end_by_whole_pages_until_nothing_is_left() -> None:
    cached = Cached([*LEFT, 15])
    left = []
    while cached.cache.evict(1):
        cached.check()
        left.append(cached.found(LEFT)[0])
    assert left == [8, 4, 0]
    assert cached.cache.evicted_tokens == 13


def test_dropping_the_oldest_frees_one_sequence_and_nothing_else() -> None:
    cached = Cached([31, 32, 33], LEFT, RIGHT)
    assert cached.cache.drop_oldest()
    cached.check()
    assert (len(cached.cache), cached.found([31, 32, 33], LEFT, RIGHT)) == (2, [0, 12, 12])
    assert cached.cache.drop_oldest() and cached.cache.drop_oldest()
    cached.check()
    assert not cached.cache.drop_oldest()


def test_a_holder_starts_with_all_asked_tokens() -> None:
    cached = Cached(LEFT)
    holder = cached.cache.holder(SPACE, LEFT[:7])
    assert holder is not None and cached.runner.history(holder)[:7] == LEFT[:7]
    for tokens in ([], [*LEFT, 5], [9]):
        assert cached.cache.holder(SPACE, tokens) is None
    assert cached.cache.holder(OTHER, LEFT) is None


def test_shared_prefixes_take_at_most_half_of_the_memory_and_the_oldest_is_unpinned() -> None:
    first, second, newest = ([at] * 16 for at in (1, 2, 3))
    cached = Cached(pages=16, page_size=4)
    for shared_prefix in (first, second):
        cached.add(shared_prefix)
        cached.cache.pin(SPACE, shared_prefix)
    cached.add(newest)
    assert cached.cache.evict(4)  # both shared prefixes fit into half of 64 tokens, so the newest prefix goes
    assert cached.found(first, second, newest) == [16, 16, 0]
    cached.add([4])
    cached.cache.pin(SPACE, [4])
    assert cached.cache.evict(4)
    cached.check()
    assert cached.found(first, second, [4]) == [0, 16, 1]
