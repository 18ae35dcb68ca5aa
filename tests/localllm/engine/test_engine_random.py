"""Random work on the engine, checked after every step against answers that no cache had a part in.

LOCALLLM_RANDOM_STEPS is how many random steps are taken, each of which may be a dozen of the engine's;
LOCALLLM_RANDOM_SEED chooses others than usual.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from localllm.engine import stream as stream_module
from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.context_policy import roll
from localllm.engine.disk_cache import DiskCache
from localllm.engine.draft_model import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams, TokenEvent
from localllm.engine.sampling import Sampler
from localllm.engine.stream import GenerationStream, fold
from localllm.errors import ContextOverflowError, QueueFullError
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.letter_vocabulary import LETTERS, LetterVocabulary

STEPS = int(os.environ.get("LOCALLLM_RANDOM_STEPS", "2500"))
SEED = int(os.environ.get("LOCALLLM_RANDOM_SEED", "1"))
STEPS_A_RUN = 50
VOCABULARY = LetterVocabulary()
# What stored keys and values are in: KV of one type is of no use to the other.
KV_TYPES = {"f16": 0.0, "q8_0": 0.25}


SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "penalised": SamplingParams(temperature=0, repeat_penalty=1.2, logprobs=1),
    "seeded": SamplingParams(seed=7, repeat_penalty=1.1),
    "mirostat": SamplingParams(seed=8, mirostat=2),
}


def make_constraints() -> dict[str, Constraint]:
    vocabulary = ConstraintVocabulary(VOCABULARY)
    sources = ("(abcdefgh|[i-k]{2}c)+", "(a|b|k){3,9}", "[a-k]*")
    return {source: compile_constraint(ConstraintKind.REGEX, source, vocabulary) for source in sources}


CONSTRAINTS = make_constraints()


class Request:
    """What one client asked, and what it has read so far."""

    def __init__(self, request: GenerationRequest, stream: GenerationStream, context: int, kv_type: str) -> None:
        self.request = request
        self.stream = stream
        self.context = context
        self.kv_type = kv_type
        self.events: list[TokenEvent] = []

    def read(self) -> None:
        self.events += self.stream.poll()


@seed(SEED)
class EngineMachine(RuleBasedStateMachine):
    """Prompts are cut from a few texts, so that prefixes are shared; pages, handles and patience are scarce."""

    @initialize(
        pages=st.integers(20, 60),
        can_truncate=st.booleans(),
        disk=st.booleans(),
        draft=st.booleans(),
        rows=st.integers(3, 40),
    )
    def begin(self, pages: int, can_truncate: bool, disk: bool, draft: bool, rows: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.disk, self.draft = disk, draft
        self.shape = {"pages": pages, "can_truncate": can_truncate, "max_rows": rows}
        self.capacity, stream_module.CAPACITY = stream_module.CAPACITY, 12
        self.asked: list[Request] = []
        self.past = [np.random.default_rng(text).integers(1, VOCABULARY.vocab_size, 90).tolist() for text in range(3)]
        self.start("f16")

    def start(self, kv_type: str) -> None:
        self.kv_type = kv_type
        self.runner = self.make_runner(kv_type, **self.shape)
        self.runner.kv_identity = kv_type
        cache = DiskCache(Path(self.folder.name), kv_type, 100_000) if self.disk else None
        draft = DraftModel(self.make_runner("f16", pages=40, max_rows=16)) if self.draft else None
        self.engine = Engine(self.runner, VOCABULARY, max_running=4, max_waiting=6, disk=cache, draft_model=draft)

    def make_runner(self, kv_type: str, **shape: int) -> FakeRunner:
        def bias(history: list[int], row: NDArray[np.float32]) -> None:
            """Copying is likely, so that drafts are accepted now and then; so is an end, in places."""
            if len(history) > 6:
                row[history[-6]] += 3
            if len(history) % 23 == 0:
                row[0] = 3
            row[len(history) % VOCABULARY.vocab_size] += KV_TYPES[kv_type]

        return FakeRunner(**shape, max_sequences=10, vocab_size=VOCABULARY.vocab_size, bias=bias)

    @rule(
        text=st.integers(0, 50),
        length=st.integers(1, 90),
        extra=st.lists(st.integers(1, VOCABULARY.vocab_size - 1), max_size=4),
        samples=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.one_of(st.integers(0, 30), st.none()),
        sampling=st.sampled_from(sorted(SAMPLING)),
        priority=st.integers(0, 2),
        background=st.booleans(),
        context_limit=st.one_of(st.none(), st.integers(12, 100)),
        rolling=st.booleans(),
        constraint=st.one_of(st.none(), st.sampled_from(sorted(CONSTRAINTS))),
        stop=st.sampled_from([(), (), ("ab", "kkk")]),
        min_tokens=st.sampled_from([0, 0, 12]),
    )
    def submit(
        self,
        text: int,
        length: int,
        extra: list[int],
        samples: int,
        sampling: str,
        max_tokens: int | None,
        constraint: str | None,
        rolling: bool,
        **others: Any,
    ) -> None:
        prompt = (*self.past[text % len(self.past)][:length], *extra)
        request = GenerationRequest(
            prompt,
            sampling=SAMPLING[sampling],
            max_tokens=60 if rolling and max_tokens is None else max_tokens,
            constraint=CONSTRAINTS[constraint] if constraint else None,
            context_policy=ContextPolicy.ROLLING if rolling else ContextPolicy.REFUSE,
            **others,
        )
        in_memory = (self.runner.pages_total() - 1) * self.runner.page_size
        context = min(request.context_limit or in_memory, in_memory)
        for _ in range(samples):
            try:
                self.asked.append(Request(request, self.engine.submit(request), context, self.kv_type))
            except QueueFullError:
                return
            except ContextOverflowError:
                assert not rolling and len(prompt) + min(1 if max_tokens is None else max_tokens, 1) > context
                return

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.sound()

    @rule(which=st.integers(0, 20))
    def read(self, which: int) -> None:
        if self.asked:
            self.asked[which % len(self.asked)].read()

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        if self.asked:
            self.asked[which % len(self.asked)].stream.cancel()

    @rule()
    def finish(self) -> None:
        for _ in range(5000):
            for asked in self.asked:
                asked.read()
            if not self.engine.step():
                break
            self.sound()
        else:
            raise AssertionError("the engine does not come to rest")
        self.check()

    @rule(kv_type=st.sampled_from(sorted(KV_TYPES)))
    def restart(self, kv_type: str) -> None:
        self.engine.close()
        self.check()
        self.start(kv_type)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine") and not self.runner.closed:
            self.runner.check_pages(self.engine.check_integrity())

    def check(self) -> None:
        """Compare everything that was answered, all of it or what a client that left has got."""
        for asked in self.asked:
            asked.read()
            done = fold(iter(asked.events))
            reason = done.last.finish_reason
            assert reason, "the stream never ended"
            tokens, text, expected = self.reference(asked)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (done.token_ids, done.text, reason) == (tokens, text, expected)
            else:
                assert done.token_ids == tokens[: len(done.token_ids)]
                assert done.text == "".join(LETTERS[token - 1] for token in done.token_ids)
                assert reason is FinishReason.CANCELLED or asked.request.background
            self.past.append([*asked.request.prompt, *done.token_ids])
        self.asked.clear()

    def reference(self, asked: Request) -> tuple[tuple[int, ...], str, FinishReason]:
        """The answer computed without engine, caches, batches or drafts."""
        request, runner = asked.request, self.make_runner(asked.kv_type, pages=1)
        rolling = request.context_policy is ContextPolicy.ROLLING
        sampler = Sampler(request.sampling, VOCABULARY.vocab_size, request.prompt)
        state = request.constraint.fork() if request.constraint else None
        most = asked.context if request.max_tokens is None else request.max_tokens
        window = list(request.prompt)
        if rolling and len(window) + min(most, 1) > asked.context:
            window = roll(window, asked.context)
        tokens: list[int] = []
        text = ""
        while len(tokens) < most and (rolling or len(window) < asked.context):
            if rolling and len(window) >= asked.context:
                window = roll(window, asked.context)
            allowed = state.mask() if state else np.arange(VOCABULARY.vocab_size) >= (len(tokens) < request.min_tokens)
            token, _ = sampler.sample(runner.logits_after(window), allowed)
            sampler.accept(token)
            tokens.append(token)
            window.append(token)
            if token == 0:
                return tuple(tokens), text, FinishReason.STOP
            text += LETTERS[token - 1]
            if found := [text.index(stop) for stop in request.stop if stop in text]:
                return tuple(tokens), text[: min(found)], FinishReason.STOP
            if state:
                state.accept(token)
                if state.is_finished:
                    return tuple(tokens), text, FinishReason.STOP
        return tuple(tokens), text, FinishReason.LENGTH

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.finish()
            self.engine.close()
            self.folder.cleanup()
            stream_module.CAPACITY = self.capacity


TestEngineRandom = pytest.mark.slow(EngineMachine.TestCase)
TestEngineRandom.settings = settings(
    max_examples=max(STEPS // STEPS_A_RUN, 1),
    stateful_step_count=STEPS_A_RUN,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
