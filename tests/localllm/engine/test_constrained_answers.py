"""Constraints inside the engine: answers equal those sampled one by one, and forced text costs no step."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams, roll
from localllm.engine.sampling import Sampler
from localllm.engine.speculation import DraftLength
from localllm.engine.stream import Completion
from tests.fakes.aside_runner import AsideRunner
from tests.fakes.byte_vocabulary import END, ByteVocabulary
from tests.fakes.fake_runner import FakeRunner

VOCABULARY = ByteVocabulary((b"name", b'": ', b"hundred"))
CONSTRAINTS = ConstraintVocabulary(VOCABULARY)
PERSON = {
    "type": "object",
    "properties": {
        "the name of the person": {"enum": ["Ann", "Bob"]},
        "the hundred years": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["the name of the person", "the hundred years"],
    "additionalProperties": False,
}
PROMPT = tuple(VOCABULARY.encode("Who is it? "))
FORM = """root ::= "The name of the person is " name ", and the years are a hundred and " [1-9] [0-9] "."
name ::= "Ann" | "Bob"
"""
NUMBERS = "(one|two|three hundred and eleven)(, (one|two|three hundred and eleven)){4}"


def constraint(kind: str, source: object) -> Constraint:
    text = source if isinstance(source, str) else json.dumps(source)
    return compile_constraint(ConstraintKind(kind), text, CONSTRAINTS)


def make_runner(kind: type[FakeRunner] = FakeRunner) -> FakeRunner:
    return kind(pages=200, vocab_size=VOCABULARY.vocab_size)


def answers(runner: FakeRunner, *wanted: GenerationRequest, disk: DiskCache | None = None) -> list[Completion]:
    engine = Engine(runner, VOCABULARY, disk=disk)
    streams = [engine.submit(request) for request in wanted]
    while engine.step():
        engine.check_integrity()
    engine.close()
    return [stream.collect() for stream in streams]


def alone(
    runner: FakeRunner, request: GenerationRequest, context: int = 10_000
) -> tuple[tuple[int, ...], FinishReason]:
    """Every token sampled under its mask, without forcing, drafts or caches; the window rolls at the context."""
    assert request.constraint is not None
    state = request.constraint.fork()
    sampler = Sampler(request.sampling, runner.info.vocab_size, request.prompt)
    window, tokens = list(request.prompt), []
    while len(tokens) < (request.max_tokens or 1000):
        if len(window) >= context:
            window = roll(window, context)
        token, _ = sampler.sample(runner.logits_after(window), state.mask())
        sampler.accept(token)
        tokens.append(token)
        window.append(token)
        if token == END:
            return tuple(tokens), FinishReason.STOP
        state.accept(token)
        if state.is_finished:
            return tuple(tokens), FinishReason.STOP
    return tuple(tokens), FinishReason.LENGTH


@pytest.mark.parametrize("device", [FakeRunner, AsideRunner])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("kind", "source"), [("json_schema", PERSON), ("regex", NUMBERS), ("gbnf", FORM)])
def test_answers_are_those_sampled_one_by_one(
    kind: str, source: object, eager: bool, device: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    if eager:
        monkeypatch.setattr(DraftLength, "choose", lambda _self, limit, *_: max(min(limit, 6), 0))
    runner = make_runner(device)
    wanted = [
        GenerationRequest(PROMPT, sampling, constraint=constraint(kind, source), max_tokens=limit)
        for sampling in (
            SamplingParams(temperature=0),
            SamplingParams(seed=3, repeat_penalty=1.3, temperature=2),
            SamplingParams(seed=4, logprobs=2),
            SamplingParams(seed=5, mirostat=2),
            SamplingParams(seed=6, watermark_key="mine"),
        )
        for limit in (None, 1, 9, 30)
    ]
    for request, done in zip(wanted, answers(runner, *wanted), strict=True):
        assert (done.token_ids, done.last.finish_reason) == alone(runner, request)
        assert done.text == b"".join(map(VOCABULARY.token_bytes, done.token_ids)).decode()
        assert len(done.logprobs) == (len(done.token_ids) if request.sampling.logprobs else 0)


@pytest.mark.parametrize("device", [FakeRunner, AsideRunner])
def test_forced_text_takes_no_sampling(device: type[FakeRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(device)
    sampled: list[int] = []
    sample = Sampler.sample

    def count(sampler: Sampler, *given: Any) -> Any:
        token, logprob = sample(sampler, *given)
        sampled.append(token)
        return token, logprob

    monkeypatch.setattr(Sampler, "sample", count)
    wanted = GenerationRequest(PROMPT, SamplingParams(seed=1), constraint=constraint("gbnf", FORM))
    (done,) = answers(runner, wanted)
    assert re.fullmatch("The name of the person is (Ann|Bob), and the years are a hundred and [1-9][0-9]\\.", done.text)
    # The first letter of the name, and two digits.
    assert len(sampled) == 3 and len(done.token_ids) > 40
    # Forced text is computed in one step, like prompts; the end token never is.
    assert sum(runner.batches) == len(PROMPT) + len(done.token_ids) - len(b"7.")
    assert len(runner.batches) < 10
    assert done.last.counts.prompt == len(PROMPT) and done.last.counts.drafted == 0


def test_a_stop_string_inside_forced_text_ends_the_answer() -> None:
    form = constraint("gbnf", FORM)
    (done,) = answers(make_runner(), GenerationRequest(PROMPT, constraint=form, stop=("name of",)))
    assert (done.text, done.last.finish_reason) == ("The ", FinishReason.STOP)


def test_forced_text_counts_neither_as_prompt_nor_against_what_is_reused(tmp_path: Path) -> None:
    """The first answer's forced text is cached behind the prompt; another process reads both from the disk."""
    wanted = GenerationRequest(PROMPT * 20, SamplingParams(temperature=0), constraint=constraint("gbnf", FORM))
    engine = Engine(make_runner(), VOCABULARY, disk=DiskCache(tmp_path, "fake", 2**20))
    for _ in range(2):
        stream = engine.submit(wanted)
        while engine.step():
            pass
        counts = stream.collect().last.counts
    engine.close()
    assert counts.cached_memory == counts.prompt == len(wanted.prompt)
    (done,) = answers(make_runner(), wanted, disk=DiskCache(tmp_path, "fake", 2**20))
    assert done.last.counts.cached_disk == len(wanted.prompt)


def test_an_answer_that_is_all_forced_needs_no_model() -> None:
    runner = make_runner()
    wanted = GenerationRequest(PROMPT, SamplingParams(temperature=0), constraint=constraint("gbnf", 'root ::= "so"'))
    (done,) = answers(runner, wanted)
    assert (done.text, done.last.finish_reason) == ("so", FinishReason.STOP)
    assert runner.rows_computed == 0


def test_the_window_rolls_before_forced_text_continues() -> None:
    runner = make_runner()
    wanted = [
        GenerationRequest(
            PROMPT,
            SamplingParams(seed=seed),
            constraint=constraint("gbnf", FORM),
            context_policy=ContextPolicy.ROLLING,
            context_limit=limit,
        )
        for seed in range(4)
        for limit in (len(PROMPT) + 1, 20, 31)
    ]
    for request, done in zip(wanted, answers(runner, *wanted), strict=True):
        assert (done.token_ids, done.last.finish_reason) == alone(runner, request, request.context_limit or 0)
        assert done.last.counts.dropped_tokens > 0
