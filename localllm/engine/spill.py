"""From the prefix cache to the disk, behind everybody's back: a segment at a time, after the answer is out."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from localllm.engine.disk_cache import DiskCache
from localllm.engine.prefix_cache import PrefixCache
from localllm.engine.runner import Runner
from localllm.engine.state_cache import StateCache

# Prefilling less than this is not worth a file.
LEAST_TOKENS = 64


class Spiller:
    """Copies kept prefixes out of the runner on the engine's thread and has another thread write them.

    What has been evicted before its turn comes is not written.
    """

    def __init__(self, runner: Runner, cache: PrefixCache | StateCache, wake_engine: Callable[[], None]) -> None:
        self._runner = runner
        self._cache = cache
        self._wake_engine = wake_engine
        self._prefixes: deque[tuple[list[int], list[int], DiskCache]] = deque()
        self._segments: deque[tuple[int, int]] = deque()
        self._writes: queue.Queue[tuple[DiskCache, list[int], int, bytes] | None] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._write, name="kv-writer", daemon=True)
        self._thread.start()

    def later(self, tokens: Sequence[int], key: Sequence[int], disk: DiskCache) -> None:
        """Remember a prefix that is to be on disk. key is what the prefix cache knows the tokens by."""
        if disk.enabled and len(tokens) >= LEAST_TOKENS:
            self._prefixes.append((list(tokens), list(key), disk))

    def spill(self, wait: bool = False) -> bool:
        """Hand one segment to the writer; False if there is none or, unless told to wait, if the writer is behind."""
        while not self._segments:
            if not self._prefixes:
                return False
            tokens, _, disk = self._prefixes[0]
            self._segments.extend(disk.missing(tokens))
            if not self._segments:
                self._prefixes.popleft()
        if self._writes.full() and not wait:
            return False
        start, stop = self._segments.popleft()
        tokens, key, disk = self._prefixes[0]
        sequence = self._cache.holder(key[:stop])
        if sequence is None or not disk.enabled:
            self._segments.clear()
        else:
            self._writes.put((disk, tokens[:stop], start, self._runner.export_kv(sequence, start, stop)))
        if not self._segments:
            self._prefixes.popleft()
        return True

    def close(self) -> None:
        """Write all that is due, then end the thread."""
        while self.spill(wait=True):
            pass
        self._writes.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (job := self._writes.get()) is not None:
            disk, tokens, start, kv = job
            disk.store(tokens, start, kv)
            self._wake_engine()
