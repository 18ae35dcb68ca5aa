"""From the prefix cache to copies in main memory and to the disk, in the background: a segment at a time."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localllm.engine.disk_cache import DiskCache
from localllm.engine.memory_tier import MemoryTier
from localllm.engine.prefix_cache import PrefixCache
from localllm.engine.runner import Runner
from localllm.engine.state_cache import StateCache

# Prefilling less than this is not worth a file, or a copy in main memory.
LEAST_TOKENS, LEAST_COPIED = 64, 16


@dataclass(slots=True)
class _Prefix:
    """A prefix that is due: its tokens, what the prefix cache knows them by, and where they are to be on disk, if so.

    segments: (start, stop, is copied, goes to the disk) that are still to be exported.
    """

    tokens: list[int]
    key: list[int]
    disk: DiskCache | None
    listed: bool = False
    segments: deque[tuple[int, int, bool, bool]] = field(default_factory=deque)


class Spiller:
    """Exports kept prefixes on the engine's thread, copies them, and has another thread write them to the disk.

    What has been evicted before its turn comes is left out.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache | StateCache,
        copies: MemoryTier | None,
        wake_engine: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._copies = copies
        self._wake_engine = wake_engine
        self._prefixes: deque[_Prefix] = deque()
        self._writes: queue.Queue[tuple[DiskCache, list[int], int, bytes] | None] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._write, name="kv-writer", daemon=True)
        self._thread.start()

    def later(self, tokens: Sequence[int], key: Sequence[int], disk: DiskCache | None) -> None:
        """Remember a prefix that is to be copied, and to be on disk where one is given.

        key is what the prefix cache knows the tokens by.
        """
        if disk is not None and (not disk.enabled or len(tokens) < LEAST_TOKENS):
            disk = None
        if disk is not None or (self._copies is not None and len(tokens) >= LEAST_COPIED):
            self._prefixes.append(_Prefix(list(tokens), list(key), disk))

    def spill(self, wait: bool = False) -> bool:
        """Export one segment; False if there is none or, unless told to wait, if the writer is behind."""
        while self._prefixes and not self._due(self._prefixes[0]):
            self._prefixes.popleft()
        if not self._prefixes or (self._writes.full() and not wait):
            return False
        prefix = self._prefixes[0]
        start, stop, copied, written = prefix.segments.popleft()
        sequence = self._cache.holder(prefix.key[:stop])
        if sequence is None:
            self._prefixes.popleft()
            return True
        kv = self._runner.export_kv(sequence, start, stop)
        if copied and self._copies is not None:
            self._copies.store(prefix.key[:stop], start, kv)
        if written and prefix.disk is not None:
            self._writes.put((prefix.disk, prefix.tokens[:stop], start, kv))
        return True

    def close(self) -> None:
        """Write all that is due, then end the thread."""
        self._copies = None
        while self.spill(wait=True):
            pass
        self._writes.put(None)
        self._thread.join()

    def _due(self, prefix: _Prefix) -> bool:
        """Whether segments of a prefix are still to be exported; finds out which when its turn comes."""
        if prefix.disk is not None and not prefix.disk.enabled:
            prefix.disk = None
        if not prefix.listed:
            prefix.listed = True
            copied = (
                set(self._copies.missing(prefix.key)) if self._copies and len(prefix.key) >= LEAST_COPIED else set()
            )
            written = set(prefix.disk.missing(prefix.tokens)) if prefix.disk else set()
            prefix.segments.extend((*one, one in copied, one in written) for one in sorted(copied | written))
        while prefix.segments and not (prefix.segments[0][3] or self._copies):
            prefix.segments.popleft()
        return bool(prefix.segments)

    def _write(self) -> None:
        while (job := self._writes.get()) is not None:
            disk, tokens, start, kv = job
            disk.store(tokens, start, kv)
            self._wake_engine()
