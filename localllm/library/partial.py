"""A file that is on its way: written in any order, and known to be so after a kill -9 or a power cut.

    <key>.part    the bytes, at their final places, with holes where they are missing
    <key>.json    which chunks are whole; written after the bytes have reached the disk

Nobody takes them for models: they have a folder of their own, and are renamed out of it when the digest is right.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localllm.files import sync_folder, write_whole

CHUNK_BYTES = 8 << 20
CHECKPOINT_S = 1.0
_PIECE_BYTES = 1 << 20


class PartialFile:
    """One file of known size. Thread-safe but for opening and closing.

    validator: what says that the bytes are those of before, a digest or a server's ETag; another one starts anew, and
    so does an empty one. Only one process may have it open: see `pull`.
    """

    def __init__(self, folder: Path, key: str, size: int, validator: str) -> None:
        self.size = size
        self._validator = validator
        self._path = folder / f"{key}.part"
        self._state = folder / f"{key}.json"
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._saved_at = time.monotonic()
        self._hash = hashlib.sha256()
        self._hashed_chunks = 0
        self._chunks = -(-size // CHUNK_BYTES)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._done = self._known_chunks()
        if not self._done:
            os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, size)

    def missing(self) -> list[int]:
        """The chunks that are not whole, in order."""
        return [chunk for chunk in range(self._chunks) if chunk not in self._done]

    def span(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk and the one after its last."""
        start = chunk * CHUNK_BYTES
        return start, min(start + CHUNK_BYTES, self.size)

    def bytes_done(self) -> int:
        """Bytes in whole chunks."""
        with self._lock:
            return sum(stop - start for start, stop in map(self.span, self._done))

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes in their place. Raises OSError, and ValueError after close."""
        with self._lock:
            if self._fd < 0:
                raise ValueError("the partial file is closed")
            view = memoryview(data)
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count

    def finish(self, chunk: int) -> None:
        """Count a chunk as whole; now and then this is made to last."""
        with self._lock:
            self._done.add(chunk)
        if time.monotonic() - self._saved_at > CHECKPOINT_S:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make what is done so far survive anything: first the bytes, then the note of them."""
        with self._saving:
            if self._fd < 0:
                return
            with self._lock:
                done = sorted(self._done)
            os.fsync(self._fd)  # others go on writing meanwhile
            note = {"size": self.size, "chunk": CHUNK_BYTES, "validator": self._validator, "done": done}
            write_whole(self._state, json.dumps(note).encode())
            self._saved_at = time.monotonic()

    def hash_more(self) -> bool:
        """Hash the next chunk if it is there; false if it is not. For one thread only."""
        with self._lock:
            if self._hashed_chunks not in self._done:
                return False
        start, stop = self.span(self._hashed_chunks)
        while start < stop:
            piece = os.pread(self._fd, min(_PIECE_BYTES, stop - start), start)
            self._hash.update(piece)
            start += len(piece)
        self._hashed_chunks += 1
        return True

    def digest(self, progress: Callable[[], None]) -> str:
        """sha256:<hex> of the whole file, whose chunks must all be there. progress is called between chunks."""
        while self.hash_more():
            progress()
        if self._hashed_chunks != self._chunks:
            raise ValueError("chunks are missing")
        return f"sha256:{self._hash.hexdigest()}"

    def keep_as(self, target: Path) -> None:
        """Give the whole file its place, so that it is there in full or not at all even after a power cut."""
        os.fsync(self._fd)
        os.replace(self._path, target)
        sync_folder(target.parent)
        self._state.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove all of it."""
        self._path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def close(self) -> None:
        """Later writes fail. Idempotent."""
        with self._saving, self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _known_chunks(self) -> set[int]:
        note = read_note(self._state)
        told = (note.get("size"), note.get("chunk"), note.get("validator"))
        if not self._validator or told != (self.size, CHUNK_BYTES, self._validator):
            return set()
        if os.fstat(self._fd).st_size != self.size:
            return set()
        return {chunk for chunk in note.get("done", []) if type(chunk) is int and 0 <= chunk < self._chunks}


def read_note(path: Path) -> dict[str, Any]:
    """What a note says; empty for one that is missing or damaged, which costs no more than a download."""
    try:
        note = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def bytes_noted(folder: Path, key: str) -> int:
    """About how many bytes another process has downloaded."""
    note = read_note(folder / f"{key}.json")
    done = note.get("done")
    return min(len(done) * CHUNK_BYTES, int(note.get("size", 0))) if isinstance(done, list) else 0
