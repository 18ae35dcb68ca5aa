"""Random work on the engine, checked after every step against answers computed without caches.

LOCALLLM_RANDOM_STEPS: the number of random steps, each of which may be a dozen of the engine's. LOCALLLM_RANDOM_SEED:
another seed than the default.
"""

import os
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine import disk_cache, kv_manager, memory_tier, scheduler, spill
from localllm.engine import stream as stream_module
from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.disk_cache import DiskCache
from localllm.engine.drafter import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.request import (
    ContextPolicy,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    roll,
)
from localllm.engine.sampling import Sampler, token_logprob
from localllm.engine.speculation import DraftLength
from localllm.engine.stream import GenerationStream, fold
from localllm.errors import ContextOverflowError, QueueFullError
from tests.fakes.aside_runner import AsideRunner
from tests.fakes.letter_vocabulary import LETTERS, LetterVocabulary

STEPS = int(os.environ.get("LOCALLLM_RANDOM_STEPS", "2500"))
SEED = int(os.environ.get("LOCALLLM_RANDOM_SEED", "1"))
STEPS_A_RUN = 50
VOCABULARY = LetterVocabulary()
KV_TYPES = ("f16", "q8_0")


SAMPLING = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repeat_penalty=1.2, logprobs=1),
    SamplingParams(seed=7, repeat_penalty=1.1),
    SamplingParams(seed=8, mirostat=2),
    SamplingParams(seed=9, logprobs=2),
)


def make_constraints() -> list[Constraint]:
    vocabulary = ConstraintVocabulary(VOCABULARY)
    sources = ("(abcdefgh|[i-k]{2}c)+", "(a|b|k){3,9}", "[a-k]*")
    return [compile_constraint(ConstraintKind.REGEX, source, vocabulary) for source in sources]


CONSTRAINTS = make_constraints()


class Request:
    """One client's request, and what it has read so far."""

    def __init__(self, request: GenerationRequest, stream: GenerationStream, context: int) -> None:
        self.request = request
        self.stream = stream
        self.context = context
        self.events: list[TokenEvent] = []

    def read(self) -> None:
        self.events += self.stream.poll()


class TypedRunner(AsideRunner):
    """Its exports cannot be used by a runner with other KV types."""

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        return self._converted(super().export_kv(sequence, start, stop))

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        super().import_kv(sequence, start, stop, self._converted(data))

    def _converted(self, data: bytes) -> bytes:
        tokens = np.frombuffer(data, np.int32)
        return (VOCABULARY.vocab_size - tokens).tobytes() if self.info.kv_layout == "q8_0" else data


def bias(history: list[int], row: NDArray[np.float32]) -> None:
    """Copying is likely, so that drafts are accepted sometimes; so is an end, in places."""
    if len(history) > 6:
        row[history[-6]] += 3
    if len(history) % 23 == 0:
        row[0] = 3


def make_runner(**shape: Any) -> TypedRunner:
    return TypedRunner(**shape, max_sequences=10, vocab_size=VOCABULARY.vocab_size, bias=bias)


