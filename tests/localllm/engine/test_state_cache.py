"""States that can only be used whole: which of them serve a new prompt, in memory and from disk."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.engine.sequence import KeySpace
from localllm.engine.state_cache import TAIL_TOKENS, StateCache, mark_places
from localllm.engine.stream import Completion
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

LONG = tuple((at * 7) % 63 + 1 for at in range(600))
MARKS = (512, 600 - TAIL_TOKENS)


def whole_runner(**shape: int) -> FakeRunner:
    return FakeRunner(can_truncate=False, **{"pages": 1000, "max_rows": 64} | shape)


def answer(engine: Engine, prompt: tuple[int, ...], **others: object) -> Completion:
    request = GenerationRequest(prompt, SamplingParams(temperature=0), max_tokens=4, **others)  # type: ignore[arg-type]
    stream = engine.submit(request)
    while engine.step():
        engine.check_integrity()
    return stream.collect()


def new_engine(runner: FakeRunner, folder: Path | None = None) -> Engine:
    disk = DiskCache(folder, runner.info.kv_layout, 2**20) if folder else None
    return Engine(runner, FakeVocabulary(), disk=disk)


def expected(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The logits of a runner that has seen nothing else."""
    return answer(new_engine(FakeRunner(pages=1000)), prompt).token_ids


@pytest.mark.parametrize("length", [0, 1, 2 * TAIL_TOKENS, 33, 600, 5000, 100_000])
def test_marks_are_few_and_inside_the_prompt(length: int) -> None:
    places = mark_places(length)
    assert places == sorted(set(places)) and len(places) <= 5
    assert not places or (places[0] > 0 and places[-1] == length - TAIL_TOKENS)
    assert places or length <= 2 * TAIL_TOKENS


def test_the_next_turn_computes_what_is_new() -> None:
    runner = whole_runner()
    engine = new_engine(runner)
    first = answer(engine, LONG)
    turn = (*LONG, *first.token_ids, 9, 8, 7)
    done = answer(engine, turn)
    assert done.last.counts.cached_memory == len(LONG) + 3
    assert done.token_ids == expected(turn)
    engine.check_integrity()


def test_an_answer_that_is_not_repeated_leaves_the_prompt_of_use() -> None:
    """Reasoning is left out of the next turn's prompt, and the beginning of the answer may be tokenised differently."""
    engine = new_engine(whole_runner())
    answer(engine, LONG)
    turn = (*LONG[: 1 - TAIL_TOKENS], 5, 5, 5, *LONG[:40])
    done = answer(engine, turn)
    assert done.last.counts.cached_memory == MARKS[1]
    assert done.token_ids == expected(turn)


def test_the_same_prompt_again_and_an_edit_of_its_end() -> None:
    engine = new_engine(whole_runner())
    answer(engine, LONG)
    assert answer(engine, LONG).last.counts.cached_memory == MARKS[1]
    edited = (*LONG[:550], 3, 2, 1)
    done = answer(engine, edited)
    assert (done.last.counts.cached_memory, done.token_ids) == (MARKS[0], expected(edited))


def test_a_background_request_keeps_no_state() -> None:
    engine = new_engine(whole_runner())
    answer(engine, LONG, background=True)
    assert engine.stats().cached_prefixes == 0


def test_a_failed_answer_leaves_the_engine_running() -> None:
    """Its last row is computed and has no token after it; the state cannot be truncated to take the row back."""

    def broken(history: list[int], row: NDArray[np.float32]) -> None:
        row[:] = np.nan if len(history) == len(LONG) + 2 else row

    runner = FakeRunner(can_truncate=False, pages=1000, max_rows=64, bias=broken)
    engine = new_engine(runner)
    failed = answer(engine, LONG)
    assert failed.last.finish_reason is FinishReason.ERROR and len(failed.token_ids) == 2
    assert answer(engine, LONG[:100]).last.finish_reason is FinishReason.LENGTH


def test_handles_and_pages_are_bounded_and_what_is_continued_goes_first() -> None:
    runner = whole_runner(max_sequences=8, pages=700)
    engine = new_engine(runner)
    chats = [(letter, *LONG[:99]) for letter in (61, 62)]
    answer(engine, chats[0])
    prompt = chats[1]
    for _ in range(5):
        prompt = (*prompt, *answer(engine, prompt).token_ids, *LONG[200:240])
    engine.check_integrity()
    # The other chat's newest state has outlived older ones of the continued chat.
    assert answer(engine, (*chats[0], *expected(chats[0]), 7)).last.counts.cached_memory == len(chats[0]) + 3


def test_a_new_process_restores_the_longest_state(tmp_path: Path) -> None:
    engine = new_engine(whole_runner(), tmp_path)
    first = answer(engine, LONG)
    engine.close()
    turn = (*LONG, *first.token_ids, 5, 6)
    runner = whole_runner()
    engine = new_engine(runner, tmp_path)
    done = answer(engine, turn)
    engine.close()
    assert (done.last.counts.cached_disk, runner.rows_computed) == (603, 3 + 3)
    assert done.token_ids == expected(turn)


def test_a_new_process_finds_the_prompt_before_its_answer(tmp_path: Path) -> None:
    engine = new_engine(whole_runner(), tmp_path)
    answer(engine, LONG)
    engine.close()
    engine = new_engine(whole_runner(), tmp_path)
    assert answer(engine, (*LONG, 63, 62)).last.counts.cached_disk == MARKS[1]
    engine.close()


def test_no_part_of_a_state_is_restored(tmp_path: Path) -> None:
    engine = new_engine(whole_runner(), tmp_path)
    answer(engine, LONG)
    engine.close()
    engine = new_engine(whole_runner(), tmp_path)
    branch = (*LONG[:400], 1, 2, 3)
    done = answer(engine, branch)
    engine.close()
    assert (done.last.counts.cached_disk, done.token_ids) == (0, expected(branch))


def test_a_chat_keeps_two_states_on_disk(tmp_path: Path) -> None:
    prompt = LONG
    for _ in range(4):
        engine = new_engine(whole_runner(), tmp_path)
        prompt = (*prompt, *answer(engine, prompt).token_ids, *LONG[100:140])
        engine.close()
    assert len(list(tmp_path.glob("*/*.kv"))) == 2


def test_integrity_is_checked() -> None:
    runner = whole_runner()
    cache = StateCache(runner)
    sequence = runner.create_sequence()
    runner.run([5, 6], [0, 1], [sequence] * 2, [])
    space = KeySpace()
    cache.insert(space, [5, 6], sequence)
    assert cache.check_integrity() == {sequence}
    assert cache.match(space, [5, 6, 7]) == 2 and cache.match(space, [5]) == 0
    assert cache.match(KeySpace(namespace="other"), [5, 6, 7]) == 0
    runner.run([7], [2], [sequence], [])
    with pytest.raises(RuntimeError, match="does not hold 2 tokens"):
        cache.check_integrity()
