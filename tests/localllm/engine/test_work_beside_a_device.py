"""A runner whose device computes by itself: steps are begun ahead, texts are sent meanwhile, answers stay the same."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_io import load_tokenizer, open_model
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.engine import engine
from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.drafter import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams
from localllm.engine.speculation import DraftLength, ModelDraftLength
from localllm.engine.stream import Completion, GenerationStream
from localllm.errors import LocalLLMError
from models import builtin
from tests.fakes.aside_runner import AsideRunner
from tests.fakes.byte_vocabulary import ByteVocabulary
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.oracle import llama_oracle

PIECES = dict(enumerate([b"", "é".encode()[:1], "é".encode()[1:], b"ab", b"bc", b"a"]))
PENALISED = SamplingParams(seed=3, repeat_penalty=1.3, logit_bias={9: -2.0}, dry_multiplier=0.5)
MARKED = SamplingParams(seed=4, watermark_key="key", watermark_delta=2.0)


@pytest.fixture(autouse=True)
def _no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLength, "choose", lambda *_: 0)


def request(number: int, **others: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=number % 3, seed=number)
    usual = {"prompt": tuple(range(number + 1, number + 20)), "sampling": sampling, "max_tokens": 30 + number}
    return GenerationRequest(**{**usual, **others})


def submitted(runner: FakeRunner) -> tuple[Engine, list[GenerationStream]]:
    running = Engine(runner, FakeVocabulary(PIECES))
    plain = [request(number) for number in range(4)]
    stopped = request(4, stop=("abc", "BC"), max_tokens=400)
    many = [request(number, ignore_eos=number % 2 == 0, min_tokens=number % 3) for number in range(6, 12)]
    changed = [request(12, sampling=PENALISED), request(13, sampling=MARKED)]
    rolling = request(14, context_limit=30, context_policy=ContextPolicy.ROLLING, max_tokens=60)
    told = request(5, sampling=SamplingParams(temperature=1, seed=5, logprobs=2), prompt_logprobs=1)
    return running, [running.submit(one) for one in (*plain, stopped, *many, *changed, rolling, told)]


def run(running: Engine) -> None:
    while running.step():
        running.check_integrity()


def answers(runner: FakeRunner) -> list[Completion]:
    running, streams = submitted(runner)
    run(running)
    running.close()
    return [stream.collect() for stream in streams]


def ahead(running: Engine) -> bool:
    """Do a step; whether the next one was begun within it."""
    runner = running.runner
    assert isinstance(runner, AsideRunner)
    running.step()
    return runner.busy


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_answers_are_those_of_a_runner_that_computes_at_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CHOOSERS", threads)
    for beside, alone in zip(answers(AsideRunner(pages=400)), answers(FakeRunner(pages=400)), strict=True):
        assert (beside.token_ids, beside.text, beside.logprobs) == (alone.token_ids, alone.text, alone.logprobs)
        assert (beside.last.finish_reason, beside.last.counts) == (alone.last.finish_reason, alone.last.counts)


def test_a_step_is_begun_before_the_tokens_of_the_one_before_are_worked_up() -> None:
    running = Engine(AsideRunner(pages=400), FakeVocabulary())
    stream = running.submit(request(1, max_tokens=40))
    began = "".join("-a"[ahead(running)] for _ in range(45)).strip("-")
    # A last token is known to be the last.
    assert began == "a" * 38 and len(stream.collect().token_ids) == 40


def test_every_17th_step_is_scheduled_while_a_request_waits() -> None:
    running = Engine(AsideRunner(pages=400), FakeVocabulary(), max_running=1)
    running.submit(request(1, max_tokens=40))
    running.submit(request(2, max_tokens=2))
    began = "".join("-a"[ahead(running)] for _ in range(45)).strip("-")
    assert began == f"{'a' * 16}-{'a' * 16}-{'a' * 4}"


def drafting(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> Engine:
    """An engine whose draft model drafts so many tokens in successive decisions, then none."""
    monkeypatch.setattr(ModelDraftLength, "choose", lambda *_: counts.pop(0) if counts else 0)
    return Engine(runner, FakeVocabulary(PIECES), drafter=DraftModel(FakeRunner(pages=400)))


def test_a_step_for_which_a_draft_model_drafts_nothing_is_begun_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    running = drafting(AsideRunner(pages=400), monkeypatch, [])
    stream = running.submit(request(1, max_tokens=40))
    began = "".join("-a"[ahead(running)] for _ in range(45)).strip("-")
    # What a further row costs is measured first, twice.
    assert began == f"aa---{'a' * 33}"
    assert len(stream.collect().token_ids) == 40


def test_answers_with_a_draft_model_are_those_of_a_runner_that_computes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for kind in (AsideRunner, FakeRunner):
        running = drafting(kind(pages=400), monkeypatch, [0, 3, 0, 0, 0, 0, 0, 2, 0] * 40)
        streams = [running.submit(request(number, max_tokens=60)) for number in range(4)]
        run(running)
        running.close()
        found.append([stream.collect() for stream in streams])
    for beside, alone in zip(*found, strict=True):
        assert (beside.token_ids, beside.text) == (alone.token_ids, alone.text)
        assert beside.last.counts.drafted > 0


def test_the_text_of_a_step_is_sent_while_the_next_one_is_computed() -> None:
    runner = AsideRunner(pages=400)
    running = Engine(runner, FakeVocabulary())
    stream = running.submit(request(1))
    came: list[int] = []

    def read() -> None:
        came.append(sum(len(event.token_ids) for event in stream.poll()))

    runner.meanwhile = read
    while running.step():
        assert not any(event.token_ids for event in stream.poll() if event.finish_reason is None)
    assert [count for count in came if count] == [1] * 30


def cached_tokens(runner: FakeRunner, wanted: GenerationRequest) -> tuple[Completion, list[list[int]]]:
    running = Engine(runner, FakeVocabulary(PIECES))
    stream = running.submit(wanted)
    run(running)
    cached = [runner.history(handle) for handle in running.kv.cache.check_integrity()]
    running.close()
    return stream.collect(), cached


@pytest.mark.parametrize("stop", ["abc", "BC", "a"])
def test_the_cache_holds_what_belongs_to_an_answer_that_a_stop_string_ended(stop: str) -> None:
    """The device has computed one token more when the stop string is found."""
    for number in range(8):
        wanted = request(number, stop=(stop,), max_tokens=240)
        beside, alone = (cached_tokens(kind(pages=400), wanted) for kind in (AsideRunner, FakeRunner))
        assert beside[0].text == alone[0].text and beside[1] == alone[1]
        assert beside[1] == [[*wanted.prompt, *beside[0].token_ids][:-1]]


def begun(number: int, **others: Any) -> tuple[Engine, GenerationStream]:
    """An engine that has begun a step of one answer ahead."""
    running = Engine(AsideRunner(pages=400), FakeVocabulary())
    stream = running.submit(request(number, **others))
    while not ahead(running):
        pass
    return running, stream


def test_a_new_request_waits_for_no_more_than_the_step_that_was_begun() -> None:
    running, first = begun(1)
    second = running.submit(request(2))
    assert not ahead(running), "the step that was begun has ended"
    running.step()
    assert len(running.scheduler.running) == 2
    run(running)
    assert len(first.collect().token_ids) == 31 and len(second.collect().token_ids) == 32


@pytest.mark.parametrize("cancelled", [True, False])
def test_nothing_is_begun_ahead_for_who_has_left_or_reads_too_slowly(cancelled: bool) -> None:
    running, stream = begun(1, max_tokens=400)
    if cancelled:
        stream.cancel()
        assert not ahead(running)
        run(running)
        last = stream.collect().last
        assert last.finish_reason is FinishReason.CANCELLED and last.counts.generated == 3
        return
    while not stream.full:
        running.step()
        running.check_integrity()
    assert not ahead(running) and not ahead(running)
    tokens = [token for event in stream.poll() for token in event.token_ids]
    run(running)
    assert len(tokens) + len(stream.collect().token_ids) == 400


def test_questions_are_answered_between_steps() -> None:
    running, stream = begun(1)
    asked = running.inspect()
    assert not ahead(running) and not asked.done()
    running.step()
    [found] = asked.result().requests
    assert found.computed == found.tokens - 1 == 19 + 2
    run(running)
    assert len(stream.collect().token_ids) == 31


def test_the_runner_is_closed_after_the_step_that_was_begun() -> None:
    running, stream = begun(1)
    running.close()
    assert stream.collect().last.finish_reason is FinishReason.CANCELLED


class DeviceError(LocalLLMError):
    """What a device reports."""


def fail(error: Exception) -> NDArray[np.float32]:
    raise error


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), DeviceError("the device is lost")])
def test_a_step_that_fails_ends_its_requests_and_no_text_is_lost(
    error: Exception, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """later: when the step is waited for, not when it is begun."""
    runner = AsideRunner(pages=400)
    running = Engine(runner, FakeVocabulary(PIECES))
    streams = [running.submit(request(number)) for number in (1, 2, 3)]
    while not ahead(running):
        pass
    read = [sum(len(event.token_ids) for event in stream.poll()) for stream in streams]
    monkeypatch.setattr(runner, "prepare", lambda *_: lambda _tokens: partial(fail, error) if later else fail(error))
    with nullcontext() if isinstance(error, DeviceError) else pytest.raises(RuntimeError, match="lost"):
        while running.step():
            pass
    running.close()
    for before, stream in zip(read, streams, strict=True):
        rest = stream.collect()
        assert before + len(rest.token_ids) == rest.last.counts.generated >= 2
        assert rest.last.finish_reason is FinishReason.ERROR or isinstance(error, RuntimeError)


def test_a_fault_of_one_answer_ends_no_other() -> None:
    def spoil(history: list[int], row: NDArray[np.float32]) -> None:
        if history[0] == 5 and len(history) > 22:
            row[7] = np.nan

    running = Engine(AsideRunner(pages=400, bias=spoil), FakeVocabulary())
    streams = [running.submit(request(number)) for number in (1, 2, 4, 5, 7, 8)]
    run(running)
    running.close()
    ended = [stream.collect().last.finish_reason for stream in streams]
    assert ended.count(FinishReason.ERROR) == 1 and ended[2] is FinishReason.ERROR


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_llama_cpp_gives_the_same_answers_where_steps_are_begun_ahead() -> None:
    """Also after an answer that a stop string ended, in a conversation that goes on."""

    def talk(aside: bool) -> list[tuple[Completion, int]]:
        with open_model(builtin.path()) as file:
            tokenizer, runner = load_tokenizer(file), LlamaCppRunner(file, LlamaOptions(max_sequences=4))
        runner.info = replace(runner.info, computes_aside=aside)
        running, said = Engine(runner, tokenizer), []
        prompt = tokenizer.encode("The history of the sea is long.")
        for stop in ("a", "the", " "):
            sampling = SamplingParams(seed=5, repeat_penalty=1.1)
            stream = running.submit(GenerationRequest(tuple(prompt), sampling, 30, stop=(stop,), ignore_eos=True))
            run(running)
            answer = stream.collect()
            said.append((answer, answer.last.counts.cached_memory))
            prompt += [*answer.token_ids, *tokenizer.encode(" And then?", add_special=False)]
        running.close()
        return said

    for (beside, reused), (alone, reused_alone) in zip(talk(True), talk(False), strict=True):
        assert (beside.token_ids, beside.text, reused) == (alone.token_ids, alone.text, reused_alone)


LETTERS = ByteVocabulary((b"name", b"abc"))
GRAMMARS = ConstraintVocabulary(LETTERS)


def constrained(source: str, number: int, **others: Any) -> GenerationRequest:
    constraint = compile_constraint(ConstraintKind.REGEX, source, GRAMMARS)
    sampling = SamplingParams(temperature=number % 3, seed=number)
    usual = {"prompt": (*b"Say: ", number), "sampling": sampling, "max_tokens": 60, "constraint": constraint}
    return GenerationRequest(**{**usual, **others})


def of_grammars(runner: FakeRunner) -> tuple[Engine, list[GenerationStream]]:
    running = Engine(runner, LETTERS)
    wanted = [
        constrained("[a-z ]+", 1),
        constrained("(a|b)[a-z]{9}(the name is )[a-z]{12}", 2),
        constrained("[a-z ]+", 3, stop=("e",)),
        constrained("[a-m ]{30}", 4, sampling=SamplingParams(seed=4, logprobs=3)),
        constrained("[a-m ]{40}", 5, sampling=SamplingParams(seed=5, repeat_penalty=1.2, logprobs=1)),
        constrained("[a-f]+", 6, min_tokens=20, stop=("abc", "fa")),
        constrained("[a-z]{50}", 7, max_tokens=33),
        constrained("[a-z ]+", 8, context_limit=24, context_policy=ContextPolicy.ROLLING),
        request(9),
    ]
    return running, [running.submit(one) for one in wanted]


def test_answers_of_grammars_are_those_of_a_runner_that_computes_at_once() -> None:
    found = []
    for kind in (AsideRunner, FakeRunner):
        running, streams = of_grammars(kind(pages=400, vocab_size=LETTERS.vocab_size))
        run(running)
        running.close()
        found.append([stream.collect() for stream in streams])
    for beside, alone in zip(*found, strict=True):
        assert (beside.token_ids, beside.text, beside.logprobs) == (alone.token_ids, alone.text, alone.logprobs)
        assert (beside.last.finish_reason, beside.last.counts) == (alone.last.finish_reason, alone.last.counts)
        assert beside.token_ids and (len(beside.token_ids) == 60) <= (beside.last.finish_reason is FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("source", "others"),
    [
        ("[a-z ]{60}", {}),
        ("[a-z ]{60}", {"sampling": SamplingParams(seed=3, logprobs=4)}),
        ("[a-z ]{60}", {"sampling": PENALISED}),
        ("", {"constraint": None, "ignore_eos": True, "sampling": SamplingParams(temperature=0, logprobs=0)}),
    ],
)
def test_steps_are_begun_ahead_with_grammars_and_log_probabilities(source: str, others: dict[str, Any]) -> None:
    running = Engine(AsideRunner(pages=400, vocab_size=LETTERS.vocab_size), LETTERS)
    stream = running.submit(constrained(source or ".", 1, max_tokens=40, **others))
    began = "".join("-a"[ahead(running)] for _ in range(45)).strip("-")
    assert began == "a" * 38 and len(stream.collect().token_ids) == 40


def test_what_a_grammar_forces_is_computed_in_one_step() -> None:
    """Nothing is begun ahead of it, so it takes no step more."""
    counts = []
    for kind in (AsideRunner, FakeRunner):
        runner = kind(pages=400, vocab_size=LETTERS.vocab_size)
        running = Engine(runner, LETTERS)
        stream = running.submit(constrained("[a-c]{5}( and then )[a-c]{5}( or so )[a-c]{5}", 2))
        run(running)
        counts.append((runner.batches, stream.collect().text))
    assert counts[0] == counts[1] and " and then " in counts[0][1]


def test_a_grammar_that_the_answer_cannot_follow_ends_it_alone() -> None:
    """The mask is computed beside the device, and so is its error."""
    found = []
    for kind in (AsideRunner, FakeRunner):
        running = Engine(kind(pages=400, vocab_size=LETTERS.vocab_size), LETTERS)
        failing, other = constrained("[a-z ]{60}", 1), constrained("[a-z ]{60}", 2)
        streams = [running.submit(failing), running.submit(other)]
        for _ in range(12):
            running.step()
        state: Any = running.scheduler.running[0]._constraint
        state.mask = partial(fail, DeviceError("no token can write it"))
        run(running)
        found.append([(len(one.text), one.last.finish_reason) for one in (one.collect() for one in streams)])
    assert found[0][0][1] is FinishReason.ERROR and found[0][1] == found[1][1] == (60, FinishReason.STOP)


def test_an_answer_of_a_grammar_that_is_cancelled_in_a_step_begun_ahead_gets_no_token_of_it() -> None:
    running = Engine(AsideRunner(pages=400, vocab_size=LETTERS.vocab_size), LETTERS)
    stream, other = (running.submit(constrained("[a-z ]{60}", number)) for number in (1, 2))
    while not ahead(running):
        pass
    made = running.scheduler.running[0].generated
    stream.cancel()
    run(running)
    done = stream.collect()
    assert done.last.finish_reason is FinishReason.CANCELLED and done.last.counts.generated <= made + 1
    assert len(other.collect().text) == 60


@pytest.mark.parametrize("pages", [24, 30, 40])
def test_answers_stay_the_same_where_pages_run_out(pages: int) -> None:
    found = []
    for kind in (AsideRunner, FakeRunner):
        running = Engine(kind(pages=pages, vocab_size=LETTERS.vocab_size), LETTERS)
        streams = [running.submit(constrained("[a-z ]{60}", number)) for number in range(1, 5)]
        run(running)
        running.close()
        found.append([(one.token_ids, one.last.finish_reason) for one in (one.collect() for one in streams)])
        assert running.scheduler.preemptions
    assert found[0] == found[1]
