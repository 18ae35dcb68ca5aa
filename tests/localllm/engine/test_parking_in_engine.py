"""A runner that has much to move before a prompt moves it in parts, and nobody waits for all of them."""

from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

PARTS = 3


class Mover(FakeRunner):
    """A fake runner with so many parts to move before a prompt is appended."""

    parts = 0
    to_copy = 0

    def prepare_sequence(self, _sequence: int, rows: int) -> bool:
        if rows == 1 or not self.parts:
            return True
        self.parts -= 1
        return False

    def park_sequence(self, sequence: int) -> None:
        assert self.sequence_length(sequence)

    def copy_resting(self) -> bool:
        if not self.to_copy:
            return False
        self.to_copy -= 1
        return True

    def pages_parked(self) -> int:
        return 0

    def pages_copied(self) -> int:
        return 0

    def most_parked(self) -> int:
        return 0

    def check_parked(self) -> None:
        assert self.parts >= 0


def request(*tokens: int) -> GenerationRequest:
    return GenerationRequest(tokens, SamplingParams(temperature=0), max_tokens=20, ignore_eos=True)


def test_answers_go_on_between_the_parts() -> None:
    runner = Mover()
    engine = Engine(runner, FakeVocabulary())
    running = engine.submit(request(5, 6, 7))
    engine.step()
    runner.batches.clear()
    runner.parts = PARTS
    waiting = engine.submit(request(9, 10, 11, 12))
    for _ in range(PARTS):
        assert engine.step()
    assert runner.parts == 0
    assert all(runner.batches)
    assert len(runner.batches) == PARTS  # the running answer's steps
    before = runner.rows_computed
    engine.step()
    assert runner.rows_computed - before > 1
    while engine.step():
        engine.check_integrity()
    assert len(running.collect().token_ids) == len(waiting.collect().token_ids) == 20


def test_a_lone_prompt_waits_for_all_of_them() -> None:
    runner = Mover()
    runner.parts = PARTS
    engine = Engine(runner, FakeVocabulary())
    alone = engine.submit(request(5, 6, 7))
    for _ in range(PARTS):
        assert engine.step()
        assert not runner.batches
    while engine.step():
        engine.check_integrity()
    assert len(alone.collect().token_ids) == 20


def test_who_leaves_meanwhile_waits_for_no_more() -> None:
    runner = Mover()
    runner.parts = PARTS
    engine = Engine(runner, FakeVocabulary())
    alone = engine.submit(request(5, 6, 7))
    engine.step()
    alone.cancel()
    while engine.step():
        engine.check_integrity()
    assert alone.collect().last.finish_reason is FinishReason.CANCELLED
    assert (runner.parts, runner.batches) == (PARTS - 1, [])


def test_copies_are_made_when_there_is_nothing_to_compute() -> None:
    runner = Mover()
    runner.to_copy = PARTS
    engine = Engine(runner, FakeVocabulary())
    answered = engine.submit(request(5, 6, 7))
    while engine.stats().running or engine.stats().waiting:
        assert engine.step()
        assert runner.to_copy == PARTS
    assert len(answered.collect().token_ids) == 20
    assert engine.step()
    newcomer = engine.submit(request(9, 10, 11))
    engine.step()
    assert runner.to_copy == PARTS - 1  # the others wait for it
    while engine.step():
        engine.check_integrity()
    assert runner.to_copy == 0
    assert len(newcomer.collect().token_ids) == 20
