"""Packed weights in a file: what kernels read, as it lies in memory, so that a model need not be packed again.

A file is the matrices one after the other, each at a whole page, an index in JSON (with a CRC-32 of each piece of each
matrix), and a trailer: SHA-256 of the index, its length, a magic number. Every byte is checked whenever it is loaded.

The matrices are mapped: the system drops what is not used when memory is short, and reads it again. Whoever cuts a file
that is mapped kills its reader by a signal, so only files in a folder of localllm's own may be mapped.
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

_MAGIC = b"localllm packed\x01"
_TRAILER = struct.Struct("<32sQ16s")  # SHA-256 of the index, bytes of the index, magic
_PAGE = 4096
_PIECE = 1 << 20
_TOGETHER = 16  # pieces that a thread takes at once
_MOST_INDEX = 64 << 20


class DamagedError(ValueError):
    """The file is not one of ours, or not as it was written."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a matrix lies in the file, and the CRC-32 of each of its pieces."""

    offset: int
    size: int
    checks: tuple[int, ...]


class PackedWeights:
    """Packed matrices by their names (models.weights.WeightLoader gives them), mapped from a file.

    about: what the file's writer said of it. bytes: of all matrices. They are being checked meanwhile: nothing may be
    computed with them before `check` returned.
    """

    def __init__(
        self, about: Mapping[str, Any], matrices: Mapping[str, NDArray[np.uint8]], checks: Sequence[Future[None]]
    ) -> None:
        self.about = about
        self._matrices = dict(matrices)
        self._checks = checks
        self.bytes = sum(each.nbytes for each in self._matrices.values())

    def find(self, name: str, size: int) -> NDArray[np.uint8] | None:
        """A matrix of that name and so many bytes, if there is one."""
        found = self._matrices.get(name)
        return found if found is not None and found.nbytes == size else None

    def check(self) -> None:
        """Wait until every byte was checked. Raises DamagedError where one is not as it was written, OSError."""
        for each in self._checks:
            each.result()


def read_about(fd: int) -> dict[str, Any]:
    """What its writer said of an open packed file. Raises DamagedError, OSError."""
    return _read_index(fd)[0]


def map_packed(fd: int, threads: int) -> PackedWeights:
    """Map an open packed file, and begin to check it on so many threads. Raises DamagedError, OSError.

    The file may be closed and removed; only cutting or writing to it changes what was mapped.
    """
    about, entries = _read_index(fd)
    size = os.fstat(fd).st_size
    if any(entry.offset + entry.size > size for entry in entries.values()):
        raise DamagedError("it is cut off")
    try:
        whole = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ), np.uint8)
    except ValueError as error:  # it has become shorter since
        raise DamagedError("it is cut off") from error
    matrices = {name: whole[entry.offset :][: entry.size] for name, entry in entries.items()}
    pieces = [
        (entry.offset + number * _PIECE, min(_PIECE, entry.size - number * _PIECE), check)
        for entry in entries.values()
        for number, check in enumerate(entry.checks)
    ]
    # Through read, for a disk that fails is an error there, and a signal where a mapping is read.
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
        done = 0
        while done < size:
            count = os.preadv(fd, [room[done:size]], offset + done)
            if not count:
                raise DamagedError("it is cut off")
            done += count
        if zlib.crc32(room[:size]) != check:
            raise DamagedError(f"bytes {offset:,} to {offset + size:,} are not as they were written")


class PackedWriter:
    """Writes a packed file from its beginning to its end. Raises OSError."""

    def __init__(self, fd: int) -> None:
        """fd: an empty file, open for writing, which the caller closes."""
        self._fd = fd
        self._entries: dict[str, tuple[int, int]] = {}
        self._checks: dict[str, list[int]] = {}
        self._end = self._unsynced = 0

    def put(self, name: str, parts: Iterable[NDArray[np.uint8]]) -> None:
        """Write a matrix of which `parts` are the bytes."""
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
        self._entries[name], self._checks[name] = (offset, size), checks
        self._end = offset + size

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write the index, with what the file is about, and have everything written to the disk."""
        rows = [[name, *place, self._checks[name]] for name, place in self._entries.items()]
        index = json.dumps({"about": dict(about), "matrices": rows}).encode()
        trailer = _TRAILER.pack(hashlib.sha256(index).digest(), len(index), _MAGIC)
        self._write(memoryview(index + trailer), self._end)
        os.fsync(self._fd)

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)
        self._unsynced += len(data)
        if self._unsynced >= 64 * _PIECE:  # so that little waits in memory for the disk
            os.fsync(self._fd)
            self._unsynced = 0


def parts_of(array: NDArray[Any], each: Callable[[], None]) -> Iterator[NDArray[np.uint8]]:
    """An array's bytes piece by piece, with a call before each, which may raise to give up."""
    data = array.view(np.uint8)
    for start in range(0, len(data), _PIECE):
        each()
        yield data[start : start + _PIECE]


def _read_index(fd: int) -> tuple[dict[str, Any], dict[str, _Entry]]:
    end = os.fstat(fd).st_size - _TRAILER.size
    trailer = os.pread(fd, _TRAILER.size, max(end, 0))
    if end < 0 or len(trailer) != _TRAILER.size:
        raise DamagedError("it is cut off")
    digest, size, magic = _TRAILER.unpack(trailer)
    if magic != _MAGIC:
        raise DamagedError("it does not end as a packed file does")
    if not size <= min(end, _MOST_INDEX):
        raise DamagedError("its index is too long")
    index = os.pread(fd, size, end - size)
    if hashlib.sha256(index).digest() != digest:
        raise DamagedError("its index is not as it was written")
    found = json.loads(index)  # written by us, to the byte
    entries = {name: _Entry(offset, length, tuple(checks)) for name, offset, length, checks in found["matrices"]}
    return found["about"], entries


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
