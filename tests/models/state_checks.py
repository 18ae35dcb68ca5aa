"""Checks for runners with states in their layers: counted passes, and operations in any order."""

from pathlib import Path
from typing import Any

import numpy as np

from gguf_io import open_model
from models.native_runner import NativeRunner
from tests.models.test_determinism import extend, tokens_of, whole

AFTER_REJECTION = (41, 42, 47, 48, 49, 50, 55, 56)


class Counting(NativeRunner):
    """A runner that records how many rows each of its passes computes."""

    passes: list[int]

    def _compute(self, tokens: Any, *rest: Any) -> Any:
        self.passes.append(len(tokens))
        return super()._compute(tokens, *rest)


def opened(path: Path, budget: int = 64 << 20) -> Counting:
    with open_model(path) as file:
        runner = Counting(file, kv_bytes=budget)
    runner.passes = []
    return runner


def check_rejected_tokens_cost_nothing(runner: Counting, length: int) -> None:
    """length: what is left of 56 tokens, the last 16 of which were computed in one step."""
    tokens, other = tokens_of(1, 56), tokens_of(2, 20)
    sequence = runner.create_sequence()
    extend(runner, sequence, tokens[:40])
    extend(runner, sequence, tokens[40:])
    runner.truncate_sequence(sequence, length)
    runner.passes.clear()
    rows = extend(runner, sequence, other)
    assert runner.passes == [len(other)]
    np.testing.assert_array_equal(rows, whole(runner, tokens[:length] + other)[length:])


def check_any_order_of_operations(runner: Counting, fresh: Counting, seed: int, most_new: int) -> None:
    """Check that logits of `runner` after random operations equal those of the same tokens at once, from `fresh`."""
    random = np.random.default_rng(seed)
    held: dict[int, list[int]] = {runner.create_sequence(): []}
    known: dict[tuple[int, ...], np.ndarray] = {}

    def expected(tokens: list[int]) -> np.ndarray:
        return known.setdefault(tuple(tokens), whole(fresh, tokens)[-1])

    def pick() -> int:
        return list(held)[int(random.integers(len(held)))]

    for _ in range(120):
        sequence = pick()
        tokens = held[sequence]
        match int(random.integers(6)):
            case 0 | 1:
                new = random.integers(0, 320, int(random.integers(1, most_new))).tolist()
                last = extend(runner, sequence, new)[-1]
                tokens += new
                np.testing.assert_array_equal(last, expected(tokens))
                if len(new) == 1 or random.integers(4) == 0:
                    continue
                cut = len(tokens) - int(random.integers(len(new)))
                runner.truncate_sequence(sequence, cut)
                del tokens[cut:]
            case 2:
                length = int(random.integers(len(tokens) + 1))
                held[runner.fork_sequence(sequence, length)] = tokens[:length]
            case 3:
                length = int(random.integers(len(tokens) + 1))
                runner.truncate_sequence(sequence, length)
                del tokens[length:]
            case 4 if tokens:
                start = int(random.integers(len(tokens)))
                data = runner.export_kv(sequence, start, len(tokens))
                copy = runner.fork_sequence(sequence, start)
                runner.import_kv(copy, start, len(tokens), data)
                if state := runner.export_state(sequence, len(tokens)):
                    runner.import_state(copy, state)
                held[copy] = list(tokens)
            case 5 if tokens:
                extend(runner, sequence, [5])
                runner.last_step().run()  # which spoils the sequence, but no fork of it
                runner.free_sequence(sequence)
                del held[sequence]
                held[runner.create_sequence()] = []
        while len(held) > 6:
            gone = pick()
            runner.free_sequence(gone)
            del held[gone]
    runner.check_integrity(set(held))
