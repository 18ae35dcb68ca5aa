"""Which rows the next step computes: admission, chunked prefill, decode first, preemption."""

from bisect import insort
from itertools import count, groupby

from localllm.engine.draft_model import DraftModel
from localllm.engine.generation import Generation
from localllm.engine.kv_manager import KVManager
from localllm.engine.plan import ChunkSize, Plan, PlannedRows, fair_shares
from localllm.engine.runner import Interruptible, Runner
from localllm.engine.speculation import StepCosts
from localllm.errors import OutOfMemoryError


class Scheduler:
    """First come, first served within a priority, several at a time; background requests come last.

    The engine's thread is the only caller.
    """

    def __init__(self, runner: Runner, kv: KVManager, max_running: int, draft_model: DraftModel | None) -> None:
        self._runner = runner
        self._kv = kv
        self._max_running = max_running
        self._arrivals = count()
        self._order: dict[Generation, tuple[bool, int, int]] = {}
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []
        self._draft_model = draft_model
        self._patient = isinstance(runner, Interruptible) and runner.can_interrupt
        self.chunk = ChunkSize(runner.max_rows)
        self.costs = StepCosts()
        self.preemptions = 0

    def add(self, generation: Generation) -> None:
        """Put a new generation into the queue."""
        request = generation.request
        self._order[generation] = (request.background, request.priority, next(self._arrivals))
        self._enqueue(generation)

    def remove(self, generation: Generation) -> None:
        """Forget a generation that has finished; its sequence is the caller's to release before."""
        del self._order[generation]
        if self._draft_model is not None:
            self._draft_model.forget(generation)
        (self.running if generation in self.running else self.waiting).remove(generation)

    def schedule(self) -> Plan:
        """Return the next step's rows; an empty plan if nothing can run now."""
        self._admit()
        plan = Plan()
        active = [generation for generation in self.running if not generation.stream.full]
        ready = [generation for generation in active if self._started(generation)]
        for generation in ready:
            if generation.restoring:
                self._kv.restore(generation)
                generation.send_progress(0)
                plan.again = True
        ready = [generation for generation in ready if not generation.restoring]
        self._add_decodes(plan, [generation for generation in ready if generation.pending == 1])
        if len(plan.parts) < len(ready):
            self._add_prefills(plan, [generation for generation in ready if generation.pending > 1])
        if active and not plan.parts and not plan.again:
            self._preempt(self.running[-1])
            plan.again = True
        return plan

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from a step's time how long the next ones may be, and what speculation costs; of images, nothing."""
        if plan.images:
            return
        self.chunk.observe(len(plan), seconds)
        if plan.decodes:
            self.costs.observe(len(plan), seconds)

    def _admit(self) -> None:
        """Let waiting requests run, in order, while there is room. Those whose readers are behind make room."""
        if not self.waiting:
            return
        waiting = [generation for generation in self.waiting if not generation.stream.full]
        paused = [generation for generation in self.running if generation.stream.full]
        for generation in waiting:
            background = generation.request.background
            while paused and (self._all_run or not (background or self._fits(generation))):
                self._requeue(paused.pop())
            if self._all_run or not self._fits(generation):
                if background:
                    continue
                break
            self.waiting.remove(generation)
            insort(self.running, generation, key=self._order.__getitem__)
        if waiting and not self.running:
            waiting[0].fail(OutOfMemoryError("Cached chats fill the KV memory, and a background request evicts none."))

    @property
    def _all_run(self) -> bool:
        """Whether as many run as may at once."""
        return len(self.running) >= self._max_running

    def _fits(self, generation: Generation) -> bool:
        """Whether its pages can be found beside those of the running ones. Cached prefixes can be evicted for it."""
        needed = self._pages(generation)
        if generation.request.background:
            return needed <= self._runner.pages_free()
        return not self.running or needed + sum(map(self._pages, self.running)) <= self._runner.pages_total()

    def _pages(self, generation: Generation) -> int:
        return len(generation.tokens) // self._runner.page_size + 2  # the page begun, and one to go on

    def _started(self, generation: Generation) -> bool:
        return generation.sequence is not None or self._kv.start(generation, self.running)

    def _add_decodes(self, plan: Plan, decoding: list[Generation]) -> None:
        for generation, drafts in zip(decoding, self._drafts(decoding), strict=True):
            if generation.sequence is None:  # preempted for an earlier one in this very step
                continue
            room = self._runner.max_rows - len(plan) - 1
            if room < 0:
                return
            if drafts and self._add(plan, PlannedRows(generation, 1, drafts[:room])):
                continue
            while not self._add(plan, PlannedRows(generation, 1)) and self._preempt(self.running[-1]) is not generation:
                pass

    def _drafts(self, decoding: list[Generation]) -> list[list[int]]:
        """What each generation may go on with; the draft model guesses where nothing else is known."""
        guided = self._draft_model is not None or any(generation.knows_more for generation in decoding)
        if not decoding or not guided or not self._runner.can_truncate:
            return [[] for _ in decoding]
        others = len(decoding) - 1
        spare = (self.chunk.rows - len(decoding)) // len(decoding)
        limits = [
            min(spare, generation.tokens_left - 1, generation.context - len(generation.tokens) - 1)
            for generation in decoding
        ]
        drafts = [
            generation.draft(limit, self.costs, others) for generation, limit in zip(decoding, limits, strict=True)
        ]
        if self._draft_model is None:
            return drafts
        token_s = self._draft_model.token_s / len(decoding)
        counts = [
            0 if known else generation.wanted_guesses(limit, self.costs, token_s, others)
            for generation, limit, known in zip(decoding, limits, drafts, strict=True)
        ]
        guesses = self._draft_model.guess(list(zip(decoding, counts, strict=True)))
        return [known or guess for known, guess in zip(drafts, guesses, strict=True)]

    def _add_prefills(self, plan: Plan, prefilling: list[Generation]) -> None:
        rows = self.chunk.rows
        if len(self.running) + len(self.waiting) == 1 and prefilling:
            plan.patient = self._patient and prefilling[0].request.time_limit_s is None
            ahead = max(_text_ahead(prefilling[0]), 1)  # no text before an image, which takes its step all the same
            rows = self.chunk.rows_patient(ahead) if plan.patient else self.chunk.rows_alone
        budget = min(rows, self._runner.max_rows) - len(plan)
        for _, group in groupby(prefilling, key=lambda generation: generation.request.priority):
            members = [generation for generation in group if generation.sequence is not None]
            reading = [generation for generation in members if generation.images.at(generation.computed) is None]
            for generation in members:
                if (image := generation.images.at(generation.computed)) is not None and budget > 0:
                    self._add(plan, PlannedRows(generation, len(image.ids), image=image))
                    budget -= len(image.ids)
            shares = fair_shares([_text_ahead(generation) for generation in reading], max(budget, 0))
            for generation, share in zip(reading, shares, strict=True):
                if share and self._add(plan, PlannedRows(generation, share)):
                    budget -= share

    def _add(self, plan: Plan, part: PlannedRows) -> bool:
        """Add rows if their pages, beside those of the rows already planned, can be found."""
        needed = self._kv.pages_needed(part.generation, len(part))
        if not self._kv.make_room(plan.pages + needed, part.generation.request.background):
            return False
        plan.add(part, needed)
        return True

    def _preempt(self, generation: Generation) -> Generation:
        """Let the last in order wait again, or fail if it is the only one; return it."""
        if self.running == [generation]:
            generation.fail(
                OutOfMemoryError(
                    "This request alone fills the KV memory. Shorten it, or load the model with more (kv_mib)."
                )
            )
            return generation
        self.preemptions += 1
        self._requeue(generation)
        return generation

    def _requeue(self, generation: Generation) -> None:
        """Let a running one wait again. Its KV goes to the cache, where it stays unless the pages are needed."""
        self.running.remove(generation)
        self._kv.release(generation)
        self._enqueue(generation)

    def _enqueue(self, generation: Generation) -> None:
        insort(self.waiting, generation, key=self._order.__getitem__)


def _text_ahead(generation: Generation) -> int:
    """Pending tokens before the next image or mark."""
    computed = generation.computed
    end = next((mark for mark in generation.marks if mark > computed), len(generation.tokens))
    return min(generation.images.text_end(computed, end), end) - computed
