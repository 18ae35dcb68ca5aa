"""Plans each step: admission, chunked prefill, decode first, fair turns, preemption."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby

from gguf_io.image_rows import ImageRows
from localllm.engine.drafter import Drafter, Wanted
from localllm.engine.generation import Generation
from localllm.engine.inspection import Timeline
from localllm.engine.kv_manager import KVManager
from localllm.engine.runner import Interruptible, Runner
from localllm.engine.step_costs import ChunkSize, StepCosts
from localllm.errors import OutOfMemoryError

# Limit for the logits of a step's scored rows, those of prompts with requested log-probabilities.
SCORED_BYTES = 32 * 2**20
# Prompts get at least this part of a step's rows, as a divisor, however many decode.
LEAST_SHARE = 4
# How long a generation may run while others wait for its slot in the batch.
TURN_S = 2.0
# If its KV may be evicted, a turn is extended by this multiple of the time that recomputing the KV would take.
TURN_PER_PREFILL = 4


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The rows of one generation: `count` pending tokens, then drafts; or the rows of an image, which are not tokens.

    scored: how many of the first rows need log-probabilities.
    """

    generation: Generation
    count: int
    drafts: Sequence[int] = ()
    image: ImageRows | None = None
    scored: int = 0

    def __len__(self) -> int:
        return self.count + len(self.drafts)


@dataclass(slots=True)
class Plan:
    """A batch for Runner.run, in the order in which rows were added. Parts that are images are not among its rows."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    parts: list[PlannedRows] = field(default_factory=list)
    # The rows of run's result that belong to each part: the scored rows, then the last pending token and the drafts;
    # the latter two only once the prompt is complete.
    logits: list[slice] = field(default_factory=list)
    # Pages taken by all parts.
    pages: int = 0
    # decoded, drafted: rows of decoding, and of drafts after them.
    decoded: int = 0
    drafted: int = 0
    # Each part has one pending token.
    decodes: bool = True
    # Some part is an image.
    images: bool = False
    # Seconds in which a model drafted for it.
    drafting_s: float = 0.0
    # Each part's timeline, whether it decodes, and its rows.
    work: list[tuple[Timeline, bool, int]] = field(default_factory=list)
    # This pass changed what the next one can plan, by reading stored KV or by preempting, so the engine must schedule
    # again even if no row was planned.
    again: bool = False
    # The step may take long, because it is interrupted as soon as a request arrives or is cancelled.
    patient: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, part: PlannedRows, pages: int) -> None:
        """Add rows that take `pages` pages, at most once per generation, which must have a runner's sequence."""
        sequence, start = part.generation.sequence, part.generation.sequence.computed
        assert sequence.handle is not None
        self.pages += pages
        self.parts.append(part)
        # A request that was preempted reads its prompt and its answer again: that is prefill.
        decoding = part.generation.generated > 0 and sequence.pending == 1
        self.work.append((part.generation.timeline, decoding, len(part)))
        if part.image is not None:
            self.images = True
            self.logits.append(slice(0, 0))
            return
        self.decoded += part.count if decoding else 0
        self.drafted += len(part.drafts)
        self.decodes = self.decodes and part.count == 1
        rows = [*sequence.tokens[start : start + part.count], *part.drafts]
        self.tokens += rows
        position = sequence.images.position(start)
        self.positions += range(position, position + len(rows))
        self.sequences += [sequence.handle] * len(rows)
        first, end = len(self.tokens) - len(rows), len(self.tokens)
        last = 1 + len(part.drafts) if part.count == sequence.pending else 0
        self.logits.append(slice(len(self.wanted), len(self.wanted) + part.scored + last))
        self.wanted += [*range(first, first + part.scored), *range(end - last, end)]

    @property
    def only_decodes(self) -> bool:
        """Whether each part is a decoding sequence, without drafts."""
        return self.decoded == len(self.parts) and not self.drafted

    def following(self) -> "Plan":
        """After a plan that only decodes: the next token of each of its sequences, without the tokens."""
        return replace(self, tokens=[], positions=[position + 1 for position in self.positions])


