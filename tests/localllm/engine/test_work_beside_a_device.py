"""A runner whose device computes by itself: texts are sent meanwhile, and answers stay the same."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine import engine
from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.engine.sampling.choice import Chooser
from localllm.engine.stream import Completion, GenerationStream
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

PIECES = dict(enumerate([b"", "é".encode()[:1], "é".encode()[1:], b"ab", b"bc", b"a"]))


class Device(FakeRunner):
    """Computes when its result is waited for. meanwhile: called right before that."""

    def __init__(self, **described: Any) -> None:
        super().__init__(pages=400, computes_aside=True, **described)
        self.meanwhile: Callable[[], None] = lambda: None
        self.busy = False

    def begin(self, *rows: Sequence[int]) -> Callable[[], NDArray[np.float32]]:
        """Begin a step, and let nothing else use the runner until its end."""
        self.busy = True

        def wait() -> NDArray[np.float32]:
            self.meanwhile()
            self.busy = False
            return FakeRunner.run(self, *rows)

        return wait

    def truncate_sequence(self, sequence: int, length: int) -> None:
        assert not self.busy
        super().truncate_sequence(sequence, length)

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        assert not self.busy
        return super().export_kv(sequence, start, stop)


def request(number: int, **others: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=number % 3, seed=number)
    usual = {"prompt": tuple(range(number + 1, number + 20)), "sampling": sampling, "max_tokens": 30 + number}
    return GenerationRequest(**{**usual, **others})


def submitted(runner: FakeRunner) -> tuple[Engine, list[GenerationStream]]:
    running = Engine(runner, FakeVocabulary(PIECES))
    plain = [request(number) for number in range(4)]
    stopped = request(4, stop=("abc", "BC"), max_tokens=400)
    many = [request(number, ignore_eos=number % 2 == 0, min_tokens=number % 3) for number in range(6, 12)]
    told = request(5, sampling=SamplingParams(temperature=1, seed=5, logprobs=2))
    return running, [running.submit(one) for one in (*plain, stopped, told, *many)]


def answers(runner: FakeRunner) -> list[Completion]:
    running, streams = submitted(runner)
    while running.step():
        running.check_integrity()
    running.close()
    return [stream.collect() for stream in streams]


@pytest.mark.parametrize("helpers", [1, 3])
def test_answers_are_those_of_a_runner_that_computes_at_once(helpers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_HELPERS", helpers)
    for beside, alone in zip(answers(Device()), answers(FakeRunner(pages=400)), strict=True):
        assert (beside.token_ids, beside.text, beside.logprobs) == (alone.token_ids, alone.text, alone.logprobs)
        assert (beside.last.finish_reason, beside.last.counts) == (alone.last.finish_reason, alone.last.counts)


def test_the_text_of_a_step_is_sent_while_the_next_one_is_computed() -> None:
    runner = Device()
    running = Engine(runner, FakeVocabulary())
    stream = running.submit(request(1))
    came: list[int] = []

    def read() -> None:
        came.append(sum(len(event.token_ids) for event in stream.poll()))

    runner.meanwhile = read
    while running.step():
        assert not any(event.token_ids for event in stream.poll() if event.finish_reason is None)
    assert [count for count in came if count] == [1] * 30


def test_a_step_that_fails_ends_its_requests_and_no_text_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Device()
    running, streams = submitted(runner)
    for _ in range(12):
        running.step()

    def fail(*_: Sequence[int]) -> Callable[[], NDArray[np.float32]]:
        raise RuntimeError("the device is lost")

    read = [sum(len(event.token_ids) for event in stream.poll()) for stream in streams]
    monkeypatch.setattr(runner, "begin", fail)
    with pytest.raises(RuntimeError, match="lost"):
        running.step()
    running.close()
    for before, stream in zip(read, streams, strict=True):
        rest = stream.collect()
        assert before + len(rest.token_ids) == rest.last.counts.generated


def test_tokens_are_chosen_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_HELPERS", 2)
    run, threads = Chooser.run, set()

    def noted(chooser: Chooser) -> None:
        threads.add(threading.current_thread().name)
        run(chooser)

    monkeypatch.setattr(Chooser, "run", noted)
    running = Engine(Device(), FakeVocabulary())
    streams = [running.submit(request(number)) for number in (1, 2, 4, 5, 7, 8)]
    while running.step():
        pass
    running.close()
    assert len(threads) > 1 and all(stream.collect().token_ids for stream in streams)


def test_a_fault_of_one_answer_ends_no_other() -> None:
    def spoil(history: list[int], row: NDArray[np.float32]) -> None:
        if history[0] == 5 and len(history) > 22:
            row[7] = np.nan

    running = Engine(Device(bias=spoil), FakeVocabulary())
    streams = [running.submit(request(number)) for number in (1, 2, 4, 5, 7, 8)]
    while running.step():
        pass
    running.close()
    ended = [stream.collect().last.finish_reason for stream in streams]
    assert ended.count(FinishReason.ERROR) == 1 and ended[2] is FinishReason.ERROR
