"""The phases of requests that an engine records, on a virtual clock."""

from localllm.engine.engine import Engine
from localllm.engine.inspection import KEPT_SPANS, Span, Timeline
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.step_costs import ChunkSize
from localllm.wings.lab.simulate.costs import Curve, StepTimes
from localllm.wings.lab.simulate.runner import SimulatedRunner, SimulatedVocabulary, VirtualClock

# A step takes a second, whatever its rows.
TIMES = StepTimes(Curve(((1, 1.0),)), Curve(((1, 0.0),)))


def test_an_engine_notes_queue_chunks_decoding_and_end() -> None:
    clock = VirtualClock()
    engine = Engine(
        SimulatedRunner(TIMES, clock, pages=100, context=1024, max_rows=32),
        SimulatedVocabulary(),
        max_running=1,
        clock=clock,
        chunk=WholeSteps(32),
    )
    greedy = SamplingParams(temperature=0)
    for first in (1, 2):
        engine.submit(GenerationRequest((first, *range(100, 147)), greedy, max_tokens=3))
        while engine.step():
            pass
    asked = engine.inspect()
    engine.step()
    snapshot = asked.result(0)
    # 48 tokens are a chunk of 32 and one of 16, whose last row gives the first token; two steps give the others.
    chunks = [Span(False, 0, 1, 32), Span(False, 1, 2, 16), Span(True, 2, 4, 2)]
    later = [Span(each.decodes, each.began + 4, each.ended + 4, each.rows) for each in chunks]
    assert snapshot.timelines == (Timeline(0, chunks, 0, 3, 4.0), Timeline(4, later, 0, 3, 8.0))
    assert snapshot.now == 8.0
    snapshot.timelines[0].spans.clear()  # a copy: the engine's own timelines are unchanged
    asked = engine.inspect()
    engine.step()
    assert asked.result(0).timelines[0].spans == chunks
    engine.close()


class WholeSteps(ChunkSize):
    """Steps may have as many rows as the runner supports."""

    def _rows_in(self, seconds: float) -> int:
        return self._largest


def test_decoding_that_was_interrupted_is_two_spans() -> None:
    timeline = Timeline(0.0)
    for began in (1.0, 1.1, 1.2, 5.0):
        timeline.add(Span(True, began, began + 0.1, 1))
    assert [(round(span.ended - span.began, 6), span.rows) for span in timeline.spans] == [(0.3, 3), (0.1, 1)]


def test_a_long_prompt_s_timeline_keeps_its_beginning_and_end() -> None:
    timeline = Timeline(0.0)
    for number in range(2 * KEPT_SPANS):
        timeline.add(Span(False, number, number + 1, 16))
    timeline.add(Span(True, 2 * KEPT_SPANS, 2 * KEPT_SPANS + 1, 1))
    assert len(timeline.spans) == KEPT_SPANS
    assert (timeline.spans[0].began, timeline.spans[-1].decodes) == (0, True)
