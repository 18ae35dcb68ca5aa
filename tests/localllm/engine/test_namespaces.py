"""Requests of different namespaces share no keys and values, in memory or on disk."""

from pathlib import Path

import pytest

from localllm.engine.disk_cache import DiskCache
from localllm.engine.drafter import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.stream import GenerationStream
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

GREEDY = SamplingParams(temperature=0)
PROMPT = tuple(range(1, 60)) * 5


def submitted(engine: Engine, namespace: str) -> GenerationStream:
    return engine.submit(GenerationRequest(PROMPT, GREEDY, max_tokens=5, ignore_eos=True, namespace=namespace))


def cached(engine: Engine, namespace: str) -> tuple[int, int]:
    """Tokens that a request reuses from memory and from disk."""
    stream = submitted(engine, namespace)
    while engine.step():
        engine.check_integrity()
    counts = stream.collect().last.counts
    return counts.cached_memory, counts.cached_disk


def test_cached_memory_serves_only_one_namespace() -> None:
    engine = Engine(FakeRunner(pages=400), FakeVocabulary())
    reused = [cached(engine, namespace)[0] for namespace in ("", "alice", "bob", "alice", "bob", "")]
    assert reused[:3] == [0, 0, 0] and all(count == len(PROMPT) - 1 for count in reused[3:])
    engine.close()


def test_neighbours_of_other_namespaces_compute_for_themselves() -> None:
    engine = Engine(FakeRunner(pages=400), FakeVocabulary())
    streams = [submitted(engine, namespace) for namespace in ("alice", "bob", "alice", "")]
    while engine.step():
        engine.check_integrity()
    first, *others = [stream.collect() for stream in streams]
    assert [other.last.counts.cached > 0 for other in others] == [False, True, False]
    assert all(other.token_ids == first.token_ids for other in others)
    engine.close()


def test_cached_segments_on_disk_serve_only_one_namespace(tmp_path: Path) -> None:
    for turn in range(2):
        engine = Engine(FakeRunner(pages=400), FakeVocabulary(), disk=DiskCache(tmp_path, "fake", 2**22))
        assert (cached(engine, "alice")[1] > 0) == (turn == 1)
        assert cached(engine, f"bob{turn}") == (0, 0)
        assert cached(engine, "") == (0, 0) or turn == 1
        engine.close()


@pytest.mark.parametrize("namespace", ["", "alice"])
def test_a_draft_model_guesses_in_every_namespace(namespace: str) -> None:
    engine = Engine(FakeRunner(pages=400), FakeVocabulary(), drafter=DraftModel(FakeRunner(pages=400)))
    plain = Engine(FakeRunner(pages=400), FakeVocabulary())
    for _ in range(2):
        streams = [submitted(one, namespace) for one in (engine, plain)]
        for one in (engine, plain):
            while one.step():
                one.check_integrity()
        drafted, expected = (stream.collect() for stream in streams)
        assert drafted.token_ids == expected.token_ids
    engine.close()
    plain.close()
