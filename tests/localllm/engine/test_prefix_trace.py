"""A real trace of conversations: as many hits as an ideal cache, with and without limits."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

BLOCK = 4
REQUESTS = 400


@pytest.fixture(scope="module")
def trace(data_dir: Path) -> list[list[int]]:
    """Block ids of each request; an id represents a block and everything before it."""
    path = data_dir / "traces" / "mooncake_conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in islice(lines, REQUESTS)]


def prompt(blocks: list[int]) -> tuple[int, ...]:
    """The blocks as tokens, and one token that is never reused."""
    return (*(block + 1 for block in blocks for _ in range(BLOCK)), 0)


def reused(trace: list[list[int]], pages: int) -> Iterator[int]:
    """Tokens reused by each request of the engine, in order."""
    vocabulary = max(map(max, trace)) + 2
    runner = FakeRunner(
        pages=pages, page_size=BLOCK, vocab_size=vocabulary, max_context=2**20, max_rows=1024, max_sequences=2000
    )
    engine = Engine(runner, FakeVocabulary(), background_tokens=0)
    for blocks in trace:
        stream = engine.submit(GenerationRequest(prompt(blocks), max_tokens=0))
        while engine.step():
            pass
        yield stream.collect().last.counts.cached_memory
    engine.check_integrity()


def ideal(trace: list[list[int]], capacity: int) -> Iterator[int]:
    """Tokens reused by an LRU cache of so many blocks; a path's deepest block is evicted first."""
    kept: dict[int, tuple[int, int]] = {}
    for time, blocks in enumerate(trace):
        hits = 0
        while hits < len(blocks) and blocks[hits] in kept:
            hits += 1
        yield hits * BLOCK
        end = -1 - blocks[-1]  # the page of the prompt's last token
        for depth, block in enumerate([*blocks, end]):
            kept[block] = (time, -depth)
        for block in sorted(kept, key=kept.__getitem__)[: max(len(kept) - capacity, 0)]:
            del kept[block]


def test_an_unbounded_cache_is_ideal(trace: list[list[int]]) -> None:
    hits = list(reused(trace, pages=20_000))
    assert hits == list(ideal(trace, 20_000))
    assert sum(hits) > 5_000


@pytest.mark.parametrize("pages", [300, 1000, 3000])
def test_a_bounded_cache_is_exactly_lru(trace: list[list[int]], pages: int) -> None:
    hits = list(reused(trace, pages))
    assert hits == list(ideal(trace, pages))
    assert sum(hits) < sum(ideal(trace, 20_000))
