"""What a step computes and who keeps a slot, as far as no answer shows it."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.step_costs import ChunkSize
from localllm.engine.stream import CAPACITY
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary


def asked(*prompt: int, **options: Any) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(temperature=0), **options)


@pytest.fixture
def smallest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which steps have the fewest rows."""
    monkeypatch.setattr(ChunkSize, "observe", lambda *_: None)


@pytest.mark.usefixtures("smallest_steps")
def test_rows_that_decode_leave_fewer_to_a_prompt() -> None:
    runner = FakeRunner(pages=400, max_rows=64)
    engine = Engine(runner, FakeVocabulary())
    for first in range(1, 5):
        engine.submit(asked(first, max_tokens=50))
    while runner.batches[-1:] != [4]:
        engine.step()
    engine.submit(asked(*range(1, 61)))
    engine.step()
    assert runner.batches[-1] == ChunkSize.SMALLEST


class InterruptibleRunner(FakeRunner):
    """Has the interface; whether it can be interrupted is in its info."""

    def run_unless(
        self,
        _stop: threading.Event,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> NDArray[np.float32] | None:
        return self.run(tokens, positions, sequences, wanted)


@pytest.mark.usefixtures("smallest_steps")
@pytest.mark.parametrize(("can_interrupt", "rows"), [(False, ChunkSize.SMALLEST), (True, ChunkSize.LEAST_PATIENT)])
def test_only_a_step_that_can_be_interrupted_is_long(can_interrupt: bool, rows: int) -> None:
    runner = InterruptibleRunner(pages=400, max_rows=256, can_interrupt=can_interrupt)
    engine = Engine(runner, FakeVocabulary())
    engine.submit(asked(*[1, 2, 3, 4] * 50))
    engine.step()
    assert runner.batches == [rows]


@pytest.mark.parametrize("background", [False, True])
def test_a_slow_reader_keeps_its_slot_while_there_is_room(background: bool) -> None:
    engine = Engine(FakeRunner(pages=400), FakeVocabulary(), max_running=4)
    slow = engine.submit(asked(1, 2, 3, max_tokens=CAPACITY + 40))
    while engine.step():
        pass
    assert slow.full
    engine.submit(asked(5, 6, 7, max_tokens=4, background=background))
    engine.step()
    assert len(engine.scheduler.running) == 2 and engine.scheduler.waiting == []
