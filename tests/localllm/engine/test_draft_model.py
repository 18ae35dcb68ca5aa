"""Drafts of a second model: good ones help; bad ones, missing ones and failures change nothing."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine.drafter import CATCH_UP_ROWS, DraftModel
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, GenerationRequest, SamplingParams
from localllm.engine.speculation import DraftLength, ModelDraftLength
from localllm.engine.step_costs import ChunkSize, StepCosts
from localllm.engine.stream import Completion
from localllm.errors import OutOfMemoryError, RequestError
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

PROMPT = tuple(range(1, 30))
GREEDY = GenerationRequest(PROMPT, SamplingParams(temperature=0), max_tokens=40)


def poor(history: list[int], row: NDArray[np.float32]) -> None:
    """Half of the drafted tokens are wrong."""
    if len(history) % 2:
        row[:] = -row


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLength, "choose", lambda _self, limit, *_: max(min(limit, 4), 0))


def request(prompt: tuple[int, ...] = PROMPT, temperature: float = 0, **others: object) -> GenerationRequest:
    sampling = SamplingParams(temperature=temperature, seed=3, repeat_penalty=1.2, repeat_last_n=8)
    return GenerationRequest(prompt, sampling=sampling, **{"max_tokens": 40, **others})  # type: ignore[arg-type]


def answers(draft: FakeRunner | None, *wanted: GenerationRequest, pages: int = 400) -> list[Completion]:
    runner = FakeRunner(pages=pages)
    engine = Engine(runner, FakeVocabulary(), drafter=DraftModel(draft) if draft else None)
    streams = [engine.submit(one) for one in wanted]
    while engine.step():
        engine.check_integrity()
    done = [stream.collect() for stream in streams]
    engine.check_integrity()
    return done


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "draft",
    [
        FakeRunner(pages=400),
        FakeRunner(pages=400, bias=poor),
        FakeRunner(pages=40, bias=poor),
        FakeRunner(pages=400, vocab_size=32),
        FakeRunner(pages=400, max_context=45),
    ],
    ids=["perfect", "poor", "cramped", "fewer tokens", "shorter context"],
)
def test_answers_do_not_depend_on_the_guesses(draft: FakeRunner) -> None:
    wanted = [request(tuple(range(at, at + 20 + at)), temperature=at % 3) for at in range(1, 9)]
    plain = [(done.token_ids, done.text) for done in answers(None, *wanted)]
    assert [(done.token_ids, done.text) for done in answers(draft, *wanted)] == plain


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_marked_answers_do_not_depend_on_the_guesses(temperature: float) -> None:
    unmarked = request(temperature=temperature, max_tokens=80)
    marked = replace(unmarked, sampling=replace(unmarked.sampling, watermark_key="mine", watermark_delta=4.0))
    (plain,), (other,) = answers(None, marked), answers(None, unmarked)
    (guessed,) = answers(FakeRunner(pages=400, bias=poor), marked)
    assert guessed.token_ids == plain.token_ids != other.token_ids
    assert 0 < guessed.last.counts.accepted < guessed.last.counts.drafted


@pytest.mark.usefixtures("eager")
def test_a_perfect_guesser_is_always_accepted() -> None:
    (done,) = answers(FakeRunner(pages=400), GREEDY)
    assert done.last.counts.accepted == done.last.counts.drafted - 2 >= 25, "two guesses only measure a step"


@pytest.mark.usefixtures("eager")
def test_a_draft_ends_at_the_draft_models_context(caplog: pytest.LogCaptureFixture) -> None:
    (done,) = answers(FakeRunner(pages=400, max_context=47), GREEDY)
    assert done.last.counts.accepted > 0 and "no longer used" not in caplog.text


@pytest.mark.usefixtures("eager")
def test_a_text_that_the_draft_model_cannot_read_keeps_no_other_from_being_drafted() -> None:
    unreadable = request((63, *PROMPT), max_tokens=200)
    _, done = answers(FakeRunner(pages=400, vocab_size=63), unreadable, request(max_tokens=10))
    assert done.last.counts.drafted > 0


def test_long_drafts_leave_rows_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that copies a long text, on a machine whose steps have the fewest rows."""
    monkeypatch.setattr(DraftLength, "choose", lambda _self, limit, *_: max(limit, 0))
    monkeypatch.setattr(ChunkSize, "observe", lambda *_: None)
    text = tuple(int(token) for token in np.random.default_rng(0).integers(1, 64, 200))
    runner = FakeRunner(pages=400, bias=lambda history, row: row.__setitem__(history[-len(text) :][0], 20))
    engine = Engine(runner, FakeVocabulary())
    copying = engine.submit(GenerationRequest(text * 2, SamplingParams(temperature=0), max_tokens=1000))
    while not runner.batches or runner.batches[-1] < ChunkSize.SMALLEST or not copying.poll()[-1].token_ids:
        engine.step()
    other = engine.submit(GenerationRequest(PROMPT, SamplingParams(temperature=0), max_tokens=1))
    for _ in range(len(PROMPT)):
        engine.step()
    assert any(event.finish_reason for event in other.poll()), "the prompt waits for the end of the other answer"


