"""A prompt's log-probabilities: in chunks, in batches, after preemption, and with cached prefixes."""

from pathlib import Path

import numpy as np
import pytest

from gguf_io import load_tokenizer, open_model
from localllm.engine import scheduler
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from localllm.errors import ContextOverflowError, RequestError
from localllm.wings.lab.quality.perplexity import log_probabilities
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.localllm.engine.real_runners import KINDS, TOLERANCE, WatchedRunner, open_real

TOP = 3


def request(*prompt: int, max_tokens: int | None = 0, top: int | None = TOP, **others: object) -> GenerationRequest:
    sampling = SamplingParams(temperature=0)
    return GenerationRequest(prompt, sampling, max_tokens, prompt_logprobs=top, **others)  # type: ignore[arg-type]


def run_all(engine: Engine) -> None:
    while engine.step():
        engine.check_integrity()


def assert_right(runner: FakeRunner, prompt: tuple[int, ...], found: tuple[TokenLogprob, ...] | None) -> None:
    """Compare with log-probabilities in double precision, computed without an engine."""
    assert found is not None and [each.token_id for each in found] == list(prompt[1:])
    for at, each in enumerate(found, start=1):
        logits = runner.logits_after(list(prompt[:at])).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert each.logprob == pytest.approx(expected[prompt[at]], abs=1e-5)
        best = np.argsort(-expected)[:TOP]
        assert [token for token, _ in each.top] == best.tolist()
        assert [value for _, value in each.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_all_of_a_prompt_though_its_prefix_is_known(can_truncate: bool) -> None:
    runner = FakeRunner(can_truncate=can_truncate)
    engine = Engine(runner, FakeVocabulary())
    prompt = tuple(range(1, 60))
    engine.submit(request(*prompt, top=None, max_tokens=2))
    run_all(engine)
    before = runner.rows_computed
    stream = engine.submit(request(*prompt))
    run_all(engine)
    done = stream.collect()
    assert_right(runner, prompt, done.prompt_logprobs)
    assert (done.token_ids, done.last.finish_reason) == ((), FinishReason.LENGTH)
    assert done.last.counts.cached == 0 and runner.rows_computed - before == len(prompt)
    # The KV computed for them serves requests that do not request any.
    again = engine.submit(request(*prompt, 7, 8, top=None, max_tokens=1))
    run_all(engine)
    assert again.collect().last.counts.cached == len(prompt)


def test_an_answer_follows_and_a_prompt_of_one_token_has_none() -> None:
    runner = FakeRunner()
    engine = Engine(runner, FakeVocabulary())
    prompt = tuple(range(1, 40))
    streams = [engine.submit(request(*prompt, max_tokens=4, top=top)) for top in (TOP, None)]
    single = engine.submit(request(5, max_tokens=2))
    run_all(engine)
    scored, plain = (stream.collect() for stream in streams)
    assert scored.token_ids == plain.token_ids and plain.prompt_logprobs is None
    assert_right(runner, prompt, scored.prompt_logprobs)
    assert single.collect().prompt_logprobs == ()


def test_no_step_holds_more_logits_than_its_share_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SCORED_BYTES", 5 * 4 * 64)
    wanted: list[int] = []

    class Counting(FakeRunner):
        def run(self, *rows):  # type: ignore[no-untyped-def]
            wanted.append(len(rows[3]))
            return super().run(*rows)

    runner = Counting()
    engine = Engine(runner, FakeVocabulary())
    other = engine.submit(request(9, 8, 7, top=None, max_tokens=200, ignore_eos=True))
    engine.step()
    prompts = [tuple(range(1, 40)), tuple(range(2, 50))]
    streams = [engine.submit(request(*prompt)) for prompt in prompts]
    for _ in range(3):
        engine.step()
    assert sum(len(event.token_ids) for event in other.poll()) >= 3  # one per step, while prompts are scored
    other.cancel()
    run_all(engine)
    assert max(wanted) <= 5 + len(prompts) + 1
    for prompt, stream in zip(prompts, streams, strict=True):
        assert_right(runner, prompt, stream.collect().prompt_logprobs)


def test_preemption_loses_none() -> None:
    runner = FakeRunner(pages=30)
    engine = Engine(runner, FakeVocabulary(), background_tokens=0, max_running=4)
    prompts = [tuple(range(first, first + 45)) for first in (1, 2, 3, 4)]
    streams = [engine.submit(request(*prompt, max_tokens=40, ignore_eos=True)) for prompt in prompts]
    run_all(engine)
    for prompt, stream in zip(prompts, streams, strict=True):
        done = stream.collect()
        assert (len(done.token_ids), done.last.error) == (40, None)
        assert_right(runner, prompt, done.prompt_logprobs)
    assert engine.stats().preemptions > 0


def test_scoring_resumes_after_a_partly_scored_prompt() -> None:
    runner = FakeRunner()
    engine = Engine(runner, FakeVocabulary())
    prompt = tuple(range(1, 60))
    stream = engine.submit(request(*prompt))
    engine.step()
    (generation,) = engine.scheduler.running
    computed = generation.sequence.computed
    assert 0 < computed < len(prompt)
    engine.scheduler._requeue(generation)
    run_all(engine)
    assert_right(runner, prompt, stream.collect().prompt_logprobs)
    assert runner.rows_computed == len(prompt)


def test_what_is_refused() -> None:
    engine = Engine(FakeRunner(), FakeVocabulary(), context_limit=32)
    with pytest.raises(RequestError, match="prompt_logprobs is -1"):
        engine.submit(request(1, 2, top=-1))
    with pytest.raises(ContextOverflowError):  # a rolling window would leave tokens out
        engine.submit(request(*range(1, 40), context_policy=ContextPolicy.ROLLING))


@pytest.mark.parametrize("kind", KINDS)
def test_on_models_as_the_perplexity_of_the_same_text(kind: str, data_dir: Path) -> None:
    with open_model(data_dir / "models" / "gguf" / "stories260K-F32.gguf") as file:
        tokens = load_tokenizer(file).encode(
            "Once upon a time, there was a little girl named Lily. She loved to play. " * 4
        )
        tokens = tokens[: len(tokens) // 2 * 2]
        runner = WatchedRunner(open_real(kind, file))
        reference = log_probabilities(runner, tokens)
        engine = Engine(runner, load_tokenizer(file))
        stream = engine.submit(request(*tokens))
        run_all(engine)
        found = stream.collect().prompt_logprobs
        engine.close()
    assert found is not None and len(found) == len(tokens) - 1
    half = len(tokens) // 2
    for row, each in zip(reference, found[half:], strict=True):
        assert each.logprob == pytest.approx(row[each.token_id], abs=1e-5 + TOLERANCE[kind])
