"""Files of packed weights, in the layout that kernels read, so that a model need not be packed again.

A file consists of the matrices, each starting at a page boundary, an index in JSON (with a CRC-32 of each piece of each
matrix), and a trailer: SHA-256 of the index, its length, a magic number. Every byte is checked whenever it is loaded.

The matrices are mapped, so the system can drop unused pages when memory is short and read them again. Truncating a
mapped file kills the process that reads it with a signal, so only files in a folder of localllm's own may be mapped.
"""

import hashlib
import json
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_io.system import bytes_at, read_at, sync_file, write_at

_MAGIC = b"localllm packed\x01"
_TRAILER = struct.Struct("<32sQ16s")  # SHA-256 of the index, bytes of the index, magic
_PAGE = 4096
_PIECE = 1 << 20
_TOGETHER = 16  # pieces that a thread takes at once
_MOST_INDEX = 64 << 20


class DamagedError(ValueError):
    """The file is not a packed file, or not as it was written."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A matrix's place in the file, and the CRC-32 of each of its pieces."""

    offset: int
    size: int
    checks: tuple[int, ...]


class PackedWeights:
    """Packed matrices by identity (as models.weights.WeightLoader defines it), mapped from a file.

    about: the writer's metadata. bytes: of all matrices. Checksums are verified in the background: nothing may be
    computed with the matrices before `check` returns.
    """

    def __init__(
        self, about: Mapping[str, Any], matrices: Mapping[str, NDArray[np.uint8]], checks: Sequence[Future[None]]
    ) -> None:
        self.about = about
        self._matrices = dict(matrices)
        self._checks = checks
        self.bytes = sum(each.nbytes for each in self._matrices.values())

    def find(self, name: str, size: int) -> NDArray[np.uint8] | None:
        """The matrix of that name, None if there is none or it has another size in bytes."""
        found = self._matrices.get(name)
        return found if found is not None and found.nbytes == size else None

    def check(self) -> None:
        """Wait until every byte is checked. Raises DamagedError if the file is not as it was written, or OSError."""
        for each in self._checks:
            each.result()


def read_about(fd: int) -> dict[str, Any]:
    """The writer's metadata of an open packed file. Raises DamagedError, OSError."""
    return _read_index(fd)[0]


def map_packed(fd: int, threads: int) -> PackedWeights:
    """Map an open packed file, and start checking it on `threads` threads. Raises DamagedError, OSError.

    The file may then be closed and removed, but must not be truncated or written to.
    """
    about, entries = _read_index(fd)
    size = os.fstat(fd).st_size
    if any(entry.offset + entry.size > size for entry in entries.values()):
        raise DamagedError("it is truncated")
    try:
        whole = np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), np.uint8)
    except ValueError as error:  # it has become shorter since
        raise DamagedError("it is truncated") from error
    matrices = {name: whole[entry.offset :][: entry.size] for name, entry in entries.items()}
    pieces = [
        (entry.offset + number * _PIECE, min(_PIECE, entry.size - number * _PIECE), check)
        for entry in entries.values()
        for number, check in enumerate(entry.checks)
    ]
    # Check with read: a failing disk is an error there, but a signal when a mapping is read.
    own = os.dup(fd)
    shares = [pieces[start : start + _TOGETHER] for start in range(0, len(pieces), _TOGETHER)]
    executor = ThreadPoolExecutor(threads, "packed-weights")
    checks = [executor.submit(_check_pieces, own, share) for share in shares]
    threading.Thread(target=_close_behind, args=(executor, own), name="packed-weights", daemon=True).start()
    return PackedWeights(about, matrices, checks)


def _close_behind(executor: ThreadPoolExecutor, fd: int) -> None:
    executor.shutdown()
    os.close(fd)


def _check_pieces(fd: int, pieces: Sequence[tuple[int, int, int]]) -> None:
    room = np.empty(_PIECE, np.uint8).data
    for offset, size, check in pieces:
        if read_at(fd, room[:size], offset) < size:
            raise DamagedError("it is truncated")
        if zlib.crc32(room[:size]) != check:
            raise DamagedError(f"bytes {offset:,} to {offset + size:,} are not as they were written")


class PackedWriter:
    """Writes a packed file sequentially. Raises OSError."""

    def __init__(self, fd: int) -> None:
        """fd: an empty file, open for writing, which the caller closes."""
        self._fd = fd
        self._entries: dict[str, tuple[int, int, list[int]]] = {}  # offset, size and checks, see _Entry
        self._end = self._unsynced = 0

    def put(self, name: str, parts: Iterable[NDArray[np.uint8]]) -> None:
        """Write a matrix, given as consecutive parts of its bytes."""
        offset, size, checks = _whole_pages(self._end), 0, list[int]()
        for part in parts:
            done = 0
            while done < len(part):
                inside = size % _PIECE
                some = part[done : done + _PIECE - inside]
                if inside == 0:
                    checks.append(0)
                checks[-1] = zlib.crc32(some.data, checks[-1])
                self._write(some.data, offset + size)
                size += len(some)
                done += len(some)
        self._entries[name] = offset, size, checks
        self._end = offset + size

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write the index with the writer's metadata, and sync the file to disk."""
        rows = [[name, *entry] for name, entry in self._entries.items()]
        index = json.dumps({"about": dict(about), "matrices": rows}).encode()
        trailer = _TRAILER.pack(hashlib.sha256(index).digest(), len(index), _MAGIC)
        self._write(memoryview(index + trailer), self._end)
        sync_file(self._fd)

    def _write(self, data: memoryview, offset: int) -> None:
        write_at(self._fd, data, offset)
        self._unsynced += len(data)
        if self._unsynced >= 64 * _PIECE:  # bound the unwritten data held in memory
            sync_file(self._fd)
            self._unsynced = 0


def parts_of(array: NDArray[Any], each: Callable[[], None]) -> Iterator[NDArray[np.uint8]]:
    """An array's bytes piece by piece; `each` is called before every piece and may raise to cancel."""
    data = array.view(np.uint8)
    for start in range(0, len(data), _PIECE):
        each()
        yield data[start : start + _PIECE]


def _read_index(fd: int) -> tuple[dict[str, Any], dict[str, _Entry]]:
    end = os.fstat(fd).st_size - _TRAILER.size
    trailer = bytes_at(fd, _TRAILER.size, max(end, 0))
    if end < 0 or len(trailer) != _TRAILER.size:
        raise DamagedError("it is truncated")
    digest, size, magic = _TRAILER.unpack(trailer)
    if magic != _MAGIC:
        raise DamagedError("it does not end as a packed file does")
    if not size <= min(end, _MOST_INDEX):
        raise DamagedError("its index is too long")
    index = bytes_at(fd, size, end - size)
    if hashlib.sha256(index).digest() != digest:
        raise DamagedError("its index is not as it was written")
    found = json.loads(index)  # the digest shows that we wrote it
    entries = {name: _Entry(offset, length, tuple(checks)) for name, offset, length, checks in found["matrices"]}
    return found["about"], entries


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
