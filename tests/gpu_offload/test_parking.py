"""What rests lies outside of llama.cpp's cells, and comes back as it was."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpu_offload import parking
from gpu_offload.runner import LlamaCppRunner
from gpu_offload.state_desk import StateDesk
from tests.gpu_offload.resting import append, opened, same
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

CHANCE = np.random.default_rng(5)
FIRST, SECOND, THIRD = ([1, *CHANCE.integers(5, 290, 119).tolist()] for _ in range(3))


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "PIECE_TOKENS", 32)


@pytest.fixture(scope="module")
def path(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf" / "stories260K-F32.gguf"


@pytest.fixture
def runner(path: Path) -> Iterator[LlamaCppRunner]:
    made = opened(path)
    yield made
    made.close()


def resting(runner: LlamaCppRunner, tokens: list[int]) -> int:
    sequence = runner.create_sequence()
    append(runner, sequence, tokens)
    runner.park_sequence(sequence)
    return sequence


def parked(runner: LlamaCppRunner, tokens: list[int]) -> int:
    """A sequence that rests, and is parked since another prompt came."""
    sequence = resting(runner, tokens)
    before = runner.pages_parked()
    other = runner.create_sequence()
    append(runner, other, THIRD[:20])
    runner.free_sequence(other)
    assert runner.pages_parked() == before + len(tokens)
    return sequence


@pytest.fixture(scope="module")
def expected(path: Path) -> Iterator[Callable[[list[int]], np.ndarray]]:
    """The logits behind tokens that are computed in one pass, with nothing kept."""
    made = opened(path)

    def compute(tokens: list[int]) -> np.ndarray:
        sequence = made.create_sequence()
        logits = append(made, sequence, tokens)
        made.free_sequence(sequence)
        return logits

    yield compute
    made.close()


def test_a_prompt_that_does_not_use_it_parks_what_rests(runner, expected):
    kept = resting(runner, FIRST)
    short = runner.create_sequence()
    append(runner, short, SECOND[: parking.PROMPT_ROWS - 1])
    assert runner.pages_parked() == 0  # not worth it for so few rows
    same(append(runner, short, SECOND[parking.PROMPT_ROWS - 1 :]), expected(SECOND))
    assert runner.pages_parked() == len(FIRST)
    assert runner.pages_free() == runner.pages_total() - len(FIRST) - len(SECOND)
    assert runner.sequence_length(kept) == len(FIRST)


def test_what_never_rested_stays(runner):
    sequence = runner.create_sequence()
    append(runner, sequence, FIRST)
    append(runner, runner.create_sequence(), SECOND)
    assert runner.pages_parked() == 0


@pytest.mark.parametrize("length", [1, 32, 50, 120])
def test_a_fork_brings_it_back(runner, expected, length):
    kept = parked(runner, FIRST)
    fork = runner.fork_sequence(kept, length)
    assert runner.pages_parked() == len(FIRST)  # until it is needed
    same(append(runner, fork, SECOND[:9]), expected(FIRST[:length] + SECOND[:9]))
    assert runner.pages_parked() == len(FIRST) // 32 * 32 + 24 - min(-(-length // 32) * 32, 120)


def test_few_shared_tokens_bring_back_only_the_head(runner, expected, monkeypatch):
    monkeypatch.setattr(parking, "HEAD_TOKENS", 8)
    fork = runner.fork_sequence(parked(runner, FIRST), 5)
    same(append(runner, fork, SECOND[:9]), expected(FIRST[:5] + SECOND[:9]))
    assert runner.pages_parked() == len(FIRST) - 8


def test_whoever_goes_on_with_it_finds_it_in_place(runner, expected):
    kept = resting(runner, FIRST)
    fork = runner.fork_sequence(kept, len(FIRST))
    same(append(runner, fork, SECOND), expected(FIRST + SECOND))
    assert runner.pages_parked() == 0


def test_a_shared_prefix_is_parked_once_and_comes_back_for_all(runner, expected):
    first = resting(runner, FIRST)
    second = runner.fork_sequence(first, 70)
    append(runner, second, SECOND[:60])
    runner.park_sequence(second)
    append(runner, runner.create_sequence(), THIRD[:30])
    assert runner.pages_parked() == 120 + 60
    fork = runner.fork_sequence(second, 130)
    same(append(runner, fork, [9]), expected([*FIRST[:70], *SECOND[:60], 9]))
    assert runner.pages_parked() == 50  # the other's own end
    same(append(runner, runner.fork_sequence(first, 120), [9]), expected([*FIRST, 9]))


def test_what_a_fork_still_uses_stays_in_its_cells(runner, expected):
    kept = resting(runner, FIRST)
    fork = runner.fork_sequence(kept, 40)
    same(append(runner, fork, SECOND), expected(FIRST[:40] + SECOND))
    assert runner.pages_parked() == 80


@pytest.mark.parametrize("length", [0, 5, 64, 100])
def test_a_parked_sequence_is_cut(runner, expected, length):
    kept = parked(runner, FIRST)
    free = runner.pages_free()
    runner.truncate_sequence(kept, length)
    runner.check_parked()
    assert (runner.pages_parked(), runner.pages_free()) == (length, free + 120 - length)
    # The cells that it left are used again before it comes back.
    other = runner.create_sequence()
    append(runner, other, (SECOND * 5)[: runner.pages_free() - 1])
    fork = runner.fork_sequence(kept, length)
    same(append(runner, fork, [9]), expected([*FIRST[:length], 9]))


def test_a_parked_sequence_is_freed(runner):
    runner.free_sequence(parked(runner, FIRST))
    runner.check_parked()
    assert (runner.pages_parked(), runner.pages_free()) == (0, runner.pages_total())


def test_appending_wakes_it(runner, expected):
    kept = parked(runner, FIRST)
    same(append(runner, kept, [9]), expected([*FIRST, 9]))
    append(runner, runner.create_sequence(), SECOND)
    assert runner.pages_parked() == 0


def copied(runner: LlamaCppRunner, tokens: list[int]) -> int:
    """A sequence that rests in its cells, with copies of all of them."""
    sequence = resting(runner, tokens)
    while runner.copy_resting():
        runner.check_parked()
    return sequence


def test_copies_are_made_ahead_in_pieces_and_take_nothing_from_the_cells(runner, expected):
    kept = resting(runner, FIRST)
    made = []
    while runner.copy_resting():
        runner.check_parked()
        made.append(runner.pages_copied())
    assert made == [24, 56, 88, 120]
    assert runner.pages_parked() == 0
    same(append(runner, runner.fork_sequence(kept, 120), [9]), expected([*FIRST, 9]))


def test_a_prompt_finds_copies_and_copies_nothing(runner, expected, monkeypatch):
    kept = copied(runner, FIRST)
    with monkeypatch.context() as patches:
        patches.setattr(StateDesk, "take", None)
        same(append(runner, runner.create_sequence(), SECOND), expected(SECOND))
    assert runner.pages_parked() == runner.pages_copied() == 120
    same(append(runner, runner.fork_sequence(kept, 120), [9]), expected([*FIRST, 9]))


def test_what_came_back_keeps_its_copies(runner, expected):
    kept = parked(runner, FIRST)
    append(runner, kept, SECOND[:30])
    assert (runner.pages_parked(), runner.pages_copied()) == (0, 120)
    runner.park_sequence(kept)
    copies = []
    while runner.copy_resting():
        copies.append(runner.pages_copied())
    assert copies == [142, 150]
    append(runner, runner.create_sequence(), THIRD)
    assert runner.pages_parked() == 150
    same(append(runner, kept, [9]), expected([*FIRST, *SECOND[:30], 9]))


def test_a_copied_piece_that_is_used_in_part_stays_in_its_cells(runner, expected):
    kept = copied(runner, FIRST)
    fork = runner.fork_sequence(kept, 40)
    same(append(runner, fork, SECOND), expected(FIRST[:40] + SECOND))
    assert (runner.pages_parked(), runner.pages_copied()) == (56, 120)
    runner.park_sequence(fork)
    append(runner, runner.create_sequence(), THIRD)
    assert runner.pages_parked() == 240
    same(append(runner, runner.fork_sequence(fork, 100), [9]), expected([*FIRST[:40], *SECOND[:60], 9]))
    same(append(runner, runner.fork_sequence(kept, 120), [9]), expected([*FIRST, 9]))


def test_copies_of_what_is_cut_are_forgotten(runner, expected):
    kept = copied(runner, FIRST)
    runner.truncate_sequence(kept, 50)
    runner.check_parked()
    assert runner.pages_copied() == 32  # whole pieces, since the rest can be copied again
    assert not runner.copy_resting()  # too few to move
    append(runner, kept, SECOND[:70])
    runner.park_sequence(kept)
    append(runner, runner.create_sequence(), THIRD)
    same(append(runner, runner.fork_sequence(kept, 120), [9]), expected([*FIRST[:50], *SECOND[:70], 9]))


def test_what_is_computed_with_leaves_room_for_copies_of_what_rests(path, expected, monkeypatch):
    monkeypatch.setattr(parking, "_SHARE", 4)
    small = opened(path)
    kept = copied(small, FIRST)
    other = resting(small, SECOND)
    assert not small.copy_resting()  # 128 tokens may be copied
    append(small, kept, [9])
    same(append(small, small.create_sequence(), THIRD), expected(THIRD))
    assert small.pages_parked() == small.pages_copied() == 120
    same(append(small, kept, [9]), expected([*FIRST, 9, 9]))
    same(append(small, other, [9]), expected([*SECOND, 9]))
    small.close()


@pytest.mark.parametrize(("start", "stop"), [(0, 32), (96, 120), (10, 70)])
def test_what_is_copied_is_exported_too(runner, expected, start, stop):
    kept = copied(runner, FIRST)
    data = runner.export_kv(kept, start, stop)
    runner.check_parked()
    target = runner.fork_sequence(kept, start)
    runner.import_kv(target, start, stop, data)
    same(append(runner, target, [9]), expected([*FIRST[:stop], 9]))


@pytest.fixture
def piecewise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is moved at a time."""
    monkeypatch.setattr(parking, "PART_BYTES", 1)
    monkeypatch.setattr(parking, "LEAST_TOKENS", 8)


