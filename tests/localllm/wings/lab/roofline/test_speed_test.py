"""Which tokens are computed, in which order, and what counts; no time is measured."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.wings.lab.roofline.speeds import BenchRequest, SpeedTest
from tests.fakes.fake_runner import FakeRunner


class CountingRunner(FakeRunner):
    """A runner whose rows take a second each, by its own clock."""

    def __init__(self) -> None:
        super().__init__(pages=200, max_rows=8)
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        self.now += len(tokens)
        return super().run(tokens, positions, sequences, wanted)


def test_rounds_time_the_prompt_and_the_tokens_at_each_depth() -> None:
    runner, told = CountingRunner(), []
    free = runner.pages_free()
    request = BenchRequest(prompt=20, depths=(30, 0), tokens=5, rounds=2)
    test = SpeedTest(runner, request, runner.clock, told.append)
    assert runner.now == 30  # both depths share one filled sequence
    for _ in range(2):
        test.round()
    assert test.prefill == [20.0, 20.0]
    assert test.decode == {30: [5.0, 5.0], 0: [5.0, 5.0]}
    assert told[-3:] == ["prefill of 20 tokens", "decode after 0 tokens", "decode after 30 tokens"]
    test.close()
    assert runner.pages_free() == free


def test_every_round_computes_the_same_tokens() -> None:
    first, second = (SpeedTest(CountingRunner(), BenchRequest(9, (3,), 4, 1), float, print).tokens for _ in range(2))
    assert first == second
    assert len(first) == 9


def test_a_wish_knows_how_much_memory_it_takes() -> None:
    request = BenchRequest(prompt=512, depths=(0, 4096), tokens=64, rounds=1)
    assert request.longest == 4160
    assert request.kv_tokens >= 4096 + 512
