"""Interrupting a long step of llama.cpp for another request changes and loses nothing."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from localllm.engine.step_costs import ChunkSize
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

PROMPT = tuple((at * 7) % 400 + 3 for at in range(400))
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def path(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf" / "stories260K-F32.gguf"


@pytest.fixture
def runner(path: Path, open_runner: Callable[[Path, LlamaOptions], LlamaCppRunner]) -> LlamaCppRunner:
    return open_runner(path, LlamaOptions(context_tokens=2048, max_sequences=12, gpu_layers=0, threads=2))


def rows(sequence: int, start: int, stop: int) -> tuple[tuple[int, ...], range, list[int], list[int]]:
    return PROMPT[start:stop], range(start, stop), [sequence] * (stop - start), [stop - start - 1]


def test_a_step_that_is_given_up_changes_nothing(runner: LlamaCppRunner, caplog: pytest.LogCaptureFixture) -> None:
    assert runner.info.can_interrupt
    sequence, other = runner.create_sequence(), runner.create_sequence()
    runner.run(*rows(sequence, 0, 100))
    free, stop = runner.pages_free(), threading.Event()
    stop.set()
    assert runner.run_unless(stop, *rows(sequence, 100, 300)) is None
    assert (runner.sequence_length(sequence), runner.pages_free()) == (100, free)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    # Without the event it acts like `run`, and `run` ignores the event.
    stop.clear()
    logits = runner.run_unless(stop, *rows(sequence, 100, 300))
    assert logits is not None
    logits = logits.copy()
    stop.set()
    runner.run(*rows(other, 0, 100))
    np.testing.assert_allclose(runner.run(*rows(other, 100, 300)), logits, atol=1e-3)


def test_other_failures_are_errors(runner: LlamaCppRunner) -> None:
    with pytest.raises(ValueError, match="no sequence 5"):
        runner.run_unless(threading.Event(), *rows(5, 0, 10))


class Watched:
    """A runner, and a callback that runs during its first long step."""

    def __init__(self, runner: LlamaCppRunner) -> None:
        self.runner = runner
        self.meanwhile = lambda: None
        self.steps: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)

    can_interrupt = True

    def run_unless(self, stop: threading.Event, *rows: object) -> np.ndarray | None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        caller = threading.Thread(target=meanwhile)
        caller.start()
        caller.join()
        logits = self.runner.run_unless(stop, *rows)  # type: ignore[arg-type]
        self.steps.append(-1 if logits is None else len(rows[0]))  # type: ignore[arg-type]
        return logits


def run_all(engine: Engine) -> None:
    while engine.step():
        engine.check_integrity()


def test_a_newcomer_is_served_before_a_long_step_ends(runner: LlamaCppRunner, path: Path) -> None:
    watched = Watched(runner)
    engine = Engine(watched, FakeVocabulary(), max_running=4)  # type: ignore[arg-type]
    streams = [engine.submit(GenerationRequest(PROMPT, GREEDY, max_tokens=8, ignore_eos=True))]
    short = GenerationRequest(PROMPT[50:60], GREEDY, max_tokens=1)
    watched.meanwhile = lambda: streams.append(engine.submit(short))
    run_all(engine)
    assert watched.steps[0] == -1
    answers = [stream.collect() for stream in streams]
    assert list(answers[0].token_ids) == llama_oracle.greedy(path, list(PROMPT), 8)
    assert answers[1].last.finish_reason is FinishReason.LENGTH


def test_a_cancelled_request_ends_with_the_step_that_it_was_in(runner: LlamaCppRunner) -> None:
    watched = Watched(runner)
    engine = Engine(watched, FakeVocabulary())  # type: ignore[arg-type]
    stream = engine.submit(GenerationRequest(PROMPT, GREEDY, max_tokens=8))
    watched.meanwhile = stream.cancel
    run_all(engine)
    assert watched.steps == [-1]
    assert stream.collect().last.finish_reason is FinishReason.CANCELLED


def test_a_lone_prompt_takes_long_steps(runner: LlamaCppRunner) -> None:
    watched = Watched(runner)
    engine = Engine(watched, FakeVocabulary())  # type: ignore[arg-type]
    engine.submit(GenerationRequest(PROMPT, GREEDY, max_tokens=1))
    run_all(engine)
    assert sum(watched.steps) == len(PROMPT) and watched.steps[0] == ChunkSize.LEAST_PATIENT