def test_a_prompt_is_prepared_in_parts(piecewise, path, expected):
    runner = opened(path)
    kept = resting(runner, FIRST)
    short = runner.create_sequence()
    moved = []
    while not runner.prepare_sequence(short, len(SECOND)):
        runner.check_parked()
        moved.append(runner.pages_parked())
    assert moved == [24, 56, 88]  # from its end, whose cells are free by then
    assert runner.pages_parked() == 120
    same(append(runner, short, SECOND), expected(SECOND))
    fork = runner.fork_sequence(kept, 70)
    assert not runner.prepare_sequence(fork, 1)
    assert not runner.prepare_sequence(fork, 1)
    runner.check_parked()
    assert runner.pages_parked() == 120 - 64
    assert runner.prepare_sequence(fork, 1)
    assert runner.pages_parked() == 24
    same(append(runner, fork, [9]), expected([*FIRST[:70], 9]))
    runner.close()


def test_what_is_on_its_way_back_is_not_parked_for_others(piecewise, path, expected):
    runner = opened(path)
    kept = parked(runner, FIRST)
    fork, other = runner.fork_sequence(kept, 120), runner.create_sequence()
    assert not runner.prepare_sequence(fork, 1)
    for _ in range(2):
        append(runner, other, SECOND[:30])
        assert runner.pages_parked() == 88
    same(append(runner, fork, [9]), expected([*FIRST, 9]))
    runner.close()


