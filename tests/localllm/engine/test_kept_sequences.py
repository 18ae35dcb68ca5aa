"""The prefix cache keeps no more sequences than the runner has to spare: the least recently used prefix goes first."""

import pytest

from localllm.engine.engine import Engine
from localllm.engine.prefix_cache import PrefixCache
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.sequence import KeySpace
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

SPACE = KeySpace()


def cached(runner: FakeRunner, cache: PrefixCache, tokens: list[int]) -> None:
    sequence = runner.create_sequence()
    runner.run(tokens, range(len(tokens)), [sequence] * len(tokens), [])
    cache.insert(SPACE, tokens, sequence)


def test_dropping_removes_one_whole_prefix_and_says_whether_there_was_one() -> None:
    runner = FakeRunner()
    cache = PrefixCache(runner)
    assert cache.drop_oldest() is False
    prefixes = [[first, 2, 3, 4, 5, 6] for first in (7, 8, 9)]
    for prefix in prefixes:
        cached(runner, cache, prefix)
    for left, prefix in zip((2, 1, 0), prefixes, strict=True):
        assert cache.drop_oldest() is True
        assert len(cache) == left
        assert cache.match(SPACE, prefix) == 0
        runner.check_integrity(cache.check_integrity())
    assert cache.drop_oldest() is False
    assert runner.pages_free() == runner.info.pages_total


def test_dropping_leaves_what_other_prefixes_share() -> None:
    runner = FakeRunner()
    cache = PrefixCache(runner)
    cached(runner, cache, [1, 2, 3, 4, 5])
    cached(runner, cache, [1, 2, 3, 9, 9])
    assert cache.drop_oldest()
    assert (len(cache), cache.match(SPACE, [1, 2, 3, 4, 5]), cache.match(SPACE, [1, 2, 3, 9, 9])) == (1, 3, 5)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_more_prompts_than_sequences(can_truncate: bool) -> None:
    runner = FakeRunner(pages=400, max_sequences=6, can_truncate=can_truncate)
    engine = Engine(runner, FakeVocabulary(), max_running=2)
    prompts = [(first, *range(1, 9)) for first in range(10, 22)]
    for prompt in prompts:
        stream = engine.submit(GenerationRequest(prompt, SamplingParams(temperature=0), max_tokens=2, ignore_eos=True))
        while engine.step():
            engine.check_integrity()
        assert stream.collect().token_ids
        assert engine.stats().cached_prefixes <= 4
    assert engine.stats().cached_prefixes == 4
    cache = engine.kv.cache
    known = [cache.match(SPACE, (*prompt, 0)) > 0 for prompt in prompts]
    assert known == [False] * (len(prompts) - sum(known)) + [True] * sum(known)
    engine.close()
