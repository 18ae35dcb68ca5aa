"""Slow readers pause their own answers, and occupy neither a slot nor memory that others need."""

import pytest

from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.engine.stream import CAPACITY
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(("pages", "max_running"), [(100, 8), (400, 1)])
def test_who_waits_is_served_while_a_reader_is_behind(pages: int, max_running: int) -> None:
    engine = Engine(FakeRunner(pages=pages), FakeVocabulary(), max_running=max_running)
    alone = Engine(FakeRunner(pages=400), FakeVocabulary())
    asked = GenerationRequest((1, 2, 3), sampling=GREEDY, max_tokens=CAPACITY + 40)
    slow, undisturbed = engine.submit(asked), alone.submit(asked)
    while engine.step():
        pass
    assert slow.full
    other = engine.submit(GenerationRequest((5,) * 200, sampling=GREEDY, max_tokens=4))
    while engine.step():
        engine.check_integrity()
    assert other.poll()[-1].finish_reason is FinishReason.LENGTH
    told: dict[object, list[int]] = {slow: [], undisturbed: []}
    for stream, its in ((slow, engine), (undisturbed, alone)):
        reason = None
        while reason is None:
            its.step()
            for event in stream.poll():
                told[stream] += event.token_ids
                reason = event.finish_reason
    assert told[slow] == told[undisturbed] and len(told[slow]) == CAPACITY + 40
