"""Random work on the engine, checked after every step against answers that no cache had a part in."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams
from localllm.engine.sampling import Sampler
from localllm.engine.stream import GenerationStream, fold
from localllm.errors import ContextOverflowError, QueueFullError
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

VOCABULARY = 12


def repeat_often(history: list[int], row: NDArray[np.float32]) -> None:
    """Make copying likely, so that drafts are accepted now and then."""
    if len(history) > 6:
        row[history[-6]] += 3


class EngineMachine(RuleBasedStateMachine):
    """Prompts are cut from a few texts, so that prefixes are shared; pages and handles are scarce."""

    @initialize(pages=st.integers(20, 60), can_truncate=st.booleans(), disk=st.booleans(), rows=st.integers(3, 40))
    def begin(self, pages: int, can_truncate: bool, disk: bool, rows: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.disk = disk
        self.shape = {"pages": pages, "can_truncate": can_truncate, "max_rows": rows}
        self.answers: list[tuple[GenerationRequest, GenerationStream]] = []
        self.past = [list(np.random.default_rng(seed).integers(1, VOCABULARY, 90)) for seed in range(3)]
        self.start()

    def start(self) -> None:
        self.runner = FakeRunner(
            **self.shape,  # type: ignore[arg-type]
            max_sequences=10,
            vocab_size=VOCABULARY,
            bias=repeat_often,
        )
        cache = DiskCache(Path(self.folder.name), "fake", 100_000) if self.disk else None
        self.engine = Engine(self.runner, FakeVocabulary(), max_running=4, max_waiting=6, disk=cache)

    @rule(
        text=st.integers(0, 50),
        length=st.integers(1, 90),
        extra=st.lists(st.integers(1, VOCABULARY - 1), max_size=4),
        max_tokens=st.integers(0, 30),
        seed=st.one_of(st.none(), st.integers(0, 3)),
        priority=st.integers(0, 2),
        background=st.booleans(),
    )
    def submit(
        self,
        text: int,
        length: int,
        extra: list[int],
        max_tokens: int,
        seed: int | None,
        priority: int,
        background: bool,
    ) -> None:
        prompt = [int(token) for token in self.past[text % len(self.past)][:length]] + extra
        sampling = SamplingParams(temperature=0) if seed is None else SamplingParams(seed=seed, repeat_penalty=1.1)
        request = GenerationRequest(
            tuple(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            priority=priority,
            background=background,
            context_policy=ContextPolicy.REFUSE,
        )
        try:
            self.answers.append((request, self.engine.submit(request)))
        except (QueueFullError, ContextOverflowError):
            return

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.runner.check_pages(self.engine.check_integrity())

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        if self.answers:
            self.answers[which % len(self.answers)][1].cancel()

    @rule()
    def finish(self) -> None:
        for _ in range(5000):
            if not self.engine.step():
                break
            self.runner.check_pages(self.engine.check_integrity())
        else:
            raise AssertionError("the engine does not come to rest")
        for request, stream in self.answers:
            self.check(request, stream)
        self.answers.clear()

    @rule()
    def restart(self) -> None:
        self.engine.close()
        for request, stream in self.answers:
            self.check(request, stream)
        self.answers.clear()
        self.start()

    def check(self, request: GenerationRequest, stream: GenerationStream) -> None:
        done = fold(iter(stream.poll()))
        assert done.last.finish_reason, "the stream never ended"
        reference = self.reference(request)
        assert done.token_ids == reference[: len(done.token_ids)]
        if done.last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            context = (self.runner.pages_total() - 1) * self.runner.page_size
            assert len(done.token_ids) == min(len(reference), context - len(request.prompt))
        elif done.last.finish_reason is FinishReason.ERROR:
            assert request.background
        self.past.append([*request.prompt, *done.token_ids])

    def reference(self, request: GenerationRequest) -> tuple[int, ...]:
        """The answer computed without engine, caches, batches or drafts."""
        sampler = Sampler(request.sampling, VOCABULARY, request.prompt)
        history = list(request.prompt)
        for _ in range(request.max_tokens or 0):
            token, _ = sampler.sample(self.runner.logits_after(history))
            sampler.accept(token)
            history.append(token)
            if token == 0:
                break
        return tuple(history[len(request.prompt) :])

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.runner.check_pages(self.engine.check_integrity())

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.finish()
            self.engine.close()
            self.folder.cleanup()


TestEngineRandom = pytest.mark.slow(EngineMachine.TestCase)
TestEngineRandom.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
