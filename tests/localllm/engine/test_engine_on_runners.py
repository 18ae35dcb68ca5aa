"""The engine's guarantees on both real runners: the same tests, one contract."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gguf_io import ModelFile, load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams
from localllm.engine.stream import CAPACITY, Completion
from localllm.errors import ContextOverflowError
from tests.localllm.engine.real_runners import KINDS, Check, WatchedRunner, greedy_check, open_real
from tests.oracle import llama_oracle

GREEDY = SamplingParams(temperature=0)
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "


@pytest.fixture(scope="module")
def model(data_dir: Path) -> Iterator[ModelFile]:
    with open_model(data_dir / "models" / "gguf" / "stories260K-F32.gguf") as file:
        yield file


@pytest.fixture(scope="module")
def tokenizer(model: ModelFile) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def check(kind: str, model: ModelFile) -> Iterator[Check]:
    with greedy_check(kind, model) as function:
        yield function


@pytest.fixture
def runner(kind: str, model: ModelFile) -> Iterator[WatchedRunner]:
    opened = WatchedRunner(open_real(kind, model))
    yield opened
    opened.runner.close()


def request(tokens: list[int], max_tokens: int | None = 12, **others: object) -> GenerationRequest:
    return GenerationRequest(tuple(tokens), sampling=GREEDY, max_tokens=max_tokens, **others)  # type: ignore[arg-type]


def run_all(engine: Engine) -> None:
    while engine.step():
        engine.check_integrity()


def answer(engine: Engine, wanted: GenerationRequest) -> Completion:
    stream = engine.submit(wanted)
    run_all(engine)
    return stream.collect()


def test_turns_compute_only_what_is_new(runner: WatchedRunner, tokenizer: Tokenizer, check: Check) -> None:
    engine = Engine(runner, tokenizer)
    prompt = tokenizer.encode(STORY)
    first = answer(engine, request(prompt))
    check(prompt, first.token_ids)
    before = runner.rows_computed
    turn = [*prompt, *first.token_ids, *tokenizer.encode("And then", add_special=False)]
    second = answer(engine, request(turn, max_tokens=1))
    check(turn, second.token_ids)
    assert second.last.counts.cached_memory == len(prompt) + len(first.token_ids) - 1
    assert runner.rows_computed - before == len(turn) - second.last.counts.cached_memory
    # A branch from the middle of the cached prefix.
    branch = [*prompt[:-5], *tokenizer.encode("big dog", add_special=False)]
    third = answer(engine, request(branch))
    check(branch, third.token_ids)
    assert third.last.counts.cached_memory >= len(prompt) - 5
    engine.check_integrity()


def test_a_stop_string_over_token_borders_is_cut(runner: WatchedRunner, tokenizer: Tokenizer) -> None:
    engine = Engine(runner, tokenizer)
    prompt = tokenizer.encode(STORY)
    text = answer(engine, request(prompt, max_tokens=30)).text
    done = answer(engine, request(prompt, max_tokens=30, stop=(text[7:12],)))
    assert done.text == text[: text.index(text[7:12])]
    assert done.last.finish_reason is FinishReason.STOP


def test_cancel_in_queue_prefill_and_decode(kind: str, model: ModelFile, tokenizer: Tokenizer) -> None:
    runner = WatchedRunner(open_real(kind, model))
    engine = Engine(runner, tokenizer, max_running=1)
    long = tokenizer.encode(STORY * 8)
    running, waiting = engine.submit(request(long)), engine.submit(request(long[:4]))
    engine.step()
    computed = runner.rows_computed
    assert 0 < computed < len(long)
    waiting.cancel()
    running.cancel()
    run_all(engine)
    assert {stream.collect().last.finish_reason for stream in (running, waiting)} == {FinishReason.CANCELLED}
    assert runner.rows_computed == computed
    # The prefilled tokens stay cached.
    assert answer(engine, request(long, max_tokens=1)).last.counts.cached_memory == computed
    decoding = engine.submit(request(long[:9], max_tokens=None))
    for _ in range(5):
        engine.step()
    decoding.cancel()
    run_all(engine)
    assert decoding.collect().last.counts.generated >= 2
    engine.check_integrity()
    engine.close()


def test_memory_pressure_preempts_and_loses_nothing(
    kind: str, model: ModelFile, tokenizer: Tokenizer, check: Check
) -> None:
    runner = WatchedRunner(open_real(kind, model, tokens=256))
    engine = Engine(runner, tokenizer, background_tokens=0, max_running=4)
    prompts = [tokenizer.encode(beginning + STORY) for beginning in ("A cat. ", "Big dog. ", "The sun. ", "He ran. ")]
    streams = [engine.submit(request(prompt, max_tokens=60, ignore_eos=True)) for prompt in prompts]
    run_all(engine)
    for prompt, stream in zip(prompts, streams, strict=True):
        done = stream.collect()
        assert done.last.finish_reason is FinishReason.LENGTH, done.last.error
        assert len(done.token_ids) == 60
        check(prompt, done.token_ids)
    assert engine.stats().preemptions > 0
    engine.check_integrity()
    engine.close()


def test_context_policies(runner: WatchedRunner, tokenizer: Tokenizer, check: Check) -> None:
    engine = Engine(runner, tokenizer, context_limit=64)
    long = tokenizer.encode(STORY * 3)
    with pytest.raises(ContextOverflowError):
        engine.submit(request(long))
    rolling = answer(
        engine, request(long, max_tokens=80, ignore_eos=True, context_policy=ContextPolicy.ROLLING)
    ).last.counts
    assert (rolling.generated, rolling.dropped_tokens >= len(long) + 80 - 64) == (80, True)
    full = answer(engine, request(long[:50], max_tokens=None, ignore_eos=True))
    check(long[:50], full.token_ids)
    assert (full.last.counts.generated, full.last.finish_reason) == (14, FinishReason.LENGTH)


def test_a_slow_reader_pauses_only_that_request(runner: WatchedRunner, tokenizer: Tokenizer, check: Check) -> None:
    engine = Engine(runner, tokenizer)
    prompt = tokenizer.encode("Once")
    wild = SamplingParams(temperature=2, top_k=0, top_p=1, min_p=0, seed=1)  # nothing to draft: one event per token
    slow = engine.submit(GenerationRequest(tuple(prompt), wild, max_tokens=CAPACITY + 100, ignore_eos=True))
    run_all(engine)
    quick_prompt = tokenizer.encode("The cat")
    quick = answer(engine, request(quick_prompt))
    check(quick_prompt, quick.token_ids)
    events = slow.poll()
    assert events[-1].finish_reason is None
    run_all(engine)
    assert sum(len(event.token_ids) for event in [*events, *slow.poll()]) == CAPACITY + 100


def test_background_requests_evict_nothing(kind: str, model: ModelFile, tokenizer: Tokenizer) -> None:
    runner = WatchedRunner(open_real(kind, model, tokens=256))
    engine = Engine(runner, tokenizer, background_tokens=0)
    answer(engine, request(tokenizer.encode(STORY * 4)[:200]))
    kept = engine.stats().cached_tokens
    refused = answer(engine, request(tokenizer.encode("Big dog. " * 40)[:120], background=True))
    assert refused.last.finish_reason is FinishReason.ERROR and refused.last.error
    assert engine.stats().cached_tokens == kept
    engine.close()


def test_segments_of_another_runner_are_never_taken(kind: str, model: ModelFile, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.encode(STORY * 4)
    for turn in range(2):
        runner = open_real(kind, model)
        engine = Engine(runner, tokenizer, disk=DiskCache(tmp_path, runner.info.kv_layout, 2**26))
        counts = answer(engine, request(prompt, max_tokens=1)).last.counts
        assert (counts.cached_disk > 0) == (turn > 0)
        engine.close()
    assert len(list(tmp_path.iterdir())) == 1
    other = "elsewhere" + runner.info.kv_layout
    runner = open_real(kind, model)
    engine = Engine(runner, tokenizer, disk=DiskCache(tmp_path, other, 2**26))
    assert answer(engine, request(prompt, max_tokens=1)).last.counts.cached_disk == 0
    engine.close()


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize(
    ("name", "share"),
    # llama.cpp rounds activations to 8 bits for quantised weights; as a share of the range of the logits.
    [("stories260K-F32", 0.0005), ("stories260K-pad256-Q4_K_M", 0.02), ("tinystories656K-Q8_0", 0.01)],
)
def test_both_runners_agree(data_dir: Path, name: str, share: float) -> None:
    with open_model(data_dir / "models" / "gguf" / f"{name}.gguf") as file:
        tokenizer = load_tokenizer(file)
        prompt = tokenizer.encode(STORY)
        logits = {}
        for one in ("native", "llama"):
            runner = open_real(one, file)
            sequence = runner.create_sequence()
            rows = range(len(prompt))
            logits[one] = runner.run(prompt, rows, [sequence] * len(prompt), rows).copy()
            runner.close()
        spread = logits["native"].max() - logits["native"].min()
        assert np.abs(logits["native"] - logits["llama"]).max() < share * spread
        # If the best tokens differ, their difference is within rounding.
        differing = logits["native"].argmax(axis=1) != logits["llama"].argmax(axis=1)
        best_two = np.sort(logits["native"][differing], axis=1)[:, -2:]
        assert (best_two[:, 1] - best_two[:, 0] < 2 * share * spread).all()
