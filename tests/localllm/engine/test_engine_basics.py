"""The life of a request on a runner whose answers depend on the exact history."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams, fit_prompt
from localllm.engine.step_costs import StepCosts
from localllm.engine.stream import CAPACITY, Completion
from localllm.errors import ContextOverflowError, LocalLLMError, OutOfMemoryError, QueueFullError, RequestError
from tests.fakes.fake_runner import EOG, FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

GREEDY = SamplingParams(temperature=0)


def request(*prompt: int, max_tokens: int | None = 6, **others: object) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, sampling=GREEDY, max_tokens=max_tokens, **others)  # type: ignore[arg-type]


def expected(runner: FakeRunner, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Greedy continuation computed without an engine."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(runner.logits_after(history).argmax()))
    return tuple(history[len(prompt) :])


def run_all(engine: Engine) -> None:
    while engine.step():
        engine.check_integrity()


def answer(engine: Engine, wanted: GenerationRequest) -> Completion:
    stream = engine.submit(wanted)
    run_all(engine)
    return stream.collect()


def test_answers_are_those_of_the_history() -> None:
    runner = FakeRunner()
    prompt = tuple(range(1, 40))
    done = answer(Engine(runner, FakeVocabulary()), request(*prompt))
    assert done.token_ids == expected(runner, prompt, 6)
    assert done.text == "".join(chr(0x40 + token) for token in done.token_ids)
    assert done.last.finish_reason is FinishReason.LENGTH
    assert done.last.counts.prompt == 39 and done.last.counts.generated == 6


@pytest.mark.parametrize(
    ("max_tokens", "policy"), [(6, ContextPolicy.REFUSE), (0, ContextPolicy.REFUSE), (200, ContextPolicy.ROLLING)]
)
def test_the_prompt_is_counted_once_it_is_computed(max_tokens: int, policy: ContextPolicy) -> None:
    engine = Engine(FakeRunner(), FakeVocabulary(), context_limit=64)
    engine.submit(request(*range(1, 40), max_tokens=max_tokens, context_policy=policy, ignore_eos=True))
    run_all(engine)
    assert engine.stats().prompt_tokens == 39


def test_second_turn_computes_only_what_is_new() -> None:
    runner = FakeRunner()
    engine = Engine(runner, FakeVocabulary())
    prompt = tuple(range(1, 40))
    first = answer(engine, request(*prompt))
    before = runner.rows_computed
    turn = (*prompt, *first.token_ids, 7, 8, 9)
    second = answer(engine, request(*turn, max_tokens=1))
    assert second.token_ids == expected(runner, turn, 1)
    # The last token of the first answer was never computed, so four tokens are new.
    assert runner.rows_computed - before == 4
    assert second.last.counts.cached_memory == len(turn) - 4


def test_a_repeated_prompt_computes_its_last_token_again() -> None:
    runner = FakeRunner()
    engine = Engine(runner, FakeVocabulary())
    first = answer(engine, request(*range(1, 30)))
    before = runner.rows_computed
    again = answer(engine, request(*range(1, 30), max_tokens=1))
    assert runner.rows_computed - before == 1
    assert again.token_ids == first.token_ids[:1]


@pytest.mark.parametrize("can_truncate", [True, False])
def test_together_as_alone(can_truncate: bool) -> None:
    runner = FakeRunner(pages=200, can_truncate=can_truncate)
    engine = Engine(runner, FakeVocabulary())
    prompts = [tuple(int(token) for token in np.random.default_rng(seed).integers(1, 64, 20)) for seed in range(12)]
    streams = [engine.submit(request(*prompt)) for prompt in prompts]
    run_all(engine)
    assert [stream.collect().token_ids for stream in streams] == [expected(runner, prompt, 6) for prompt in prompts]
    engine.check_integrity()


def test_samples_of_one_prompt_share_its_prefill() -> None:
    runner = FakeRunner(pages=200)
    engine = Engine(runner, FakeVocabulary())
    prompt = tuple(range(1, 41))
    streams = [engine.submit(replace(request(*prompt), sampling=SamplingParams(seed=seed))) for seed in range(4)]
    run_all(engine)
    answers = {stream.collect().token_ids for stream in streams}
    assert len(answers) == 4
    # 40 rows for the prompt, its last one again for each of three, and five decoded tokens each.
    assert runner.rows_computed <= 40 + 3 * runner.info.page_size + 4 * 5


def test_stop_string_over_token_borders_is_cut() -> None:
    runner = FakeRunner()
    prompt = tuple(range(1, 10))
    tokens = expected(runner, prompt, 6)
    text = "".join(chr(0x40 + token) for token in tokens)
    done = answer(Engine(runner, FakeVocabulary()), request(*prompt, max_tokens=20, stop=(text[2:5],)))
    assert done.text == text[:2]
    assert done.last.finish_reason is FinishReason.STOP


def end_at_once(_: list[int], row: NDArray[np.float32]) -> None:
    row[EOG] = 50


def test_eos_ends_and_min_tokens_delays_it() -> None:
    runner = FakeRunner(bias=end_at_once)
    engine = Engine(runner, FakeVocabulary())
    done = answer(engine, request(1, 2, 3))
    assert (done.text, done.last.finish_reason, done.last.counts.generated) == ("", FinishReason.STOP, 1)
    assert answer(engine, request(1, 2, 3, min_tokens=3)).last.counts.generated == 4
    assert answer(engine, request(1, 2, 3, ignore_eos=True)).last.counts.generated == 6


def test_cancel_in_queue_prefill_and_decode() -> None:
    runner = FakeRunner(max_rows=8)
    engine = Engine(runner, FakeVocabulary(), max_running=1)
    running, waiting = engine.submit(request(*range(1, 60))), engine.submit(request(5, 6, 7))
    engine.step()
    assert waiting.poll()[-1].progress.queue_position == 1  # type: ignore[union-attr]
    waiting.cancel()
    engine.step()
    assert waiting.collect().last.finish_reason is FinishReason.CANCELLED
    computed = runner.rows_computed
    running.cancel()
    run_all(engine)
    assert engine.stats().prompt_tokens == computed < 59
    done = running.collect()
    assert done.last.finish_reason is FinishReason.CANCELLED and runner.rows_computed == computed
    # The tokens prefilled before stay cached.
    again = engine.submit(request(*range(1, 60)))
    run_all(engine)
    assert again.collect().last.counts.cached_memory == computed
    decoding = engine.submit(request(3, 2, 1, max_tokens=None))
    for _ in range(5):
        engine.step()
    decoding.cancel()
    run_all(engine)
    assert decoding.collect().last.counts.generated >= 3


def test_short_request_overtakes_a_long_prefill() -> None:
    runner = FakeRunner(pages=1200, max_rows=32)
    engine = Engine(runner, FakeVocabulary())
    long = engine.submit(request(*([1, 2, 3, 4, 5, 6, 7, 8] * 500)))
    for _ in range(5):
        engine.step()
    short = engine.submit(request(*range(40, 10, -1)))
    before = len(runner.batches)
    while not any(event.token_ids for event in short.poll()):
        engine.step()
    assert len(runner.batches) - before <= 3
    progress = long.poll()[-1].progress
    assert progress is not None and progress.prefilled < 300 < progress.total


def test_a_slow_reader_pauses_only_that_request() -> None:
    runner = FakeRunner(pages=400)
    engine = Engine(runner, FakeVocabulary())
    slow = engine.submit(request(1, 2, 3, max_tokens=CAPACITY + 100))
    run_all(engine)
    quick = engine.submit(request(4, 5, 6))
    run_all(engine)
    assert quick.collect().last.finish_reason is FinishReason.LENGTH
    events = slow.poll()
    assert events[-1].finish_reason is None
    run_all(engine)
    tokens = [token for event in [*events, *slow.poll()] for token in event.token_ids]
    assert tuple(tokens) == expected(runner, (1, 2, 3), CAPACITY + 100)


def test_queue_is_bounded_and_bad_requests_are_refused() -> None:
    engine = Engine(FakeRunner(), FakeVocabulary(), max_waiting=1)
    engine.submit(request(1))
    with pytest.raises(QueueFullError):
        engine.submit(request(2))
    for bad in (request(), request(64), request(1, max_tokens=-1), request(1, stop=("",))):
        with pytest.raises(RequestError):
            engine.submit(bad)


class Tens:
    """A conversation of messages of ten tokens each, whose first one is kept."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens
        self.length = len(tokens)

    def without_oldest(self, tokens: int) -> tuple[tuple[int, ...], int]:
        dropped = -(-tokens // 10)
        return (*self._tokens[:10], *self._tokens[10 + 10 * dropped :]), dropped


def test_context_policies() -> None:
    runner = FakeRunner(pages=200)
    engine = Engine(runner, FakeVocabulary(), context_limit=40)
    long = tuple(int(token) for token in np.random.default_rng(1).integers(1, 64, 60))
    with pytest.raises(ContextOverflowError, match="60 tokens and the context holds 40"):
        engine.submit(request(*long))
    dropping = request(*long, context_policy=ContextPolicy.DROP_MESSAGES, messages=Tens(long))
    done = answer(engine, dropping)
    assert (done.last.counts.dropped_messages, done.last.counts.dropped_tokens) == (3, 30)
    assert done.token_ids == expected(runner, (*long[:10], *long[40:]), 6)
    rolling = answer(engine, request(*long, context_policy=ContextPolicy.ROLLING, max_tokens=50))
    assert rolling.last.counts.generated == 50
    assert rolling.last.counts.dropped_tokens >= 60 + 50 - 40
    assert answer(engine, request(*long[:35], max_tokens=None)).last.counts.generated == 5


@pytest.mark.parametrize(
    ("keep", "window"),
    [
        (None, [*range(4), *range(44, 60)]),
        (0, [*range(40, 60)]),
        (12, [*range(12), *range(50, 60)]),  # the newest get at least a quarter
        (50, [*range(19), *range(50, 60)]),
        (-1, [*range(19), *range(50, 60)]),
    ],
)
def test_a_rolling_window_keeps_the_requested_first_tokens(keep: int | None, window: list[int]) -> None:
    rolling = request(*range(60), context_policy=ContextPolicy.ROLLING, keep=keep)
    assert fit_prompt(rolling, 40).tokens == window


def test_a_window_that_rolls_while_it_answers_keeps_its_prompt() -> None:
    runner = FakeRunner(pages=200)
    prompt = (5, 6, 7, 8, 9, 10)
    asked = request(*prompt, context_policy=ContextPolicy.ROLLING, max_tokens=60, keep=-1)
    tokens = list(answer(Engine(runner, FakeVocabulary(), context_limit=24), asked).token_ids)
    window = list(prompt)
    for token in tokens:
        if len(window) == 24:
            window = [*prompt, *window[-6:]]
        assert expected(runner, tuple(window), 1) == (token,)
        window.append(token)


def test_memory_pressure_preempts_and_loses_nothing() -> None:
    runner = FakeRunner(pages=16)
    engine = Engine(runner, FakeVocabulary(), background_tokens=0)
    prompts = [(seed, 9, 9, 9, 9) for seed in range(1, 5)]
    streams = [engine.submit(request(*prompt, max_tokens=25)) for prompt in prompts]
    run_all(engine)
    assert [stream.collect().token_ids for stream in streams] == [expected(runner, prompt, 25) for prompt in prompts]
    assert engine.stats().preemptions > 0
    engine.check_integrity()


def test_a_request_that_reads_its_text_again_prefills() -> None:
    engine = Engine(FakeRunner(pages=16), FakeVocabulary(), background_tokens=0)
    for seed in range(1, 5):
        engine.submit(request(seed, 9, 9, 9, 9, max_tokens=25))
    rows = 0
    while engine.step():
        for timeline in engine.journal.timelines:
            rows = max(rows, *(span.rows for span in timeline.spans if not span.decodes), 0)
            decoded = sum(span.rows for span in timeline.spans if span.decodes)
            assert decoded <= max(timeline.generated, 25) - 1
    assert engine.stats().preemptions > 0
    assert rows > 5  # a prompt of 5 tokens, and what was generated before the preemption
    assert all(step.decode <= 4 for step in engine.journal.steps)


def test_background_requests_evict_nothing() -> None:
    runner = FakeRunner(pages=16)
    engine = Engine(runner, FakeVocabulary(), background_tokens=0)
    answer(engine, request(*range(1, 50)))
    kept = engine.stats().cached_tokens
    refused = answer(engine, request(*range(60, 30, -1), background=True))
    assert refused.last.finish_reason is FinishReason.ERROR and refused.last.error
    assert engine.stats().cached_tokens == kept


def test_threads_and_asyncio_read_the_same_stream() -> None:
    runner = FakeRunner()
    engine = Engine(runner, FakeVocabulary())
    engine.start()
    assert engine.submit(request(1, 2, 3)).collect().token_ids == expected(runner, (1, 2, 3), 6)

    async def read() -> list[int]:
        return [token async for event in engine.submit(request(4, 5, 6)) for token in event.token_ids]

    assert tuple(asyncio.run(read())) == expected(runner, (4, 5, 6), 6)
    endless = engine.submit(request(1, 2, max_tokens=None))
    engine.close()
    assert endless.collect().last.finish_reason in {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert runner.closed
    with pytest.raises(LocalLLMError, match="stopped"):
        engine.submit(request(1))


def test_a_runner_that_breaks_ends_every_stream(caplog: pytest.LogCaptureFixture) -> None:
    def break_down(_: list[int], __: NDArray[np.float32]) -> None:
        raise RuntimeError("the device is gone")

    engine = Engine(FakeRunner(bias=break_down), FakeVocabulary())
    stream = engine.submit(request(1, 2, 3))
    engine.start()
    assert "the device is gone" in (stream.collect().last.error or "")
    with pytest.raises(LocalLLMError, match="device is gone"):
        engine.submit(request(1))
    engine.close()


def test_a_failed_step_ends_only_requests_in_that_step() -> None:
    def fail_on_seven(history: list[int], _: NDArray[np.float32]) -> None:
        if history[0] == 7:
            raise OutOfMemoryError("no room for sevens")

    runner = FakeRunner(bias=fail_on_seven)
    engine = Engine(runner, FakeVocabulary())
    failed = answer(engine, request(7, 8, 9))
    assert (failed.last.finish_reason, failed.last.error) == (FinishReason.ERROR, "no room for sevens")
    assert answer(engine, request(1, 2, 3)).last.finish_reason is FinishReason.LENGTH
    engine.check_integrity()


def test_slow_readers_do_not_block_others() -> None:
    runner = FakeRunner(pages=400)
    engine = Engine(runner, FakeVocabulary(), max_running=2)
    slow = [engine.submit(request(first, 2, 3, max_tokens=CAPACITY + 50)) for first in (1, 2)]
    run_all(engine)
    assert answer(engine, request(4, 5, 6)).last.counts.generated == 6
    for first, stream in zip((1, 2), slow, strict=True):
        tokens = [token for event in stream.poll() for token in event.token_ids]
        run_all(engine)
        tokens += stream.collect().token_ids
        assert tuple(tokens) == expected(runner, (first, 2, 3), CAPACITY + 50)
        assert list(stream) == []


def test_drafts_stay_within_a_rolling_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)  # step costs mean nothing here, and drafts pay

    def repeat(history: list[int], row: NDArray[np.float32]) -> None:
        row[history[-4] if len(history) > 3 else 1] += 20

    runner = FakeRunner(bias=repeat, max_context=64)
    engine = Engine(runner, FakeVocabulary())
    done = answer(engine, request(1, 2, 3, 4, max_tokens=200, context_policy=ContextPolicy.ROLLING))
    assert done.last.counts.generated == 200 and done.last.counts.accepted > 50
    assert max(runner.batches) > 2


def test_a_background_request_gives_way_to_a_chat() -> None:
    runner = FakeRunner(pages=24)
    engine = Engine(runner, FakeVocabulary(), background_tokens=0)
    title = engine.submit(request(1, 2, 3, max_tokens=50, background=True))
    for _ in range(10):
        engine.step()
    chat = engine.submit(request(*range(4, 60), max_tokens=30))
    ran = False
    while engine.step():
        runs = any(generation.writer.stream is chat for generation in engine.scheduler.running)
        waits = any(generation.writer.stream is chat for generation in engine.scheduler.waiting)
        assert not (ran and waits), "the chat was preempted for the sake of a background request"
        ran = ran or runs
    assert chat.collect().token_ids == expected(runner, tuple(range(4, 60)), 30)
    assert title.collect().last.finish_reason in {FinishReason.LENGTH, FinishReason.ERROR}
    engine.check_integrity()