def fair_shares(wants: Sequence[int], budget: int) -> list[int]:
    """Share a budget of rows evenly; rows that one does not need go to the others."""
    shares = [0] * len(wants)
    for served, index in enumerate(sorted(range(len(wants)), key=wants.__getitem__)):
        shares[index] = min(wants[index], budget // (len(wants) - served))
        budget -= shares[index]
    return shares


class Scheduler:
    """Admits requests, and plans steps. The engine's thread is the only caller.

    First come, first served within a priority; background requests come last. Simultaneous requests of one client go
    into successive rounds of the queue, so others wait for one of them, not for all (start-time fair queueing).
    """

    # If waiting requests do not fit beside the running ones, the running ones take turns. One that has run for TURN_S
    # and has a new token goes to the end of the queue, so endless answers do not starve others. Its KV goes to the
    # prefix cache, so it resumes for free. Only when memory is short may that KV be evicted; then turns last longer
    # than recomputing it would, so most of the time goes to new tokens. The batch stays full, so turns cost no
    # throughput.

    def __init__(
        self,
        runner: Runner,
        kv: KVManager,
        max_running: int,
        drafter: Drafter | None,
        clock: Callable[[], float],
        chunk: ChunkSize | None,
    ) -> None:
        self._runner = runner
        self._kv = kv
        self._max_running = max_running
        self._clock = clock
        self._arrivals = count()
        self._order: dict[Generation, tuple[bool, int, int, int]] = {}
        self._round = 0  # the latest round that a generation was admitted from
        self._admitted: dict[Generation, tuple[float, int]] = {}  # when, and how many tokens it had generated
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []
        self._drafter = drafter
        self._patient = isinstance(runner, Interruptible) and runner.info.can_interrupt
        self.chunk = chunk or ChunkSize(runner.info.max_rows)
        self.costs = StepCosts() if drafter is None else drafter.costs
        self.preemptions = 0
        self._most_scored = max(SCORED_BYTES // (4 * runner.info.vocab_size), 1)

    def add(self, generation: Generation) -> None:
        """Queue a new generation, or requeue one whose turn is over behind all others."""
        request = generation.request
        rounds = [order[2] for other, order in self._order.items() if other.request.client == request.client != ""]
        place = max([self._round, *rounds]) + 1
        self._order[generation] = (request.background, request.priority, place, next(self._arrivals))
        insort(self.waiting, generation, key=self._order.__getitem__)

    def remove(self, generation: Generation) -> None:
        """Remove a generation that has ended, and release its KV."""
        if generation in self.running:
            self._stop(generation)
        else:
            self.waiting.remove(generation)
        if self._drafter is not None:
            self._drafter.length.ended()
        del self._order[generation]

    def schedule(self) -> Plan:
        """Return the next step's rows; an empty plan if nothing can run now."""
        behind = {each for each in (*self.running, *self.waiting) if each.writer.stream.full}
        self._admit(behind)
        plan = Plan()
        active = [generation for generation in self.running if generation not in behind]
        ready = [generation for generation in active if self._started(generation, behind)]
        if self._kv.restoring:
            for generation in ready:
                plan.again |= self._kv.restore(generation.sequence)
                generation.writer.restore_s = generation.sequence.restore_s
        decoding: list[Generation] = []
        prefilling: list[Generation] = []
        for generation in ready:
            if generation.sequence not in self._kv.restoring:
                (decoding if generation.sequence.pending == 1 else prefilling).append(generation)
        if decoding:
            self._add_decodes(plan, decoding)
        if prefilling:
            self._add_prefills(plan, prefilling)
        if active and not plan.parts and not plan.again:
            self._preempt(plan)
        return plan

    def next_is_known(self, plan: Plan) -> bool:
        """Whether the step after a plan has the same sequences and no drafts, unless one of its tokens changes that."""
        generations = [part.generation for part in plan.parts]
        if not plan.only_decodes or len(generations) < len(self.running):
            return False
        if not all(generation.goes_on for generation in generations):
            return False
        drafts, wanted = self._drafts(generations)
        return not (wanted or any(drafts))

    def observe(self, plan: Plan, seconds: float, accepted: int) -> None:
        """Learn chunk sizes and the cost of speculation from a step's time. Steps with images are ignored.

        seconds: to compute, sample and commit, because drafted rows take their share of each. accepted: drafted tokens.
        """
        if plan.images:
            return
        self.chunk.observe(len(plan), seconds)
        if plan.decodes:
            self.costs.observe(len(plan), seconds)
        if self._drafter is not None and plan.decoded and self.costs.largest:
            plain = self.costs.remembered(plan.decoded)
            if not plan.drafting_s:
                self._drafter.length.stepped(plain)
                return
            read = self._drafter.read_s
            took = self.costs.remembered(plan.decoded + plan.drafted) if plan.drafted else plain
            lost = plan.drafting_s - read + took - plain * (1 + accepted / plan.decoded)
            self._drafter.length.stepped(plain, lost, read)

    def _admit(self, behind: set[Generation]) -> None:
        """Admit waiting requests, in order, while there is room.

        Generations with slow readers, or whose turn is over, make room.
        """
        if not self.waiting:
            return
        waiting = [generation for generation in self.waiting if generation not in behind]
        paused = [generation for generation in self.running if generation in behind]
        for generation in waiting:
            background = generation.request.background
            while paused and (self._all_run or not (background or self._fits(generation))):
                self._requeue(paused.pop())
            if (self._all_run or not self._fits(generation)) and not self._turn_for(generation):
                if background:
                    continue
                break
            self.waiting.remove(generation)
            insort(self.running, generation, key=self._order.__getitem__)
            self._admitted[generation] = self._clock(), generation.generated
            self._round = max(self._round, self._order[generation][2])
        if waiting and not self.running:
            waiting[0].fail(OutOfMemoryError("Cached chats fill the KV memory, and a background request evicts none."))

    @property
    def _all_run(self) -> bool:
        """Whether the batch is full."""
        return len(self.running) >= self._max_running

    def _fits(self, generation: Generation) -> bool:
        """Whether its pages fit beside those of the running ones. Cached prefixes can be evicted for it."""
        if generation.request.background:
            return self._pages(generation) <= self._runner.pages_free()
        return self._fit_together(self.running, generation)

    def _pages(self, generation: Generation) -> int:
        page = self._runner.info.page_size
        return self._runner.info.pages_of((len(generation.sequence.tokens) // page + 2) * page)  # in use, and one more

    def _turn_for(self, generation: Generation) -> bool:
        """Requeue running generations whose turn is over, so that this one fits; False if that is not enough."""
        if generation.request.background:
            return False
        now, rank = self._clock(), self._order[generation][:2]
        short = not self._fits(generation)
        over = [other for other in self.running if self._order[other][:2] >= rank and self._is_over(other, now, short)]
        over.sort(key=lambda other: (self._order[other][:2], -self._admitted[other][0]))
        left = list(self.running)
        ending: list[Generation] = []
        while over and (len(left) >= self._max_running or not self._fit_together(left, generation)):
            ending.append(over.pop())
            left.remove(ending[-1])
        if len(left) >= self._max_running or not self._fit_together(left, generation):
            return False
        for other in ending:
            self._requeue(other, at_the_end=True)
        return True

    def _is_over(self, generation: Generation, now: float, short: bool) -> bool:
        """Whether a running generation's turn is over. short: its KV may be evicted while it waits."""
        since, generated = self._admitted[generation]
        again = self.chunk.seconds(generation.sequence.computed) if short else 0.0
        return generation.generated > generated and now - since >= TURN_S + TURN_PER_PREFILL * again

    def _fit_together(self, others: list[Generation], generation: Generation) -> bool:
        return not others or sum(map(self._pages, [*others, generation])) <= self._runner.info.pages_total

    def _started(self, generation: Generation, behind: set[Generation]) -> bool:
        if generation.sequence.handle is not None:
            return True
        neighbours = [(other.sequence, other not in behind) for other in self.running]
        if not self._kv.start(generation.sequence, neighbours):
            return False
        generation.writer.admitted()
        return True

    def _add_decodes(self, plan: Plan, decoding: list[Generation]) -> None:
        drafts, wanted = self._drafts(decoding)
        if wanted:
            self._guess(plan, decoding, drafts, wanted)
        for generation, draft in zip(decoding, drafts, strict=True):
            if generation.sequence.handle is None:  # preempted for an earlier one in this step
                continue
            room = self._runner.info.max_rows - len(plan) - 1
            if room < 0:
                return
            if draft and self._add(plan, PlannedRows(generation, 1, draft[:room])):
                continue
            while not self._add(plan, PlannedRows(generation, 1)) and self._preempt(plan) is not generation:
                pass

    def _drafts(self, decoding: list[Generation]) -> tuple[list[list[int]], dict[int, Wanted]]:
        """A draft for each generation by prompt lookup; by index, what the drafter shall draft for the others."""
        drafts: list[list[int]] = [[] for _ in decoding]
        wanted: dict[int, Wanted] = {}
        drafter = self._drafter
        can_truncate = self._runner.info.can_truncate
        if not can_truncate or not (drafter or any(each.speculation.knows_more for each in decoding)):
            return drafts, wanted
        others = len(decoding) - 1
        spare = (self.chunk.rows - len(decoding)) // len(decoding)
        limits = [min(spare, generation.most_drafted) for generation in decoding]
        drafts = [
            generation.speculation.look_up(limit, self.costs, others)
            for generation, limit in zip(decoding, limits, strict=True)
        ]
        if drafter is None or not self.costs.is_known(len(decoding)):
            return drafts, wanted
        if not self.costs.is_known(len(decoding) + 1):
            # What a further row costs decides whether drafts pay: it is measured with a guess that costs nothing.
            drafts[0] = drafts[0] or [decoding[0].sequence.tokens[-1]][: limits[0]]
            return drafts, wanted
        for at, (generation, limit) in enumerate(zip(decoding, limits, strict=True)):
            if drafts[at] or limit <= 0:
                continue
            reading_s = drafter.reading_s(generation.sequence)
            count = drafter.length.choose(
                limit, self.costs, drafter.token_s, others, reading_s, generation.generated, drafter.start_s
            )
            if count:
                wanted[at] = Wanted(generation.sequence, drafter.length.least[:count], drafter.length.affordable_s)
        return drafts, wanted

    def _guess(
        self, plan: Plan, decoding: list[Generation], drafts: list[list[int]], wanted: dict[int, Wanted]
    ) -> None:
        """Let the drafter make the drafts that are wanted of it."""
        drafter = self._drafter
        assert drafter is not None
        began = self._clock()
        guesses = drafter.guess([*wanted.values()])
        plan.drafting_s = self._clock() - began
        for at, guess in zip(wanted, guesses, strict=True):
            drafts[at] = [token for token, _ in guess]
            decoding[at].speculation.by_model(drafter.length, [probability for _, probability in guess])
            decoding[at].writer.drafting_s += plan.drafting_s / len(wanted)

    def _add_prefills(self, plan: Plan, prefilling: list[Generation]) -> None:
        alone = len(self.running) + len(self.waiting) == 1
        plan.patient = alone and self._patient and prefilling[0].request.time_limit_s is None
        if plan.patient:
            # An image is added to the step anyway.
            rows = self.chunk.rows_patient(max(self._kv.rows_ahead(prefilling[0].sequence), 1))
        else:
            rows = self.chunk.rows_alone if alone else self.chunk.rows
        # Long drafts may fill the step, for as long as an answer copies text.
        budget = min(max(rows - len(plan), rows // LEAST_SHARE), self._runner.info.max_rows - len(plan))
        scored = 0
        for _, group in groupby(prefilling, key=lambda generation: generation.request.priority):
            reading: list[tuple[Generation, int]] = []  # each with the number of its next rows to score
            wants: list[int] = []
            for generation in [each for each in group if each.sequence.handle is not None]:
                image = generation.sequence.images.at(generation.sequence.computed)
                if image is None:
                    ahead, scores = self._kv.rows_ahead(generation.sequence), generation.unscored
                    reading.append((generation, scores))
                    wants.append(min(ahead, self._most_scored) if scores else ahead)
                elif budget > 0:
                    self._add(plan, PlannedRows(generation, len(image.ids), image=image))
                    budget -= len(image.ids)
            for (generation, scores), share in zip(reading, fair_shares(wants, max(budget, 0)), strict=True):
                rows = min(share, self._most_scored - scored) if scores else share
                if rows and self._add(plan, PlannedRows(generation, rows, scored=min(scores, rows))):
                    budget -= rows
                    scored += rows if scores else 0

    def _add(self, plan: Plan, part: PlannedRows) -> bool:
        """Add rows if there are pages for them beside the rows already planned; return whether there are."""
        pages = self._kv.make_room(part.generation.sequence, len(part), plan.pages)
        if pages is None:
            return False
        plan.add(part, pages)
        return True

    def _preempt(self, plan: Plan) -> Generation:
        """Requeue the last running generation, or fail it if it is the only one; return it."""
        plan.again = True
        generation = self.running[-1]
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

    def _requeue(self, generation: Generation, at_the_end: bool = False) -> None:
        """Move a running generation back to its old place in the queue, or behind all of its priority."""
        self._stop(generation)
        if at_the_end:
            self.add(generation)
        else:
            insort(self.waiting, generation, key=self._order.__getitem__)

    def _stop(self, generation: Generation) -> None:
        """Remove a generation from the running ones. Its KV stays in the cache until the pages are needed."""
        self._kv.release(generation.sequence)
        if self._drafter is not None:
            self._drafter.forget(generation.sequence)
        self.running.remove(generation)  # last: if the runner fails above, its reader still gets the error
        del self._admitted[generation]
