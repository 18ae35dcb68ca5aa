"""Copies cached prefixes to main memory and to the disk in the background, a segment at a time."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpu_kernels.limits import available_memory
from localllm.engine.disk_cache import SEGMENT_TOKENS, STATE_TOKENS, DiskCache
from localllm.engine.memory_tier import MemoryTier
from localllm.engine.pins import Pin
from localllm.engine.prefix_cache import PrefixCache
from localllm.engine.runner import KeepsStates, Runner
from localllm.engine.sequence import KeySpace
from localllm.engine.state_cache import StateCache

log = logging.getLogger(__name__)

# Fewer tokens than this are not worth a file, or a copy in main memory.
LEAST_TOKENS, LEAST_COPIED = 64, 16
# Maximum prefixes in each queue, such as the one that waits for the model files' digest; the oldest are dropped.
MOST_WAITING = 1024
# How long closing waits for that digest, without which nothing can be written.
DIGEST_S = 2.0
# Segments that may wait for the disk while requests run.
MOST_QUEUED = 2
# Bytes that may wait for it once the engine closes, as a part of the free memory, and at most. The runner's memory is
# free as soon as everything has been exported.
CLOSING_SHARE, CLOSING_BYTES = 4, 1 << 30


def told(error: Exception) -> str:
    """An unexpected error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())


@dataclass(slots=True)
class _Prefix:
    """A prefix to copy to main memory, and to `disk` unless None.

    shared_prefix: how many of its first tokens others share. pins: the request's. segments: still to be
    exported, each (start, stop, goes to main memory, goes to the disk); None until looked up.
    """

    space: KeySpace
    tokens: list[int]
    disk: DiskCache | None
    shared_prefix: int
    pins: Sequence[Pin]
    segments: deque[tuple[int, int, bool, bool]] | None = None


@dataclass(frozen=True, slots=True)
class _Write:
    """A segment of KV to write, tokens[start:], with the state after it.

    Without `kv`, what to pin: for a request if there is a `pin`, else a shared prefix.
    """

    disk: DiskCache
    tokens: list[int]
    start: int = 0
    kv: bytes | None = None
    state: bytes = b""
    pin: Pin | None = None

    @property
    def size(self) -> int:
        return len(self.kv or b"") + len(self.state)


