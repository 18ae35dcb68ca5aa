"""The engine: requests in, streams of events out, one thread that computes for all of them."""

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localllm.engine.adapters import AdapterSet, adapter_set
from localllm.engine.context_policy import fit_prompt
from localllm.engine.disk_cache import DiskCache
from localllm.engine.draft_model import DraftModel
from localllm.engine.generation import Generation, Vocabulary
from localllm.engine.images import SeesImages, text_of_prompt
from localllm.engine.inspection import EngineSnapshot, Journal, view_request
from localllm.engine.kv_manager import KVManager
from localllm.engine.plan import Plan, PlannedRows
from localllm.engine.prefix_cache import common_prefix
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest
from localllm.engine.runner import Interruptible, Runner
from localllm.engine.sampling import Sampler
from localllm.engine.scheduler import Scheduler
from localllm.engine.stream import GenerationStream
from localllm.errors import ContextOverflowError, EngineStoppedError, LocalLLMError, QueueFullError, RequestError

# While requests run, KV is copied out for the disk only once so many rows were computed, a step being so many at least:
# no faster than by a small share of the time, and no slower than it comes. When idle, at once.
SPILL_ROWS = 256
LEAST_ROWS = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine, for people and metrics. Counters run from the start; tokens unless they say otherwise."""

    running: int
    waiting: int
    cached_prefixes: int
    cached_tokens: int
    pages_total: int
    pages_free: int
    page_bytes: int
    copies_bytes: int
    copies_limit: int
    prompt_tokens: int
    reused_memory_tokens: int
    reused_disk_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    evicted_tokens: int
    preemptions: int


class Engine:
    """Runs many requests at once on one Runner, which it owns from now on, as it does the draft model.

    submit, cancel, stats and close may be called from any thread; everything else happens on the engine's own, which
    start() begins. context_limit None is the model's own. adapters are those of requests that choose none.
    """

    def __init__(
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        *,
        context_limit: int | None = None,
        max_running: int = 8,
        max_waiting: int = 64,
        background_tokens: int = 512,
        disk: DiskCache | None = None,
        draft_model: DraftModel | None = None,
        adapters: AdapterSet = (),
    ) -> None:
        self.runner = runner
        self._vocabulary = vocabulary
        self._wakened = threading.Event()
        self._news = threading.Event()  # set when somebody cancels or comes; see Interruptible
        self.context = min(context_limit or runner.max_context, runner.max_context)
        self._max_waiting = max_waiting
        max_running = max(min(max_running, runner.max_sequences // 2, runner.max_rows), 1)
        self._kv = KVManager(
            runner,
            kept_sequences=runner.max_sequences - max_running,
            background_pages=min(background_tokens // runner.page_size, runner.pages_total() // 8),
            disk=disk,
            wake_engine=self._wake,
            adapters=adapters,
        )
        self._adapters = adapters
        self._draft_model = draft_model
        self._scheduler = Scheduler(runner, self._kv, max_running, draft_model)
        self._submissions: deque[Generation] = deque()
        self._journal = Journal()
        self._lock = threading.Lock()  # guards _submissions' growth, _closing and _failure
        self._rows_unspilled = 0
        self._closing = self._closed = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._totals = dict.fromkeys(("prompt", "memory", "disk", "generated", "drafted", "accepted"), 0)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Queue a request and return its events at once.

        Raises RequestError, ContextOverflowError, QueueFullError or TemplateError, before anything is queued. A long
        prompt takes some milliseconds here, one whose messages must be dropped as long as rendering the rest.
        """
        text = text_of_prompt(request.prompt, request.images)
        self._check(request, text)
        if request.images and request.context_policy is ContextPolicy.ROLLING:
            request = replace(request, context_policy=ContextPolicy.REFUSE)
        context, remedy = self._context_of(request)
        try:
            prompt = fit_prompt(request, context)
        except ContextOverflowError as error:
            raise ContextOverflowError(error.prompt_tokens, context, remedy) from None
        stream = GenerationStream(self._wake, self._interrupt)
        sampler = Sampler(request.sampling, self.runner.vocab_size, text, self._vocabulary.token_bytes)
        generation = Generation(request, prompt, context, sampler, self._vocabulary, stream, self._adapters_of(request))
        with self._lock:
            if self._closing or self._failure:
                raise EngineStoppedError(f"The engine has stopped: {self._failure or 'the model is being unloaded'}.")
            if len(self._scheduler.waiting) + len(self._submissions) >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests are waiting already. Try again in a moment.")
            self._submissions.append(generation)
        self._interrupt()
        return stream

    def step(self) -> bool:
        """Do one round of work on the calling thread; False if there was nothing to do."""
        self._news.clear()  # what is set from now on was perhaps not seen by this step
        self._settle()
        self._journal.answer(self._snapshot)
        plan = self._scheduler.schedule()
        if not plan.parts:
            return self._settle() or plan.again or self._spill()
        try:
            logits = self._run(plan)
        except LocalLLMError as error:
            return self._fail(plan, error)
        if logits is None:
            return True
        self._commit(plan, logits)
        self._rows_unspilled += max(len(plan), LEAST_ROWS)
        if self._rows_unspilled >= SPILL_ROWS:
            self._rows_unspilled = 0
            self._spill()
        return True

    def _run(self, plan: Plan) -> NDArray[np.float32] | None:
        """Compute the plan's rows, and learn from the time that it took; None where a patient one was given up."""
        began = time.monotonic()
        logits = self._compute(plan)
        if logits is None:
            return None
        took = time.monotonic() - began
        self._scheduler.observe(plan, took)
        self._journal.note(plan, took)
        return logits

    def _compute(self, plan: Plan) -> NDArray[np.float32] | None:
        for part in plan.parts:
            if part.image is not None:
                assert isinstance(self.runner, SeesImages) and part.generation.sequence is not None
                self.runner.append_image(part.generation.sequence, part.image)
        if not plan.tokens:
            return np.empty((0, self.runner.vocab_size), dtype=np.float32)
        rows = plan.tokens, plan.positions, plan.sequences, plan.wanted
        if plan.patient and isinstance(self.runner, Interruptible):
            return self.runner.run_unless(self._news, *rows)
        return self.runner.run(*rows)

    def _spill(self) -> bool:
        return self._kv.spiller is not None and self._kv.spiller.spill()

    def stats(self) -> EngineStats:
        """Return how busy the engine is and what it has done."""
        totals, cache, copies = self._totals, self._kv.cache, self._kv.copies
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._submissions),
            cached_prefixes=len(cache),
            cached_tokens=cache.tokens,
            pages_total=self.runner.pages_total(),
            pages_free=self.runner.pages_free(),
            page_bytes=self.runner.page_size * self.runner.kv_bytes_per_token,
            copies_bytes=copies.bytes if copies else 0,
            copies_limit=copies.limit if copies else 0,
            prompt_tokens=totals["prompt"],
            reused_memory_tokens=totals["memory"],
            reused_disk_tokens=totals["disk"],
            generated_tokens=totals["generated"],
            drafted_tokens=totals["drafted"],
            accepted_tokens=totals["accepted"],
            evicted_tokens=cache.evicted_tokens,
            preemptions=self._scheduler.preemptions,
        )

    def inspect(self) -> "Future[EngineSnapshot]":
        """Return what will hold a look inside, taken between two steps; it is cancelled if the engine ends first."""
        asked = self._journal.ask()
        if self._closing or self._failure:
            asked.cancel()
        self._wake()
        return asked

    def _snapshot(self) -> EngineSnapshot:
        running, waiting = self._scheduler.running, self._scheduler.waiting
        return EngineSnapshot(
            steps=self._journal.steps,
            requests=(*(view_request(one, False) for one in running), *(view_request(one, True) for one in waiting)),
            prefixes=self._kv.cache.tree(),
            page_size=self.runner.page_size,
            pages_total=self.runner.pages_total(),
            page_holders=self.runner.page_holders(),
        )

    def close(self) -> None:
        """Cancel everything, write what the disk tier is due, stop the thread and close the runner. Idempotent."""
        with self._lock:
            self._closing = True
        self._interrupt()
        if self._thread.is_alive():
            self._thread.join()
        self._end_all(FinishReason.CANCELLED, None)
        if self._kv.spiller and not self._failure and not self._closed:
            self._kv.spiller.close()
        self._closed = True
        self.runner.close()
        if self._draft_model is not None:
            self._draft_model.close()

    def check_integrity(self) -> set[int]:
        """Raise RuntimeError where bookkeeping is wrong; return the sequences in use. Between steps only."""
        if self._draft_model is not None:
            self._draft_model.check_integrity()
        owned = self._kv.cache.check_integrity()
        for generation in self._scheduler.running:
            if generation.sequence is None:
                continue
            if generation.sequence in owned:
                raise RuntimeError(f"sequence {generation.sequence} has two owners")
            if self.runner.sequence_length(generation.sequence) != generation.computed:
                raise RuntimeError(f"sequence {generation.sequence} does not hold what its generation counts")
            owned.add(generation.sequence)
        return owned

    def _check(self, request: GenerationRequest, text: list[int]) -> None:
        if not text:
            raise RequestError("The prompt is empty. Send at least one token.")
        if request.images and not isinstance(self.runner, SeesImages):
            raise RequestError(
                f"The {self.runner.backend} engine reads no images. Load the model with --backend llama."
            )
        if min(text) < 0 or max(text) >= self.runner.vocab_size:
            raise RequestError(f"A prompt token is outside the vocabulary (0 to {self.runner.vocab_size - 1}).")
        for name in ("max_tokens", "min_tokens", "context_limit", "time_limit_s"):
            value = getattr(request, name)
            if value is not None and value < 0:
                raise RequestError(f"{name} is {value}; it cannot be negative.")
        if any(not stop for stop in request.stop):
            raise RequestError("A stop string is empty. Leave it out.")

    def _adapters_of(self, request: GenerationRequest) -> AdapterSet:
        if request.adapters is None:
            return self._adapters
        return adapter_set(request.adapters, self.runner.adapter_count)

    def _context_of(self, request: GenerationRequest) -> tuple[int, str]:
        """The longest sequence that a request may have, and what would allow a longer one."""
        allowed, in_memory = min(self.context, request.context_limit or self.context), self._context_in_memory()
        if in_memory < allowed:
            return in_memory, "load the model with more memory for keys and values (kv_mib)"
        if allowed < self.context:
            return allowed, "raise the request's own limit (num_ctx)"
        return allowed, "load a model with more context (--ctx, as far as the model was made for it)"

    def _context_in_memory(self) -> int:
        """Longest sequence that the KV budget holds, a page for copying left."""
        return max(self.runner.pages_total() - 1, 1) * self.runner.page_size

    def _commit(self, plan: Plan, logits: NDArray[np.float32]) -> None:
        """Note what was computed, sample where a prompt is complete, send events."""
        for part, rows in zip(plan.parts, plan.logits, strict=True):
            generation = part.generation
            generation.computed += len(part)
            self._kv.keep_state(generation)
            if rows.start == rows.stop:
                generation.send_progress(0)
                continue
            if generation.request.max_tokens == 0:
                generation.finish_reason = FinishReason.LENGTH
                continue
            try:
                generation.accept_rows(logits[rows], part.drafts)
            except LocalLLMError as error:
                generation.fail(error)
            self._cut_rejected(part)
            if generation.finish_reason is None and generation.roll_if_full():
                self._kv.discard(generation)
            generation.send_text()
        self._settle()

    def _fail(self, plan: Plan, error: LocalLLMError) -> bool:
        """End the requests whose rows could not be computed; what their sequences hold now is unknown."""
        for part in plan.parts:
            self._kv.discard(part.generation)
            part.generation.fail(error)
        return self._settle()

    def _cut_rejected(self, part: PlannedRows) -> None:
        """Forget the rows of drafts that did not come true, and that of a last token, which is never reused."""
        generation = part.generation
        first = generation.computed - len(part.drafts)
        came = generation.tokens[first : generation.computed]
        valid = min(first + common_prefix(came, part.drafts), len(generation.tokens) - 1)
        if generation.computed > valid:
            assert generation.sequence is not None
            self.runner.truncate_sequence(generation.sequence, valid)
            generation.computed = valid

    def _settle(self) -> bool:
        """Queue what was submitted, end what is done, cancelled or late, tell the waiting their place.

        Returns whether anything ended.
        """
        while self._submissions:
            self._scheduler.add(self._submissions.popleft())
        ended = False
        for generation in [*self._scheduler.running, *self._scheduler.waiting]:
            if generation.finish_reason is None and generation.stream.cancelled:
                generation.finish_reason = FinishReason.CANCELLED
            elif generation.finish_reason is None and generation.expired:
                generation.finish_reason = FinishReason.LENGTH
            if generation.finish_reason:
                self._finish(generation)
                ended = True
        for position, generation in enumerate(self._scheduler.waiting, start=1):
            generation.send_progress(position)
        return ended

    def _finish(self, generation: Generation) -> None:
        self._scheduler.remove(generation)
        self._kv.release(generation)
        for name, value in (
            ("prompt", generation.counts.prompt),
            ("memory", generation.counts.cached_memory),
            ("disk", generation.counts.cached_disk),
            ("generated", generation.counts.generated),
            ("drafted", generation.counts.drafted),
            ("accepted", generation.counts.accepted),
        ):
            self._totals[name] += value
        generation.send_last()

    def _wake(self) -> None:
        self._wakened.set()

    def _interrupt(self) -> None:
        """Wake the engine, and have it give up a step that others need not wait for."""
        self._news.set()
        self._wake()

    def _loop(self) -> None:
        try:
            while not self._closing:
                self._wakened.clear()
                if not self.step():
                    # Woken by submissions, cancels, readers and the writer; time limits are looked at meanwhile.
                    busy = self._scheduler.running or self._scheduler.waiting
                    self._wakened.wait(0.05 if busy else None)
        except Exception as error:
            log.exception("The engine stops after an unexpected error")
            with self._lock:
                self._failure = f"{type(error).__name__}: {error}"
            self._end_all(FinishReason.ERROR, error)

    def _end_all(self, reason: FinishReason, error: Exception | None) -> None:
        """End every request without touching the runner, whose state may be lost."""
        for generation in [*self._scheduler.running, *self._scheduler.waiting, *self._submissions]:
            generation.finish_reason = reason
            generation.error = str(error) if error else None
            generation.send_last()
        self._scheduler.running.clear()
        self._scheduler.waiting.clear()
        self._submissions.clear()
        self._journal.cancel()
