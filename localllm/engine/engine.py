"""The engine: requests in, streams of events out, one thread that computes for all of them."""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.choices import ChoosingTeam
from cpu_kernels.cores import usable_processors
from gguf_io.runner_info import AdapterSet
from localllm.engine.disk_cache import DiskCache
from localllm.engine.drafter import Drafter
from localllm.engine.generation import Generation, Vocabulary, sequence_of
from localllm.engine.inspection import EngineSnapshot, Found, StepJournal, StepRecord
from localllm.engine.kv_manager import KVManager
from localllm.engine.request import (
    ContextPolicy,
    Counts,
    FinishReason,
    FittedPrompt,
    GenerationRequest,
    check_request,
    fit_prompt,
)
from localllm.engine.restore_costs import COMPUTED, RestoreCosts
from localllm.engine.runner import Begin, ComputesAside, Interruptible, Runner, SeesImages, sees_images, window_use
from localllm.engine.sampling import Sampler
from localllm.engine.scheduler import Plan, Scheduler
from localllm.engine.sequence import TokenSequence, adapter_set, text_of_prompt
from localllm.engine.step_costs import ChunkSize
from localllm.engine.stream import Detokenizer, EventWriter, GenerationStream
from localllm.errors import ContextOverflowError, EngineStoppedError, LocalLLMError, QueueFullError

# While requests run, KV is exported for the disk only after this many rows, counting each step as at least LEAST_ROWS:
# this takes a small share of the time and still keeps up. When idle, KV is exported at once.
SPILL_ROWS = 256
LEAST_ROWS = 16
# The bookkeeping is checked after each busy period, once nothing has arrived for this long.
IDLE_S = 1.0

