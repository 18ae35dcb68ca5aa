"""Snapshots of the engine, from other threads and in every state."""

from concurrent.futures import CancelledError

import pytest

from localllm.engine.engine import Engine
from localllm.engine.inspection import depth_first
from localllm.engine.request import GenerationRequest, SamplingParams
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.waiting import PATIENCE_S


def greedy(prompt: tuple[int, ...], tokens: int) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(temperature=0), max_tokens=tokens)


def test_a_snapshot_shows_steps_pages_and_shared_prefixes() -> None:
    engine = Engine(FakeRunner(page_size=4), FakeVocabulary())
    engine.start()
    try:
        common = tuple(range(1, 11))
        engine.submit(greedy((*common, 20, 21), 3)).collect()
        engine.submit(greedy((*common, 30), 3)).collect()
        snapshot = engine.inspect().result(PATIENCE_S)
        assert sum(step.prefill for step in snapshot.steps) == 12 + 1  # the common part is computed once
        assert sum(step.decode for step in snapshot.steps) == 2 * 2  # the first token of each comes with its prompt
        nodes = list(depth_first(snapshot.prefixes))
        assert [(level, node.start, node.sharers) for level, node in nodes] == [(0, 0, 2), (1, 10, 1), (1, 10, 1)]
        assert snapshot.requests == ()
        # Two whole pages of the common part are shared; the third is copied, and each has two of its own.
        assert sorted(snapshot.page_holders.tolist()) == [0] * 58 + [1, 1, 1, 1, 2, 2]
        assert snapshot.pages_total == 64
    finally:
        engine.close()


def test_who_asks_a_closing_engine_is_not_left_waiting() -> None:
    engine = Engine(FakeRunner(), FakeVocabulary())
    asked = engine.inspect()
    engine.close()
    for future in (asked, engine.inspect()):
        with pytest.raises(CancelledError):
            future.result(PATIENCE_S)
