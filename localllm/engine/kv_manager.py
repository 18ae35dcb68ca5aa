"""Finds and stores each sequence's KV: prefix cache, other running sequences, copies, disk, free pages."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from gguf_io.image_rows import ImageSpans
from localllm.engine.disk_cache import SEGMENT_TOKENS, DiskCache, Segment
from localllm.engine.memory_tier import MemorySegment, MemoryTier
from localllm.engine.prefix_cache import PrefixCache, common_prefix
from localllm.engine.restore_costs import DISK, MEMORY, RestoreCosts
from localllm.engine.runner import KeepsStates, KeepsWindows, RecomputesImages, Runner, reusable
from localllm.engine.sequence import KeySpace, TokenSequence
from localllm.engine.spill import LEAST_TOKENS, Spiller, told
from localllm.engine.state_cache import StateCache, mark_places

log = logging.getLogger(__name__)

# Restoring fewer tokens than this does not pay.
LEAST_RESTORED = 16
# Segments that are read from the disk ahead of the one that is imported, and the threads that read them.
READ_AHEAD, READERS = 3, 2


@dataclass(slots=True)
class _Restore:
    """Segments of one tier that a sequence still has to import, the first next.

    reads: of the first segments on disk, in order. tokens, seconds: imported so far, and the time that took.
    """

    segments: "deque[MemorySegment | Segment]"
    last_state: Segment | None
    reads: "deque[Future[memoryview | None]]" = field(default_factory=deque)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tier(self) -> str:
        return DISK if isinstance(self.segments[0], Segment) else MEMORY


@dataclass(frozen=True, slots=True)
class _Stored:
    """Segments of one tier that match a prompt. pays: whether restoring them is faster than computing."""

    tier: str
    segments: Sequence[MemorySegment] | Sequence[Segment]
    pays: bool = True

    @property
    def useful(self) -> int:
        """Tokens of the prompt that are stored."""
        return self.segments[-1].useful

    def after(self, computed: int) -> "deque[MemorySegment | Segment]":
        """The segments to import if that many tokens are there; the first may begin before their end."""
        return deque(segment for segment in self.segments if segment.stop > computed)


class KVManager:
    """Attaches runner sequences to token sequences and takes them back. The engine's thread is the only caller.

    kept_sequences limits the cached prefixes, so running generations always find a free handle. background_pages are
    kept free of cached chats for background requests, which may not evict any. wake_engine is called when the disk tier
    can take more. clock: in seconds. costs: decides whether restoring pays; None restores whatever is stored.
    pinned_share: of each kind of memory, for what requests pin.
    """

    def __init__(
        self,
        runner: Runner,
        kept_sequences: int,
        background_pages: int,
        disk: DiskCache | None,
        wake_engine: Callable[[], None],
        clock: Callable[[], float],
        costs: RestoreCosts | None = None,
        pinned_share: float = 0.0,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._costs = costs
        self._can_truncate = runner.info.can_truncate
        self._kept_sequences = kept_sequences
        self._background_pages = background_pages
        self._wake_engine = wake_engine
        self.disks: dict[KeySpace, DiskCache] = {}  # empty without a disk tier
        if disk is not None:
            self.disks[KeySpace()] = disk if self._can_truncate else disk.of_states()
            disk.digest.when_known(wake_engine)
        self.restoring: dict[TokenSequence, _Restore] = {}  # to import before their next rows
        self._readers: ThreadPoolExecutor | None = None  # made for the first segment on disk
        self._marks: dict[TokenSequence, list[int]] = {}  # where steps must end, so that states can be kept
        self._windows: dict[TokenSequence, list[int]] = {}  # where windows are to be kept
        info = runner.info
        self.most_pinned = int(pinned_share * info.pages_total) * info.page_size
        states = math.ceil(pinned_share * info.max_sequences / 2)
        self.cache: PrefixCache | StateCache = (
            PrefixCache(runner, self.most_pinned, clock) if self._can_truncate else StateCache(runner, states, clock)
        )
        limit = info.copies_bytes if self._can_truncate else 0
        self.copies = MemoryTier(limit, pinned_share * limit, clock) if limit else None
        self.spiller: Spiller | None = None  # made for the first prefix
        self._failed = False

    def start(self, sequence: TokenSequence, neighbours: Iterable[tuple[TokenSequence, bool]]) -> bool:
        """Attach the longest known prefix; False if a running sequence is about to compute a longer one.

        Waiting for that sequence computes the common part once. neighbours: the running sequences, and whether each is
        making progress. The last token is never reused, because its logits are needed; `reusable` may exclude more.
        """
        tokens = sequence.reusable_tokens
        cached, computed, source, coming = self._in_memory(sequence, neighbours)
        if coming - computed >= self._runner.info.page_size:
            return False
        stored = self._stored(sequence, computed)
        if self.copies:
            self.copies.touch(sequence.space, tokens)
        if stored and not stored.pays:
            assert self._costs is not None
            self._costs.passed_over(stored.tier)
            sequence.recomputed = max(sequence.recomputed, stored.useful - computed)
        elif stored:
            ahead = stored.after(computed)
            self.restoring[sequence] = restore = _Restore(ahead, self._last_state(stored.segments))
            self._read_ahead(restore)
            computed = min(computed, ahead[0].start)
        if computed == 0:
            handle = self._runner.create_sequence(sequence.space.adapters)
        elif source is None or computed <= cached:
            handle = self.cache.fork(sequence.space, tokens, computed)
        else:
            handle = self._runner.fork_sequence(source, computed)
        sequence.attach(handle, computed)
        self._tell_images(handle, sequence.images)
        if self._runner.info.window_tokens and not sequence.background:
            branch = self.cache.match(sequence.space, tokens)
            ends = (sequence.shared_prefix, *(pin.tokens for pin in sequence.pins))
            whole = (end // SEGMENT_TOKENS * SEGMENT_TOKENS for end in ends)
            self._windows[sequence] = sorted({branch, *ends, *whole, len(sequence.tokens)})
        if not self._can_truncate and not sequence.background:
            self._marks[sequence] = mark_places(
                len(sequence.tokens), (sequence.shared_prefix, *(pin.tokens for pin in sequence.pins))
            )
        if self.copies and isinstance(self.cache, PrefixCache):
            self.cache.release_where(self.copies.holds)
        return True

    def expected(
        self, sequence: TokenSequence, neighbours: Iterable[tuple[TokenSequence, bool]]
    ) -> tuple[int, int, int]:
        """Tokens that `start` would reuse from memory and restore from the disk, and stored ones to be computed.

        Nothing changes. What running sequences are about to compute counts as computed.
        """
        _, computed, _, coming = self._in_memory(sequence, neighbours)
        known = max(computed, coming)
        stored = self._stored(sequence, known)
        if stored is None or not stored.pays:
            return known, 0, stored.useful - known if stored else 0
        if stored.tier == MEMORY:
            return stored.useful, 0, 0
        kept = min(known, stored.after(known)[0].start)
        return kept, stored.useful - kept, 0

    def _in_memory(
        self, sequence: TokenSequence, neighbours: Iterable[tuple[TokenSequence, bool]]
    ) -> tuple[int, int, int | None, int]:
        """What a prompt finds in memory: (cached, computed, source, coming).

        cached: tokens in the prefix cache. computed: these, or those of the running sequence `source`, if it has more.
        coming: tokens that a running sequence is about to have.
        """
        tokens = sequence.reusable_tokens
        cached = _continuable(sequence.images, len(tokens), lambda end: self.cache.usable(sequence.space, tokens[:end]))
        source, computed, coming = None, cached, cached
        for other, goes_on in neighbours:
            if other.handle is None or not self._can_truncate or other.space != sequence.space:
                continue
            common = sequence.images.whole(common_prefix(tokens, other.tokens[:-1]))
            coming = max(coming, common if goes_on and other.computed < common else 0)
            usable = partial(reusable, self._runner, other.handle)
            known = _continuable(sequence.images, min(common, other.computed), usable)
            if known > computed:
                source, computed = other.handle, known
        return cached, computed, source, coming

    def restore(self, sequence: TokenSequence) -> bool:
        """Import one segment, if the sequence has one; return whether it had. Unreadable segments are recomputed.

        The next ones are read from the disk meanwhile. After an unexpected error the sequence is computed from its
        first token; the first such error is logged.
        """
        restore = self.restoring.pop(sequence, None)
        if restore is None:
            return False
        began, before = self._clock(), sequence.computed
        tier, segment = restore.tier, restore.segments[0]
        if self.make_room(sequence, segment.stop - segment.start) is not None:
            try:
                self._import(sequence, restore)
            except Exception as error:  # copies only save time
                self._note_failure("restored", error)
                assert sequence.handle is not None
                self._runner.free_sequence(sequence.handle)
                sequence.start_over(handle := self._runner.create_sequence(sequence.space.adapters))
                self._tell_images(handle, sequence.images)
                return True
        if sequence not in self.restoring:
            self._cut_to_usable(sequence)
        seconds = self._clock() - began
        sequence.restore_s += seconds
        restore.seconds += seconds
        restore.tokens += max(sequence.computed - before, 0)
        if sequence not in self.restoring and self._costs is not None:
            self._costs.observe(tier, restore.tokens, restore.seconds)
        return True

    def _cut_to_usable(self, sequence: TokenSequence) -> None:
        """Truncate a restored sequence to where it can be continued, not within an image."""
        assert sequence.handle is not None
        length = _continuable(sequence.images, sequence.computed, partial(reusable, self._runner, sequence.handle))
        if length < sequence.computed:
            self._runner.truncate_sequence(sequence.handle, length)
            sequence.restored(length, from_disk=True)

    def _import(self, sequence: TokenSequence, restore: _Restore) -> None:
        """Import the first segment if it can be read and fits, and schedule the others."""
        segment, handle = restore.segments.popleft(), sequence.handle
        assert handle is not None
        data = segment.kv if isinstance(segment, MemorySegment) else restore.reads.popleft().result()
        if data is None:
            return
        self._read_ahead(restore)
        try:
            self._runner.import_kv(handle, segment.start, segment.stop, data)
        except ValueError as error:
            log.warning("Computing tokens %d to %d again: %s", segment.start, segment.stop, error)
            return
        if segment is restore.last_state:
            self.make_room(sequence, self._runner.info.window_tokens)
            self._import_state(handle, segment)
        if segment.useful < segment.stop:
            self._runner.truncate_sequence(handle, segment.useful)
        sequence.restored(segment.useful, from_disk=isinstance(segment, Segment))
        if restore.segments:
            self.restoring[sequence] = restore

    def _read_ahead(self, restore: _Restore) -> None:
        """Let other threads read the next segments from the disk."""
        while len(restore.reads) < min(READ_AHEAD, len(restore.segments)):
            segment = restore.segments[len(restore.reads)]
            if not isinstance(segment, Segment):
                return
            self._readers = self._readers or ThreadPoolExecutor(READERS, "kv-reader")
            restore.reads.append(self._readers.submit(self.disks[KeySpace()].load, segment))

    def rows_ahead(self, sequence: TokenSequence) -> int:
        """Pending tokens before the next image, or before the next mark where the state is kept."""
        computed, end = sequence.computed, len(sequence.tokens)
        end = next((mark for mark in self._marks.get(sequence, ()) if mark > computed), end)
        return sequence.images.text_end(computed, end) - computed

    def advance(self, sequence: TokenSequence, rows: int) -> None:
        """Record that rows were computed, and keep a copy of the state if the sequence has reached a mark."""
        sequence.computed += rows
        for length in self._windows.get(sequence, ()):
            if sequence.computed - rows < length <= sequence.computed:
                assert sequence.handle is not None and isinstance(self._runner, KeepsWindows)
                self._runner.keep_window(sequence.handle, length)
        if sequence.computed not in self._marks.get(sequence, ()):
            return
        assert sequence.handle is not None
        while len(self.cache) >= self._kept_sequences:
            self.cache.drop_oldest()
        self._keep(sequence, self._runner.fork_sequence(sequence.handle, sequence.computed))

    def cut(self, sequence: TokenSequence, length: int) -> None:
        """Truncate the computed rows to `length`, if there are more."""
        if sequence.computed > length:
            assert sequence.handle is not None
            self._runner.truncate_sequence(sequence.handle, length)
            sequence.computed = length

    def make_room(self, sequence: TokenSequence, rows: int, planned: int = 0) -> int | None:
        """Evict until rows can be appended to a sequence; return the pages they take, None if that is impossible.

        planned: pages that other rows of the step take.
        """
        assert sequence.handle is not None
        needed = self._runner.pages_needed(sequence.handle, rows)
        while (free := self._runner.pages_free()) < planned + needed:
            if sequence.background or not self.cache.evict(planned + needed - free):
                return None
        return needed

    def release(self, sequence: TokenSequence) -> None:
        """Move the runner's sequence into the cache, or free it after a background request."""
        handle = self._detached(sequence)
        if handle is None:
            return
        if sequence.background:
            self._runner.free_sequence(handle)
            return
        self._keep(sequence, handle)
        while len(self.cache) > self._kept_sequences:
            self.cache.drop_oldest()
        while self._runner.pages_free() < self._background_pages and len(self.cache) > 1:
            self.cache.evict(self._background_pages - self._runner.pages_free())

    def discard(self, sequence: TokenSequence) -> None:
        """Free the runner's sequence without caching its KV."""
        if (handle := self._detached(sequence)) is not None:
            self._runner.free_sequence(handle)

    def close(self, finish: bool, release: Callable[[], None]) -> None:
        """End the disk tier's threads; if `finish`, export and write everything that waits first.

        release: called when nothing more is read from the runner, and always.
        """
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
        if self._costs is not None:
            self._costs.keep()
        if self.spiller is not None:
            self.spiller.close(finish, release)
        else:
            release()
        for disk in self.disks.values():
            disk.digest.stop()

    def _stored(self, sequence: TokenSequence, computed: int) -> _Stored | None:
        """The stored segments that save most: copies in main memory, or on disk; None if they save hardly a token.

        computed: tokens that are there already. Without costs, those that match the most tokens, copies first.
        """
        tokens = sequence.reusable_tokens
        if len(tokens) - computed < LEAST_RESTORED:
            return None
        try:
            found = self._found(sequence, tokens)
        except Exception as error:
            self._note_failure("looked up", error)
            return None
        gains = [one for one in found if one.useful - computed >= LEAST_RESTORED]
        costs = self._costs
        if costs is None or not gains:
            return max(gains, key=lambda one: one.useful, default=None)
        best = max(gains, key=lambda one: costs.saved_s(one.tier, one.useful - computed))
        return replace(best, pays=costs.pays(best.tier, best.useful - computed))

    def _found(self, sequence: TokenSequence, tokens: list[int]) -> list[_Stored]:
        """The segments of each tier that match the most tokens."""
        copies = self.copies.find(sequence.space, tokens) if self.copies else []
        disk = self._disk_of(sequence)
        stored = disk.find(tokens) if disk and not (copies and copies[-1].useful == len(tokens)) else []
        if self._runner.info.window_tokens:  # nothing after the last window can be continued
            ends = [at for at, one in enumerate(stored, 1) if one.state_bytes and one.useful == one.stop]
            stored = stored[: ends[-1]] if ends else []
        return [_Stored(tier, one) for tier, one in ((MEMORY, copies), (DISK, stored)) if one]

    def _last_state(self, segments: Sequence[MemorySegment | Segment]) -> Segment | None:
        """The last segment with a state from which the end of the useful tokens can be reached."""
        page = self._runner.info.page_size
        end = -(-segments[-1].useful // page) * page
        known = (one for one in reversed(segments) if isinstance(one, Segment) and one.state_bytes and one.stop <= end)
        return next(known, None)

    def _import_state(self, handle: int, segment: Segment) -> None:
        """Import the state after a segment. Without it, the runner computes rows since the last known state again."""
        assert isinstance(self._runner, KeepsStates)
        if (state := self.disks[KeySpace()].load_state(segment)) is None:
            return
        try:
            self._runner.import_state(handle, state)
        except ValueError as error:
            log.warning("Computing the state after %d tokens again: %s", segment.stop, error)

    def _note_failure(self, what: str, error: Exception) -> None:
        """Log the first failure of copies."""
        if not self._failed:
            log.warning("Copies of keys and values could not be %s: %s. They are computed again.", what, told(error))
        self._failed = True

    def _detached(self, sequence: TokenSequence) -> int | None:
        self.restoring.pop(sequence, None)
        self._marks.pop(sequence, None)
        self._windows.pop(sequence, None)
        handle, sequence.handle = sequence.handle, None
        if handle is not None and sequence.images:
            self._tell_images(handle, None)
        return handle

    def _tell_images(self, handle: int, images: ImageSpans | None) -> None:
        if isinstance(self._runner, RecomputesImages) and (images or images is None):
            self._runner.know_images(handle, images)

    def _keep(self, sequence: TokenSequence, handle: int) -> None:
        """Put a runner's sequence of all computed tokens into the cache, and schedule copying it."""
        tokens = sequence.tokens[: sequence.computed]
        self.cache.insert(sequence.space, tokens, handle)
        shared_prefix = sequence.shared_prefix if sequence.shared_prefix <= len(tokens) else 0
        if shared_prefix:
            self.cache.pin(sequence.space, tokens[:shared_prefix])
        pins = [pin for pin in sequence.pins if pin.tokens <= len(tokens)]
        for pin in pins:
            self.cache.keep(sequence.space, tokens[: pin.tokens], pin)
        text = len(tokens) if self._runner.info.stores_images else sequence.images.text_end(0, len(tokens))
        disk = self._disk_of(sequence) if sequence.persist and text >= LEAST_TOKENS else None
        if disk or self.copies:
            if self.spiller is None:
                self.spiller = Spiller(self._runner, self.cache, self.copies, self._wake_engine)
            self.spiller.later(sequence.space, tokens[:text], disk, min(shared_prefix, text), pins)

    def _disk_of(self, sequence: TokenSequence) -> DiskCache | None:
        """The disk tier for a sequence's KV, separate for each key space; None without one."""
        if not self.disks:
            return None
        if (found := self.disks.get(sequence.space)) is None:
            files = self._runner.info.adapter_files
            adapters = [(files[number], weight) for number, weight in sequence.space.adapters]
            found = self.disks[KeySpace()].apart(sequence.space.namespace, adapters)
            found.digest.when_known(self._wake_engine)
            self.disks[sequence.space] = found
        return found


def _continuable(images: ImageSpans, length: int, usable: Callable[[int], int]) -> int:
    """The most of `length` tokens after which a sequence can be continued, not within an image.

    usable: after how many of a number of tokens their keys, values and windows allow it.
    """
    while True:
        found = usable(length)
        length = images.whole(found)
        if length == found:
            return length