class Work:
    """A succession of engines over one disk folder, and the actions of clients.

    Prompts are cut from a few texts, so that prefixes are shared; pages, handles and patience are scarce.
    """

    def __init__(self, chance: np.random.Generator, patches: pytest.MonkeyPatch, folder: Path) -> None:
        self.chance = chance
        self.folder = folder
        self.disk, self.draft = chance.random() < 0.7, chance.random() < 0.4
        self.shape = {
            "pages": int(chance.integers(20, 60)),
            "can_truncate": bool(chance.random() < 0.8),
            "max_rows": int(chance.integers(3, 40)),
            "computes_aside": bool(chance.random() < 0.5),
        }
        self.copies = int(chance.integers(100, 3000)) if chance.random() < 0.5 else 0
        patches.setattr(scheduler, "TURN_S", float(chance.choice([0.0, 0.001, 2.0])))
        guesses = int(chance.integers(0, 8))
        if guesses:  # as many as allowed, whether they pay or not
            patches.setattr(DraftLength, "choose", lambda _self, limit, *_: max(min(limit, guesses), 0))
        self.asked: list[Request] = []
        self.past = [chance.integers(1, VOCABULARY.vocab_size, 90).tolist() for _ in range(3)]
        self.happened: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        self.runner = make_runner(**self.shape, kv_layout=str(self.chance.choice(KV_TYPES)), copies_bytes=self.copies)
        cache = DiskCache(self.folder, self.runner.info.kv_layout, 100_000) if self.disk else None
        draft = DraftModel(make_runner(pages=40, max_rows=16)) if self.draft else None
        self.engine = Engine(self.runner, VOCABULARY, max_running=4, max_waiting=6, disk=cache, drafter=draft)

    def stop(self) -> None:
        """End the engine, check its work, and record its statistics."""
        self.engine.close()
        self.check()
        self.happened.update({name: int(value) for name, value in asdict(self.engine.stats()).items()})

    def act(self) -> None:
        """Perform a random action."""
        actions = [self.submit] * 5 + [self.step] * 5 + [self.read, self.cancel, self.finish, self.finish, self.restart]
        actions[int(self.chance.integers(len(actions)))]()
        self.sound()

    def one_of(self, *values: Any) -> Any:
        return values[int(self.chance.integers(len(values)))]

    def submit(self) -> None:
        text = self.one_of(*self.past)
        rolling = self.chance.random() < 0.35
        prompt = (
            *text[: self.one_of(1, 7, 20, 50, 70, 90, 90)],
            *self.chance.integers(1, 12, self.one_of(0, 0, 3)).tolist(),
        )
        constraint = self.one_of(None, None, *CONSTRAINTS)
        request = GenerationRequest(
            prompt,
            sampling=self.one_of(*SAMPLING),
            max_tokens=self.one_of(0, 1, 9, 25, 60 if rolling else None),
            min_tokens=self.one_of(0, 0, 12),
            stop=self.one_of((), (), ("ab", "kkk")),
            priority=self.one_of(0, 0, 1),
            background=bool(self.chance.random() < 0.15),
            context_limit=self.one_of(None, int(self.chance.integers(12, 100))),
            context_policy=ContextPolicy.ROLLING if rolling else ContextPolicy.REFUSE,
            constraint=constraint,
            shared_prefix=self.one_of(0, 0, len(prompt) // 2, len(prompt) - 1),
            prompt_logprobs=None if rolling else self.one_of(None, None, None, 0, 2),
        )
        in_memory = (self.runner.info.pages_total - 1) * self.runner.info.page_size
        context = min(request.context_limit or in_memory, in_memory)
        for _ in range(self.one_of(1, 1, 1, 3)):
            try:
                self.asked.append(Request(request, self.engine.submit(request), context))
            except QueueFullError:
                return
            except ContextOverflowError:
                assert (
                    not rolling
                    and len(prompt) + min(1 if request.max_tokens is None else request.max_tokens, 1) > context
                )
                return

    def step(self) -> None:
        for _ in range(int(self.chance.integers(1, 12))):
            self.engine.step()
            self.sound()

    def read(self) -> None:
        for asked in self.asked[:2]:
            asked.read()

    def cancel(self) -> None:
        if self.asked:
            self.one_of(*self.asked).stream.cancel()

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

    def restart(self) -> None:
        self.stop()
        self.start()

    def sound(self) -> None:
        self.engine.check_integrity()

    def check(self) -> None:
        """Compare all answers; for clients that left early, what they received."""
        for asked in self.asked:
            asked.read()
            done = fold(iter(asked.events))
            reason = done.last.finish_reason
            assert reason, "the stream never ended"
            tokens, text, expected = self.reference(asked)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (done.token_ids, done.text, reason) == (tokens, text, expected)
                assert done.prompt_logprobs == self.scores(asked.request)
            else:
                assert done.token_ids == tokens[: len(done.token_ids)]
                assert done.text == "".join(LETTERS[token - 1] for token in done.token_ids)
                assert reason is FinishReason.CANCELLED or asked.request.background
            self.past = [*self.past[-7:], [*asked.request.prompt, *done.token_ids]]
        self.asked.clear()

    def scores(self, request: GenerationRequest) -> tuple[TokenLogprob, ...] | None:
        """The log-probabilities of a prompt's tokens after the first one, if requested."""
        prompt, top, runner = list(request.prompt), request.prompt_logprobs, make_runner()
        if top is None:
            return None
        return tuple(token_logprob(runner.logits_after(prompt[:at]), prompt[at], top) for at in range(1, len(prompt)))

    def reference(self, asked: Request) -> tuple[tuple[int, ...], str, FinishReason]:
        """The answer computed without engine, caches, batches or drafts."""
        request, runner = asked.request, make_runner()
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


def walk(kind: type[Work], runs: int, patches: pytest.MonkeyPatch, expected: set[str]) -> None:
    """Run `runs` engines at random, each with its own seed; everything expected must occur.

    Some of it depends on timing, so up to three times as many run if something has not occurred yet.
    """
    patches.setattr(stream_module, "CAPACITY", 12)
    for tier in (disk_cache, memory_tier):
        patches.setattr(tier, "SEGMENT_TOKENS", 16)
    patches.setattr(spill, "LEAST_TOKENS", 8)
    patches.setattr(spill, "LEAST_COPIED", 6)
    patches.setattr(kv_manager, "LEAST_RESTORED", 4)
    happened: Counter[str] = Counter()
    for number in range(3 * runs):
        if number >= runs and all(happened[name] for name in expected):
            break
        print("the chances of this run begin at", (SEED, number))  # noqa: T201 - shown where it fails
        with patches.context() as own_patches, tempfile.TemporaryDirectory() as folder:
            work = kind(np.random.default_rng((SEED, number)), own_patches, Path(folder))
            for _ in range(STEPS_A_RUN):
                work.act()
            work.finish()
            work.stop()
            happened += work.happened
    assert {name for name in expected if happened[name]} == expected


@pytest.mark.slow
def test_random_work(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = {"reused_memory_tokens", "reused_disk_tokens", "accepted_tokens", "evicted_tokens", "preemptions"}
    everything.add("copies_bytes")
    walk(Work, max(STEPS // STEPS_A_RUN, 1), monkeypatch, everything)
