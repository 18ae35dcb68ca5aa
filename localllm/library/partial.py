"""A file that is being downloaded: written in any order, resumable after a kill -9 or a power cut.

    <key>.part    the bytes, at their final offsets, with holes where they are missing
    <key>.json    the progress of each chunk; written after the bytes have reached the disk

Partial files have a folder of their own and are renamed out of it when the digest matches.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf_io.system import bytes_at, open_own, read_file, replace, sync_file, sync_folder, write_at
from localllm.files import write_whole

CHUNK_BYTES = 8 << 20
CHECKPOINT_S = 1.0
_PIECE_BYTES = 1 << 20


class PartialFile:
    """One file of known size, in chunks that are each filled from the start. Thread-safe except for open and close.

    validator: identifies the content, a digest or a server's ETag; if it differs or is empty, the download starts over.
    Only one process may have the file open: see `pull`.
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
        self._fd = open_own(self._path, new=False)
        try:
            self._have = self._noted()
            if not any(self._have):
                # Never overwrite it: it may be a hard link to a file that belongs to somebody else.
                self.close()
                self._path.unlink()
                self._fd = open_own(self._path, new=True)
            os.ftruncate(self._fd, size)
        except BaseException:
            self.close()
            raise

    def missing(self) -> list[int]:
        """The chunks that are not complete, in order."""
        with self._lock:
            return [chunk for chunk, have in enumerate(self._have) if have < self._length(chunk)]

    def span(self, chunk: int) -> tuple[int, int]:
        """First missing byte of a chunk, and the end of the chunk."""
        start = chunk * CHUNK_BYTES
        return start + self._have[chunk], start + self._length(chunk)

    def bytes_done(self) -> int:
        """Bytes written so far."""
        with self._lock:
            return sum(self._have)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes where a chunk's missing bytes begin; they may extend into the next chunks. Saves a checkpoint
        about every CHECKPOINT_S.

        Raises OSError, and ValueError after close.
        """
        with self._lock:
            if self._fd < 0:
                raise ValueError("the partial file is closed")
            view = memoryview(data)
            while view:
                chunk = offset // CHUNK_BYTES
                end = chunk * CHUNK_BYTES + self._length(chunk)
                some = view[: end - offset]
                write_at(self._fd, some, offset)
                view, offset = view[len(some) :], offset + len(some)
                self._have[chunk] = offset - chunk * CHUNK_BYTES
        if time.monotonic() - self._saved_at > CHECKPOINT_S and self._saving.acquire(blocking=False):
            try:
                self._save()
            finally:
                self._saving.release()

    def restart(self) -> None:
        """Discard all progress: the whole file is written again."""
        with self._lock:
            self._have = [0] * len(self._have)

    def checkpoint(self) -> None:
        """Make the progress so far durable: first the bytes, then the note of them."""
        with self._saving:
            if self._fd >= 0:
                self._save()

    def hash_more(self) -> bool:
        """Hash the next chunk if it is complete; return whether it was. Call from one thread only."""
        chunk = self._hashed_chunks
        if chunk == len(self._have) or self._have[chunk] < self._length(chunk):
            return False
        start = chunk * CHUNK_BYTES
        stop = start + self._length(chunk)
        while start < stop:
            piece = bytes_at(self._fd, min(_PIECE_BYTES, stop - start), start)
            self._hash.update(piece)
            start += len(piece)
        self._hashed_chunks += 1
        return True

    def digest(self, progress: Callable[[], None]) -> str:
        """sha256:<hex> of the file. progress is called between chunks. Raises ValueError if chunks are missing."""
        while self.hash_more():
            progress()
        if self._hashed_chunks != len(self._have):
            raise ValueError("chunks are missing")
        return f"sha256:{self._hash.hexdigest()}"

    def keep_as(self, target: Path) -> None:
        """Move the complete file to `target`, atomically even through a power cut."""
        sync_file(self._fd)
        replace(self._path, target)
        sync_folder(target.parent)
        self._state.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; later writes fail. Idempotent."""
        with self._saving, self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _save(self) -> None:
        with self._lock:
            have = list(self._have)
        sync_file(self._fd)  # other threads go on writing
        note = {"size": self.size, "chunk": CHUNK_BYTES, "validator": self._validator, "have": have}
        write_whole(self._state, json.dumps(note).encode())
        self._saved_at = time.monotonic()

    def _length(self, chunk: int) -> int:
        return min(CHUNK_BYTES, self.size - chunk * CHUNK_BYTES)

    def _noted(self) -> list[int]:
        """How many bytes of each chunk an earlier download left; all 0 if its note is of another file."""
        chunks = -(-self.size // CHUNK_BYTES)
        note = read_note(self._state)
        have = note.get("have")
        same = (note.get("size"), note.get("chunk"), note.get("validator")) == (self.size, CHUNK_BYTES, self._validator)
        if not self._validator or not same or os.fstat(self._fd).st_size != self.size:
            return [0] * chunks
        if not isinstance(have, list) or len(have) != chunks:
            return [0] * chunks
        return [
            count if type(count) is int and 0 <= count <= self._length(chunk) else 0 for chunk, count in enumerate(have)
        ]


def remove_leftovers(folder: Path, key: str) -> None:
    """Remove a partial file and its note. The caller holds its lock."""
    for suffix in (".part", ".json"):
        (folder / f"{key}{suffix}").unlink(missing_ok=True)


def read_note(path: Path) -> dict[str, Any]:
    """The content of a note; empty if missing or damaged, which only means downloading again."""
    try:
        note = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def bytes_noted(folder: Path, key: str) -> int:
    """About how many bytes another process has downloaded."""
    have = read_note(folder / f"{key}.json").get("have")
    return sum(count for count in have if type(count) is int) if isinstance(have, list) else 0