class Spiller:
    """Exports cached prefixes on the engine's thread, copies them, and writes them to the disk on another thread.

    Skips prefixes that are evicted before their turn. copies: None for runners without copies.
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
        self._failed = False
        self._prefixes: deque[_Prefix] = deque(maxlen=MOST_WAITING)
        self._undigested: deque[_Prefix] = deque(maxlen=MOST_WAITING)
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._room = threading.Condition()  # guards the number of bytes that wait to be written
        self._bytes = 0
        self._digest_due = 0.0  # until when writing waits for a digest; it is known while requests run
        self._thread = threading.Thread(target=self._write, name="kv-writer", daemon=True)
        self._thread.start()

    def later(
        self,
        space: KeySpace,
        tokens: Sequence[int],
        disk: DiskCache | None,
        shared_prefix: int = 0,
        pins: Sequence[Pin] = (),
    ) -> None:
        """Queue a prefix to be copied, and written to `disk` unless None, with its first `shared_prefix` tokens pinned.

        disk: None for fewer than LEAST_TOKENS tokens.
        """
        if disk is not None and not disk.enabled:
            disk = None
        if disk is not None and not disk.ready:
            self._undigested.append(_Prefix(space, list(tokens), disk, shared_prefix, pins))
            disk = None
        if disk is not None or (self._copies is not None and len(tokens) >= LEAST_COPIED):
            self._prefixes.append(_Prefix(space, list(tokens), disk, shared_prefix, pins))

    @property
    def waits(self) -> bool:
        """Whether prefixes are still to be exported."""
        return bool(self._prefixes or self._undigested)

    def spill(self, wait: bool = False) -> bool:
        """Export one segment; False if there is none, or if the writer is behind and `wait` is False.

        A prefix whose export fails is not copied. The first failure is logged.
        """
        while self._undigested and (self._undigested[0].disk is None or self._undigested[0].disk.ready):
            self._prefixes.append(self._undigested.popleft())
        while self._prefixes:
            prefix = self._prefixes[0]
            try:
                segments = self._due(prefix)
                if not segments:
                    self._pin(self._prefixes.popleft())
                    continue
                if self._writes.qsize() >= MOST_QUEUED and not wait:
                    return False
                if self._export(prefix, *segments.popleft()):
                    return True
            except Exception as error:  # an answer needs no copies
                if not self._failed:
                    log.warning("Keys and values could not be copied: %s. Answers go on without copies.", told(error))
                self._failed = True
            self._prefixes.popleft()
        return False

    def _export(self, prefix: _Prefix, start: int, stop: int, copied: bool, written: bool) -> bool:
        """Export a segment to where it goes; False if its prefix was evicted."""
        sequence = self._cache.holder(prefix.space, prefix.tokens[:stop])
        if sequence is None:
            return False
        kv = self._runner.export_kv(sequence, start, stop)
        state = self._state(prefix, sequence, stop) if written else b""
        if copied and self._copies is not None:
            self._copies.store(prefix.space, prefix.tokens[:stop], start, kv)
        if written and prefix.disk is not None:
            self._put(_Write(prefix.disk, prefix.tokens[:stop], start, kv, state))
        return True

    def _put(self, write: _Write) -> None:
        """Hand a segment to the writer, once so many bytes may wait for it."""
        most = min(CLOSING_BYTES, available_memory() // CLOSING_SHARE)
        with self._room:
            self._room.wait_for(lambda: not self._bytes or self._bytes + write.size <= most)
            self._bytes += write.size
        self._writes.put(write)

    def close(self, finish: bool, release: Callable[[], None]) -> None:
        """Finish all disk writes, of what is exported or, if `finish`, of everything that waits; end the thread.

        release: called when nothing more is read from the runner, before the disk has everything.
        """
        self._copies = None
        if not finish:
            self._prefixes.clear()
            self._undigested.clear()
        # Until the digest is known, every segment counts as missing.
        self._prefixes.extend(self._undigested)
        self._undigested.clear()
        self._digest_due = time.monotonic() + DIGEST_S
        try:
            while self.spill(wait=True):
                pass
            release()
        finally:
            self._writes.put(None)
            self._thread.join()

    def _state(self, prefix: _Prefix, sequence: int, stop: int) -> bytes:
        """The state to store after a segment, at ends and at STATE_TOKENS' divisors and multiples; else empty."""
        pinned = (prefix.shared_prefix, *(pin.tokens for pin in prefix.pins))
        ends = len(prefix.tokens), *(length // SEGMENT_TOKENS * SEGMENT_TOKENS for length in pinned)
        between = stop % STATE_TOKENS == 0 or STATE_TOKENS % stop == 0
        if isinstance(self._runner, KeepsStates) and (between or stop in ends):
            return self._runner.export_state(sequence, stop)
        return b""

    def _pin(self, prefix: _Prefix) -> None:
        """Pin the shared prefix of a prefix that has been exported, and what its request pinned."""
        shared_prefix = prefix.tokens[: prefix.shared_prefix]
        if self._copies is not None:
            if shared_prefix:
                self._copies.pin(prefix.space, shared_prefix)
            for pin in prefix.pins:
                self._copies.keep(prefix.space, prefix.tokens[: pin.tokens], pin)
        if prefix.disk is not None:
            if shared_prefix:
                self._writes.put(_Write(prefix.disk, shared_prefix))
            for pin in prefix.pins:
                self._writes.put(_Write(prefix.disk, prefix.tokens[: pin.tokens], pin=pin))

    def _due(self, prefix: _Prefix) -> deque[tuple[int, int, bool, bool]]:
        """The segments of a prefix still to be exported; looked up when its turn comes."""
        copies = self._copies if len(prefix.tokens) >= LEAST_COPIED else None
        disk = prefix.disk if prefix.disk is not None and prefix.disk.enabled else None
        if prefix.segments is None:
            copied = set(copies.missing(prefix.space, prefix.tokens)) if copies is not None else set()
            written = set(disk.missing(prefix.tokens)) if disk is not None else set()
            prefix.segments = deque((*one, one in copied, one in written) for one in sorted(copied | written))
        wanted = (one for one in prefix.segments if (one[2] and copies is not None) or (one[3] and disk is not None))
        prefix.segments = deque(wanted)
        return prefix.segments

    def _write(self) -> None:
        while (write := self._writes.get()) is not None:
            try:
                if not write.disk.ready:
                    write.disk.digest.wait(max(self._digest_due - time.monotonic(), 0.0))
                if write.kv is not None:
                    write.disk.store(write.tokens, write.start, write.kv, write.state)
                elif write.pin is not None:
                    write.disk.keep(write.tokens, write.pin)
                else:
                    write.disk.pin(write.tokens)
            except Exception:  # such as MemoryError; without this thread, close would wait forever
                log.exception("A KV segment was not written")
            with self._room:
                self._bytes -= write.size
                self._room.notify()
            self._wake_engine()