def test_a_sequence_on_its_way_back_may_be_let_go(piecewise, path):
    runner = opened(path)
    kept = parked(runner, FIRST)
    fork = runner.fork_sequence(kept, 100)
    assert not runner.prepare_sequence(fork, 1)
    runner.free_sequence(fork)
    assert not runner.prepare_sequence(kept, 1)
    runner.park_sequence(kept)
    append(runner, runner.create_sequence(), SECOND)
    assert runner.pages_parked() == 120
    runner.close()


@pytest.mark.parametrize(("start", "stop"), [(0, 32), (32, 120), (0, 120), (10, 120), (0, 90), (40, 60)])
def test_it_is_exported_from_where_it_lies(runner, expected, start, stop):
    kept = parked(runner, FIRST)
    data = runner.export_kv(kept, start, stop)
    runner.check_parked()
    assert runner.pages_parked() == 120
    runner.free_sequence(kept)
    target = runner.create_sequence()
    if start:
        append(runner, target, FIRST[:start])
    runner.import_kv(target, start, stop, data)
    same(append(runner, target, [9]), expected([*FIRST[:stop], 9]))


def test_no_more_is_parked_than_there_is_memory_for(path, expected, monkeypatch):
    monkeypatch.setattr(parking, "_SHARE", 8)
    small = opened(path)
    kept = resting(small, FIRST)
    same(append(small, small.create_sequence(), SECOND), expected(SECOND))
    assert small.pages_parked() == 56  # of 64: its last two pieces
    same(append(small, small.fork_sequence(kept, 120), [9]), expected([*FIRST, 9]))
    small.close()
