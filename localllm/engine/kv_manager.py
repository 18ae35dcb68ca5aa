"""Where a generation's KV comes from and where it goes: prefix cache, running neighbours, disk tier, free pages."""

import logging
from collections.abc import Callable, Iterable, Sequence

from localllm.engine.adapters import AdapterSet, marked
from localllm.engine.disk_cache import DiskCache, Segment
from localllm.engine.generation import Generation
from localllm.engine.memory_tier import MemorySegment, MemoryTier
from localllm.engine.prefix_cache import PrefixCache, common_prefix
from localllm.engine.runner import KeepsCopies, Runner
from localllm.engine.spill import Spiller
from localllm.engine.state_cache import StateCache, mark_places

log = logging.getLogger(__name__)

# Restoring fewer tokens than this is not worth it.
LEAST_RESTORED = 16


class KVManager:
    """Hands sequences to generations and takes them back. The engine's thread is the only caller.

    kept_sequences bounds the prefixes kept, so that running generations always find a free handle.
    background_pages are kept free of cached chats for background requests, which may not evict any. wake_engine is
    called when the disk tier can take more; it keeps what was computed with the usual adapters alone.
    """

    def __init__(
        self,
        runner: Runner,
        kept_sequences: int,
        background_pages: int,
        disk: DiskCache | None,
        wake_engine: Callable[[], None],
        adapters: AdapterSet = (),
    ) -> None:
        self._runner = runner
        self._kept_sequences = kept_sequences
        self._background_pages = background_pages
        self._adapters = adapters
        self.cache: PrefixCache | StateCache = PrefixCache(runner) if runner.can_truncate else StateCache(runner)
        self._disk = disk if runner.can_truncate or disk is None else disk.of_states()
        self._disks: dict[str, DiskCache] = {}
        copies = runner.copies_bytes if isinstance(runner, KeepsCopies) and runner.can_truncate else 0
        self.copies = MemoryTier(copies) if copies else None
        self.spiller = Spiller(runner, self.cache, self.copies, wake_engine) if self._disk or self.copies else None

    def start(self, generation: Generation, running: Iterable[Generation]) -> bool:
        """Give the generation the longest prefix known; False if a neighbour is just computing a longer one.

        Waiting for the neighbour computes the common part once. The last token is never reused: its logits are needed.
        """
        tokens = generation.tokens[:-1]
        key = self._key(tokens, generation)
        cached = generation.images.whole(self.cache.match(key))
        source, computed, coming = None, cached, cached
        for other in running:
            if other.sequence is None or not self._runner.can_truncate or not _may_share(other, generation):
                continue
            common = generation.images.whole(common_prefix(tokens, other.tokens[:-1]))
            coming = max(coming, common if not other.stream.full else 0)
            if min(common, other.computed) > computed:
                source, computed = other.sequence, min(common, other.computed)
        if coming - computed >= self._runner.page_size:
            return False
        segments = self._stored(tokens, key, generation) if len(tokens) - computed >= LEAST_RESTORED else []
        if segments and segments[-1].useful - computed >= LEAST_RESTORED:
            generation.restoring = [segment for segment in segments if segment.stop > computed]
            computed = min(computed, generation.restoring[0].start)
        if computed == 0:
            generation.start(self._runner.create_sequence(generation.adapters), 0)
        elif source is None or computed <= cached:
            generation.start(self.cache.fork(key, computed), computed)
        else:
            generation.start(self._runner.fork_sequence(source, computed), computed)
        if not self._runner.can_truncate and not generation.request.background:
            generation.marks = mark_places(len(generation.tokens))
        if self.copies and isinstance(self.cache, PrefixCache):
            self.cache.release_where(self.copies.holds)
        return True

    def _stored(
        self, tokens: list[int], key: list[int], generation: Generation
    ) -> Sequence[MemorySegment] | Sequence[Segment]:
        """The stored segments that follow the tokens furthest: copies in main memory, else those on disk."""
        copies = self.copies.find(key) if self.copies else []
        disk = self._disk_of(generation)
        stored = disk.find(tokens) if disk and not (copies and copies[-1].useful == len(tokens)) else []
        return stored if stored and (not copies or stored[-1].useful > copies[-1].useful) else copies

    def keep_state(self, generation: Generation) -> None:
        """Keep a copy of the state that a generation has reached, if it is at a mark."""
        if generation.computed not in generation.marks:
            return
        assert generation.sequence is not None
        while len(self.cache) >= self._kept_sequences:
            self.cache.drop_oldest()
        self._keep(generation, self._runner.fork_sequence(generation.sequence, generation.computed))

    def restore(self, generation: Generation) -> None:
        """Import one segment from main memory or the disk. What cannot be read will be computed."""
        segment, *generation.restoring = generation.restoring
        sequence, tokens = generation.sequence, segment.stop - segment.start
        assert sequence is not None
        room = self.make_room(self._runner.pages_needed(sequence, tokens), generation.request.background)
        data = self._data(segment) if room else None
        if data is None:
            generation.restoring = []
            return
        try:
            self._runner.import_kv(sequence, segment.start, segment.stop, data)
        except ValueError as error:
            log.warning("Computing tokens %d to %d again: %s", segment.start, segment.stop, error)
            generation.restoring = []
            return
        if segment.useful < segment.stop:
            self._runner.truncate_sequence(sequence, segment.useful)
        generation.restored(segment.useful, from_disk=isinstance(segment, Segment))

    def _data(self, segment: MemorySegment | Segment) -> bytes | None:
        if isinstance(segment, MemorySegment):
            return segment.kv
        assert self._disk is not None
        return self._disk.load(segment)

    def make_room(self, pages: int, background: bool) -> bool:
        """Evict until so many pages are free; False if that cannot be."""
        while (free := self._runner.pages_free()) < pages:
            if background or not self.cache.evict(pages - free):
                return False
        return True

    def pages_needed(self, generation: Generation, rows: int) -> int:
        """Pages that the next rows of a started generation take."""
        assert generation.sequence is not None
        return self._runner.pages_needed(generation.sequence, rows)

    def release(self, generation: Generation) -> None:
        """Take the sequence back: into the cache, or free it where it came from a background request."""
        sequence, generation.sequence = generation.sequence, None
        if sequence is None:
            return
        if generation.request.background:
            self._runner.free_sequence(sequence)
            return
        self._keep(generation, sequence)
        while len(self.cache) > self._kept_sequences:
            self.cache.drop_oldest()
        while self._runner.pages_free() < self._background_pages and len(self.cache) > 1:
            self.cache.evict(self._background_pages - self._runner.pages_free())

    def _keep(self, generation: Generation, sequence: int) -> None:
        """Put a sequence that holds what the generation has computed into the cache, and have it copied."""
        tokens = generation.tokens[: generation.computed]
        key = self._key(tokens, generation)
        self.cache.insert(key, sequence)
        if self.spiller:
            disk = self._disk_of(generation) if generation.request.persist else None
            text = generation.images.text_end(0, len(tokens))  # what stands before images, which are never copied
            self.spiller.later(tokens[:text], key[:text], disk)

    def _key(self, tokens: list[int], generation: Generation) -> list[int]:
        """What the prefix cache knows these tokens by: themselves, under the usual adapters and in no namespace."""
        namespace = generation.request.namespace
        if generation.adapters == self._adapters and not namespace:
            return tokens
        return marked(tokens, generation.adapters, namespace)

    def _disk_of(self, generation: Generation) -> DiskCache | None:
        """Where the generation's KV is kept on disk: each namespace has a part of its own."""
        if self._disk is None or generation.adapters != self._adapters:
            return None
        namespace = generation.request.namespace
        if namespace and namespace not in self._disks:
            self._disks[namespace] = self._disk.apart(namespace)
        return self._disks.get(namespace, self._disk)

    def discard(self, generation: Generation) -> None:
        """Free the sequence, whose KV is not to be used again."""
        sequence, generation.sequence = generation.sequence, None
        if sequence is not None:
            self._runner.free_sequence(sequence)


def _may_share(one: Generation, other: Generation) -> bool:
    """Whether one's keys and values may serve the other."""
    return one.adapters == other.adapters and one.request.namespace == other.request.namespace