@pytest.mark.usefixtures("eager")
def test_a_rolling_window_is_followed() -> None:
    wanted = request(max_tokens=200, context_limit=48, context_policy=ContextPolicy.ROLLING)
    (plain,), (guessed,) = answers(None, wanted), answers(FakeRunner(pages=400, bias=poor), wanted)
    assert guessed.token_ids == plain.token_ids and guessed.last.counts.accepted > 0


@pytest.mark.usefixtures("eager")
def test_a_long_prompt_is_read_in_pieces_and_once() -> None:
    draft = FakeRunner(pages=800, max_rows=128)
    long = tuple(int(token) for token in np.random.default_rng(5).integers(1, 64, 500))
    first, second = request(long), request((*long, 7, 8))
    engine = Engine(FakeRunner(pages=800, max_rows=128), FakeVocabulary(), drafter=DraftModel(draft))
    for one in (first, second):
        stream = engine.submit(one)
        while engine.step():
            pass
        assert stream.collect().last.counts.accepted > 0
    assert max(draft.batches) <= CATCH_UP_ROWS
    assert draft.rows_computed < 700


@pytest.mark.usefixtures("eager")
def test_a_guesser_that_fails_is_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fail(history: list[int], _: NDArray[np.float32]) -> None:
        if len(history) > 40:
            raise OutOfMemoryError("the device is full")

    with caplog.at_level(logging.WARNING):
        done = answers(FakeRunner(pages=400, bias=fail), request(), request((4, 5, 6)))
    assert [one.token_ids for one in done] == [one.token_ids for one in answers(None, request(), request((4, 5, 6)))]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "device is full" in caplog.text


def test_a_state_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(RequestError, match="draft model"):
        DraftModel(FakeRunner(can_truncate=False))


def costs(base: float, per_row: float) -> StepCosts:
    learned = StepCosts()
    for rows in (1, 1, 9, 1, 13, 1, 2, 1, 10) * 20:
        learned.observe(rows, base + per_row * rows)
    return learned


def test_step_costs_are_those_observed() -> None:
    learned = costs(0.02, 0.001)
    assert [learned.seconds(rows) for rows in (1, 5, 12)] == pytest.approx([0.021, 0.025, 0.032], rel=0.1)
    learned.observe(500, 9.0)
    learned.observe(1, 60.0)
    assert learned.seconds(1) < 0.03


def test_drafts_grow_with_acceptance_and_end_where_they_lose() -> None:
    cheap, dear = costs(0.02, 0.0005), costs(0.001, 0.02)
    length = ModelDraftLength()
    for _ in range(80):
        length.observe([1.0] * 4, 4)
        length.stepped(0.02, -0.02)
    assert length.choose(30, cheap, 0.0) >= 8
    assert length.choose(3, cheap, 0.0) == 3
    assert 0 < ModelDraftLength().choose(30, cheap, 0.005) < ModelDraftLength().choose(30, cheap, 0.0001)
    length = ModelDraftLength()
    assert length.choose(30, dear, 0.0) <= 1, "a trial"
    for _ in range(4):
        length.stepped(0.02, 0.02)
    assert length.choose(30, dear, 0.0) == 0


def test_places_of_a_draft_are_judged_apart() -> None:
    cheap, length = costs(0.02, 0.0005), ModelDraftLength()
    for _ in range(90):
        length.observe([0.99, 0.05, 0.9], 1)
    assert length.chance(0) > 0.9 and length.chance(1) < 0.1 and length.chance(9) < 0.1
    assert length.choose(30, cheap, 0.001) > 0
    assert length.least[1] > 0.3, "a second token is drafted only where the first is likely"