# Threads that choose a step's tokens where a device computes, the engine's included.
CHOOSERS = min(usable_processors(), 8)
# Steps in a row that are begun before the one before them is worked up, while requests wait or KV is to be exported.
# Then one is scheduled.
MOST_AHEAD = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state, for users and metrics. Counters run from the start, in tokens unless stated otherwise."""

    running: int
    waiting: int
    cached_prefixes: int
    cached_tokens: int
    pages_total: int
    pages_free: int
    page_bytes: int
    window_pages: int
    kept_window_pages: int
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


@dataclass(slots=True)
class _Begun:
    """A step. logits: waits for them, or computes them. ahead: how many steps in a row were begun ahead, with it.

    following: the step after it, and what begins it, if that needs only its tokens, unless one of them changes that.
    choices: the operations that choose its tokens; empty if more is needed for it. Indices of parts: constrained are
    those whose grammar must see its token first, scored those with log-probabilities, and sampled those whose tokens
    are worked up already.
    """

    plan: Plan
    began: float
    logits: Callable[[], NDArray[np.float32] | None]
    ahead: int = 0
    following: tuple[Plan, Begin] | None = None
    choices: Sequence[int] = ()
    constrained: Sequence[int] = ()
    scored: Sequence[int] = ()
    sampled: set[int] = field(default_factory=set)


class Engine:
    """Runs many requests at once on one Runner. Takes ownership of the runner and the drafter.

    submit, cancel, stats and close may be called from any thread; everything else happens on the engine's own, which
    start() starts. context_limit None: the model's own. adapters: the default for requests that choose none. clock: the
    source of all times, in seconds; a drafter must use the same one. chunk: how many rows a step may have. costs:
    decides whether stored KV is restored or computed; None restores whatever is stored.
    """

    def __init__(  # noqa: PLR0913 - one parameter for each decision of the caller
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        *,
        context_limit: int | None = None,
        max_running: int = 8,
        max_waiting: int = 64,
        background_tokens: int = 512,
        disk: DiskCache | None = None,
        drafter: Drafter | None = None,
        adapters: AdapterSet = (),
        clock: Callable[[], float] = time.monotonic,
        chunk: ChunkSize | None = None,
        costs: RestoreCosts | None = None,
        pinned_share: float = 0.0,
    ) -> None:
        info = runner.info
        self._clock = clock
        self.runner = runner
        self.context = min(context_limit or info.max_context, info.max_context)
        # One page stays free for copying.
        self.most_tokens = min(self.context, max(info.tokens_within(info.pages_total - 1), info.page_size))
        self._vocabulary = vocabulary
        self._adapters = adapters
        self._drafter = drafter
        self._max_waiting = max_waiting
        max_running = max(min(max_running, info.max_sequences // 2, info.max_rows), 1)
        self._wakened = threading.Event()  # first, because the disk cache's threads set it as soon as they run
        self.kv = KVManager(
            runner,
            kept_sequences=info.max_sequences - max_running,
            background_pages=min(background_tokens // info.page_size, info.pages_total // 8),
            disk=disk,
            wake_engine=self._wake,
            clock=clock,
            costs=costs,
            pinned_share=pinned_share,
        )
        self._costs = costs
        self.scheduler = Scheduler(runner, self.kv, max_running, drafter, clock, chunk)
        self.journal = StepJournal()
        self._totals: Counter[str] = Counter()
        self._rows_unspilled = 0
        self._aside = runner if info.computes_aside and isinstance(runner, ComputesAside) else None
        self._choosers: ChoosingTeam | None = None
        if self._aside is not None:
            self._choosers = ChoosingTeam(CHOOSERS, info.max_sequences, info.vocab_size)
        # What a step leaves to do while a device computes the next: texts to send, and what to note.
        self._unsent: list[Generation] = []
        self._later: list[Callable[[], None]] = []
        self._begun: _Begun | None = None  # a step that was begun before the one before it was worked up
        self._interrupted = threading.Event()  # a request arrived or was cancelled since the step started
        self._submissions: deque[Generation] = deque()
        self._lock = threading.Lock()  # guards _submissions' growth, _closing and _failure
        self._closing = self._closed = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Queue a request and return its event stream at once.

        Raises RequestError, ContextOverflowError, EngineStoppedError, QueueFullError or TemplateError before queueing.
        A long prompt takes some milliseconds here. Dropping messages takes as long as rendering the rest.
        """
        request, text, prompt, context = self._fitted(request)
        sampler = Sampler(request.sampling, self.runner.info.vocab_size, text, self._vocabulary.token_bytes)
        scope = request.stop_scope and request.stop_scope()
        detokenizer = Detokenizer(request.stop, scope, request.ends, request.least_indent)
        writer = EventWriter(GenerationStream(self._wake, self._interrupt), detokenizer, self._clock)
        sequence = sequence_of(request, prompt, self._adapters_of(request), self.kv.most_pinned)
        generation = Generation(request, prompt, sequence, context, sampler, self._vocabulary, writer)
        with self._lock:
            if self._closing or self._failure:
                raise EngineStoppedError(f"The engine has stopped: {self._failure or 'the model is being unloaded'}.")
            if len(self.scheduler.waiting) + len(self._submissions) >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests are waiting already. Try again in a moment.")
            self._submissions.append(generation)
        self._interrupt()
        return writer.stream

    def step(self) -> bool:
        """Do one round of work on the calling thread; False if there was nothing to do.

        Where a device computes, the next step may be begun as soon as its tokens are chosen. The rest of their work is
        done while it computes, and a token after the end of an answer is dropped.
        """
        begun, self._begun = self._begun, None
        busy = begun is not None
        if begun is None:
            begun, busy = self._next()
        if begun is not None:
            logits = self._wait(begun)
            if logits is not None:
                ran, plan = self._clock(), begun.plan
                logits = self._go_on(begun, logits)
                accepted = [self._sample(begun, at, logits) for at in range(len(plan.parts))]
                self._commit(plan, accepted)
                self._note(begun, ran, sum(accepted))
        if self._begun is None:
            busy |= self._end_finished()
        if self._aside is None or begun is None:
            self._do_later()
        return busy or self._spill()

    def stats(self) -> EngineStats:
        """Return the engine's current load and its counters."""
        info, totals, cache, copies = self.runner.info, self._totals, self.kv.cache, self.kv.copies
        window_pages, kept_window_pages = window_use(self.runner)
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._submissions),
            cached_prefixes=len(cache),
            cached_tokens=cache.tokens,
            pages_total=info.pages_total,
            pages_free=self.runner.pages_free(),
            page_bytes=info.page_size * info.kv_bytes_per_token,
            window_pages=window_pages,
            kept_window_pages=kept_window_pages,
            copies_bytes=copies.bytes if copies else 0,
            copies_limit=copies.limit if copies else 0,
            prompt_tokens=totals["prompt"],
            reused_memory_tokens=totals["memory"],
            reused_disk_tokens=totals["disk"],
            generated_tokens=totals["generated"],
            drafted_tokens=totals["drafted"],
            accepted_tokens=totals["accepted"],
            evicted_tokens=cache.evicted_tokens,
            preemptions=self.scheduler.preemptions,
        )

    def inspect(self) -> "Future[EngineSnapshot]":
        """Return a future for a snapshot between two steps; it is cancelled if that fails or the engine stops first."""
        return self._ask(self._snapshot)

    def expected_counts(self, request: GenerationRequest) -> "Future[Counts]":
        """Return a future for the counts with which a request would start if it were submitted now.

        Nothing is computed, restored, or marked as used. The future is cancelled as that of `inspect`. Raises as
        submit does.
        """
        request, _, prompt, _ = self._fitted(request)
        sequence = sequence_of(request, prompt, self._adapters_of(request), self.kv.most_pinned)
        return self._ask(lambda: self._expected(sequence, prompt))

    def _expected(self, sequence: TokenSequence, prompt: FittedPrompt) -> Counts:
        running = [(generation.sequence, True) for generation in self.scheduler.running]
        memory, disk, recomputed = self.kv.expected(sequence, running)
        dropped = prompt.dropped_messages, prompt.dropped_tokens
        return Counts(len(prompt.tokens), memory, disk, 0, 0, 0, *dropped, recomputed)

    def _ask(self, look: Callable[[], Found]) -> "Future[Found]":
        asked = self.journal.ask(look)
        if self._closing or self._failure:
            asked.cancel()
        self._wake()
        return asked

    def close(self) -> None:
        """Cancel everything, stop the thread, close the runner and finish writes to the disk tier. Idempotent.

        The runner is closed as soon as what is to be written has been exported: a slow disk holds no device's memory.
        """
        with self._lock:
            self._closing = True
        self._interrupt()
        if self._thread.is_alive():
            self._thread.join()
        self._end_all(FinishReason.CANCELLED, None)
        if self._closed:
            return
        self._closed = True
        if self._begun is not None:
            with contextlib.suppress(LocalLLMError):  # nobody wants its result
                self._begun.logits()
        if self._choosers is not None:
            self._choosers.close()
        if self._drafter is not None:
            self._drafter.keep()
        self.kv.close(finish=not self._failure, release=self._close_runner)

    def _close_runner(self) -> None:
        self.runner.close()
        if self._drafter is not None:
            self._drafter.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the bookkeeping is inconsistent. Between steps only; takes some milliseconds."""
        if self._drafter is not None:
            self._drafter.check_integrity()
        owned = self.kv.cache.check_integrity()
        for generation in self.scheduler.running:
            sequence = generation.sequence
            if sequence.handle is None:
                continue
            if sequence.handle in owned:
                raise RuntimeError(f"sequence {sequence.handle} has two owners")
            begun = self._begun is not None and sequence.handle in self._begun.plan.sequences
            if self.runner.sequence_length(sequence.handle) != sequence.computed + begun:
                raise RuntimeError(f"sequence {sequence.handle} does not hold what its generation counts")
            owned.add(sequence.handle)
        self.runner.check_integrity(owned)

    def _fitted(self, request: GenerationRequest) -> tuple[GenerationRequest, Sequence[int], FittedPrompt, int]:
        """A request that was checked, the text tokens of its prompt, the prompt that fits its context, and the context.

        Raises as submit does.
        """
        context, remedy = self._context_of(request)
        text = text_of_prompt(request.prompt, request.images) if request.images else request.prompt
        check_request(request, text, self.runner.info, sees_images(self.runner))
        keeps_all = bool(request.images) or request.prompt_logprobs is not None
        if keeps_all and request.context_policy is ContextPolicy.ROLLING:
            request = replace(request, context_policy=ContextPolicy.REFUSE)
        try:
            return request, text, fit_prompt(request, context), context
        except ContextOverflowError as error:
            by_request = context == request.context_limit
            raise ContextOverflowError(error.prompt_tokens, context, remedy, by_request) from None

    def _adapters_of(self, request: GenerationRequest) -> AdapterSet:
        if request.adapters is None:
            return self._adapters
        return adapter_set(request.adapters, self.runner.info.adapter_count)

    def _context_of(self, request: GenerationRequest) -> tuple[int, str]:
        """The longest sequence that a request may have, and advice on how to allow a longer one."""
        allowed = min(self.context, request.context_limit or self.context)
        if self.most_tokens < allowed:
            return self.most_tokens, "load the model with more memory for keys and values (kv_mib)"
        if allowed < self.context:
            return allowed, "raise the request's own limit (num_ctx)"
        return allowed, "load a model with more context (--ctx, as far as the model was made for it)"

    def _take_news(self) -> bool:
        """Queue new submissions, and end cancelled and expired generations; return whether any ended."""
        while self._submissions:
            generation = self._submissions.popleft()
            self.journal.timelines.append(generation.timeline)
            self.scheduler.add(generation)
        for generation in [*self.scheduler.running, *self.scheduler.waiting]:
            limit = generation.request.time_limit_s
            if generation.writer.stream.cancelled:
                generation.end(FinishReason.CANCELLED)
            elif limit is not None and generation.writer.age >= limit:
                generation.end(FinishReason.LENGTH)
        return self._end_finished()

    def _next(self) -> tuple[_Begun | None, bool]:
        """Schedule a step and begin it, if it has rows; return also whether anything was done."""
        self._interrupted.clear()
        ended = self._take_news()
        if self.journal.asked:
            self._do_later()
            self.journal.answer()
        plan = self.scheduler.schedule()
        self._report_progress()
        begun = self._begin(plan, partial(self._started, plan)) if plan.parts else None
        return begun, begun is not None or plan.again or ended

    def _begin(
        self, plan: Plan, begin: Callable[[], Callable[[], NDArray[np.float32] | None]], ahead: int = 0
    ) -> _Begun:
        """Begin to compute the plan's rows, by calling `begin`."""
        began = self._clock()
        try:
            return _Begun(plan, began, begin(), ahead)
        except LocalLLMError as error:
            return _Begun(plan, began, partial(_raise, error), ahead)

    def _started(self, plan: Plan) -> Callable[[], NDArray[np.float32] | None]:
        """Let a device begin to compute the plan's rows; the processor does when the result is called."""
        for part in plan.parts:
            if part.image is not None:
                sequence = part.generation.sequence
                assert isinstance(self.runner, SeesImages) and sequence.handle is not None
                self.runner.append_image(sequence.handle, part.image, sequence.images.position(sequence.computed))
        if not plan.tokens:
            empty = np.empty((0, self.runner.info.vocab_size), dtype=np.float32)
            return lambda: empty
        rows = plan.tokens, plan.positions, plan.sequences, plan.wanted
        if plan.patient and isinstance(self.runner, Interruptible):
            return partial(self.runner.run_unless, self._interrupted, *rows)
        return partial(self.runner.run, *rows) if self._aside is None else self._aside.prepare(*rows[1:])(plan.tokens)

    def _wait(self, begun: _Begun) -> NDArray[np.float32] | None:
        """The logits of a step; None if it was interrupted or failed. Before that, do what a device leaves time for.

        A failure ends the plan's requests, because the contents of their sequences are unknown.
        """
        try:
            try:
                if self._aside is not None:
                    self._look_ahead(begun, self._aside)
                self._do_later()
            finally:
                logits = begun.logits()
        except LocalLLMError as error:
            for part in begun.plan.parts:
                self.kv.discard(part.generation.sequence)
                if part.generation.finish_reason is None:
                    part.generation.fail(error)
            return None
        return logits

    def _look_ahead(self, begun: _Begun, aside: ComputesAside) -> None:
        """Prepare what follows a step while the device computes it."""
        plan = begun.plan
        if plan.only_decodes:
            generations = [part.generation for part in plan.parts]
            choices = [choice for one in generations if (choice := _choice_of(one, None)) is not None]
            begun.choices = choices if len(choices) == len(generations) else ()
            begun.constrained = [at for at, one in enumerate(generations) if one.is_constrained]
            begun.scored = [at for at, one in enumerate(generations) if one.request.sampling.logprobs is not None]
        spiller = self.kv.spiller
        awaited = bool(self.scheduler.waiting) or (spiller is not None and spiller.waits)
        in_time = begun.ahead < MOST_AHEAD or not awaited
        may_go_on = in_time and self.runner.info.can_truncate and not self.journal.asked
        has_room = self.runner.pages_free() >= len(plan)  # a token takes one page at most
        if may_go_on and has_room and self.scheduler.next_is_known(plan):
            following = plan.following()
            begun.following = following, aside.prepare(following.positions, following.sequences, following.wanted)

    def _go_on(self, begun: _Begun, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Where a device computes, choose the step's tokens, and begin the next step if it needs nothing else.

        Returns the logits as far as they are still read: the device may overwrite its own.
        """
        if self._choosers is None:
            return logits
        plan = begun.plan
        tokens = self._choosers.run(begun.choices, logits) if begun.choices else self._choose(plan, logits)
        if begun.following is None or self._submissions or len(tokens) < len(plan.parts):
            return logits
        if min(tokens) < 0 or not self._vocabulary.eog_ids.isdisjoint(tokens):
            return logits
        for at in begun.constrained:
            self._sample(begun, at, logits)
            generation = plan.parts[at].generation
            if generation.finish_reason or generation.sequence.pending > 2:  # more than the row and its token
                return logits
        if begun.scored:
            kept = np.empty_like(logits)
            for at in begun.scored:
                kept[at] = logits[at]
            logits = kept
        following, begin = begun.following
        following.tokens = tokens
        self._begun = self._begin(following, partial(begin, tokens), begun.ahead + 1)
        return logits

    def _choose(self, plan: Plan, logits: NDArray[np.float32]) -> list[int]:
        """Choose the first tokens of all generations that need nothing else for it; return them."""
        assert self._choosers is not None
        rows = [
            (part, rows.start) for part, rows in zip(plan.parts, plan.logits, strict=True) if rows.start < rows.stop
        ]
        choices = [_choice_of(part.generation, logits[row]) for part, row in rows if not part.scored]
        return self._choosers.run([choice for choice in choices if choice is not None])

    def _do_later(self) -> None:
        """Send texts, and note what was done: what the next step does not depend on."""
        unsent, self._unsent = self._unsent, []
        later, self._later = self._later, []
        told = [generation.writer.stream for generation in unsent if generation.add_text()]
        for work in later:
            work()
        for stream in told:  # last and together, since readers that wake take the interpreter
            stream.tell()

    def _sample(self, begun: _Begun, at: int, logits: NDArray[np.float32]) -> int:
        """Score a part's prompt, and sample tokens if it is complete; return the number of accepted drafts.

        No effect the second time. An exception ends this generation only.
        """
        part, rows = begun.plan.parts[at], begun.plan.logits[at]
        if rows.start == rows.stop or part.generation.finish_reason or at in begun.sampled:
            return 0
        begun.sampled.add(at)
        try:
            following = part.generation.score_prompt(logits[rows]) if part.scored else logits[rows]
            return part.generation.sample(following, part.drafts) if len(following) else 0
        except Exception as error:
            part.generation.fail(error)
            return 0

    def _commit(self, plan: Plan, accepted: list[int]) -> None:
        """Record what was computed, truncate what is not part of the answer, send text."""
        for part, right in zip(plan.parts, accepted, strict=True):
            generation, sequence = part.generation, part.generation.sequence
            self.kv.advance(sequence, len(part))
            if not generation.generated:
                continue
            if self._begun is None and self.runner.info.can_truncate:
                # The last token's row is never reused: its logits are needed to continue the sequence.
                first = sequence.computed - len(part.drafts)
                self.kv.cut(sequence, min(first + right, len(sequence.tokens) - 1))
            window = generation.roll_if_full() if generation.finish_reason is None else None
            if window is not None:
                self.kv.discard(sequence)
                sequence.replace(window)
            self._unsent.append(generation)
        self._rows_unspilled += max(len(plan), LEAST_ROWS)
        if self._rows_unspilled >= SPILL_ROWS and self._begun is None:
            self._rows_unspilled = 0
            self._spill()

    def _note(self, begun: _Begun, ran: float, accepted: int) -> None:
        """Record a step in the journal and learn from its time. ran: when the runner finished."""
        plan, began = begun.plan, begun.began
        step = StepRecord(len(plan) - plan.decoded - plan.drafted, plan.decoded, plan.drafted, ran - began)
        self._later.append(partial(self.journal.note, step, began, plan.work))
        took = (self._begun.began if self._begun else self._clock()) - began
        self.scheduler.observe(plan, took, accepted)
        if self._costs is not None and not (plan.decoded or plan.drafted or plan.images):
            self._costs.observe(COMPUTED, len(plan), took)

    def _spill(self) -> bool:
        if self.kv.spiller is None:
            return False
        self._do_later()
        return self.kv.spiller.spill()

    def _end_finished(self) -> bool:
        """Send the last event of every generation that has ended; return whether there were any."""
        ended = [each for each in [*self.scheduler.running, *self.scheduler.waiting] if each.finish_reason]
        for generation in ended:
            self._end(generation)
        return bool(ended)

    def _end(self, generation: Generation) -> None:
        counts, prefilled = generation.counts, generation.prefilled
        self.scheduler.remove(generation)
        self._totals.update(
            prompt=prefilled,
            memory=counts.cached_memory,
            disk=counts.cached_disk,
            generated=counts.generated,
            drafted=counts.drafted,
            accepted=counts.accepted,
        )
        generation.finish()

    def _report_progress(self) -> None:
        for generation in self.scheduler.running:
            generation.send_progress(0)
        for position, generation in enumerate(self.scheduler.waiting, start=1):
            generation.send_progress(position)

    def _snapshot(self) -> EngineSnapshot:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        window_pages, kept_window_pages = window_use(self.runner)
        return EngineSnapshot(
            steps=tuple(self.journal.steps),
            requests=(*(one.view(False) for one in running), *(one.view(True) for one in waiting)),
            prefixes=self.kv.cache.tree(),
            page_size=self.runner.info.page_size,
            pages_total=self.runner.info.pages_total,
            page_holders=self.runner.page_holders(),
            timelines=tuple(replace(each, spans=[*each.spans]) for each in self.journal.timelines),
            now=self._clock(),
            window_pages=window_pages,
            kept_window_pages=kept_window_pages,
        )

    def _wake(self) -> None:
        self._wakened.set()

    def _interrupt(self) -> None:
        """Wake the engine, and interrupt a patient step."""
        self._interrupted.set()
        self._wake()

    def _loop(self) -> None:
        checked = True
        self._wakened.wait()  # for a first request, so that a load is not delayed
        try:
            while not self._closing:
                self._wakened.clear()
                if self.step():
                    checked = False
                elif self.scheduler.running or self.scheduler.waiting:
                    self._wakened.wait(0.05)  # for readers and the disk writer; time limits are checked meanwhile
                elif not self._wakened.wait(None if checked else IDLE_S):
                    self.check_integrity()
                    checked = True
        except Exception as error:
            log.exception("The engine stopped after an unexpected error")
            with self._lock:
                self._failure = f"{type(error).__name__}: {error}"
            self._end_all(FinishReason.ERROR, error)

    def _end_all(self, reason: FinishReason, error: Exception | None) -> None:
        """End every request without touching the runner, whose state may be lost."""
        for generation in [*self.scheduler.running, *self.scheduler.waiting, *self._submissions]:
            generation.abort(reason, error)
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self._submissions.clear()
        self.journal.cancel()


def _choice_of(generation: Generation, row: NDArray[np.float32] | None) -> int | None:
    """Generation.begin; an exception ends the generation."""
    try:
        return generation.begin(row)
    except Exception as error:
        generation.fail(error)
        return None


def _raise(error: LocalLLMError) -> NDArray[np.float32]:
    raise error
