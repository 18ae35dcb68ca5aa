"""The file of a disk-tier segment: its token ids, their KV, and optionally the state after the last token.

    magic, number of tokens, bytes of KV, bytes of the state    little-endian
    token ids                                                   int64 each, from the conversation's first on
    KV
    checksum of the above                                       4 bytes
    the state and its checksum, if there is one

So KV is read without the state, which may be larger. Checksums are CRC-32: they detect damage, not an attacker, who
could do worse with write access.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gguf_io.system import open_regular
from localllm.files import write_whole

_MAGIC = b"LLMKV\x00\x00\x03"
_HEADER = struct.Struct(f"<{len(_MAGIC)}sIQQ")
_CHECKSUM = 4
_IDS, _TOKEN = "<i8", 8  # those of images are far above every vocabulary


class SegmentHeader(NamedTuple):
    """The contents of a segment file's header, and its token ids. state_bytes: 0 for none."""

    tokens: list[int]
    kv_bytes: int
    state_bytes: int


class DamagedSegmentError(Exception):
    """A checksum is wrong, or the file was truncated."""


def read_header(path: Path) -> SegmentHeader | None:
    """A segment file's header; None if the file is missing or not a segment."""
    try:
        with _opened(path) as file:
            start = file.read(_HEADER.size)
            if len(start) < _HEADER.size:
                return None
            magic, count, kv_bytes, state_bytes = _HEADER.unpack(start)
            size = (
                _HEADER.size + _TOKEN * count + kv_bytes + _CHECKSUM + (state_bytes + _CHECKSUM if state_bytes else 0)
            )
            if magic != _MAGIC or not count or size != os.fstat(file.fileno()).st_size:
                return None
            tokens: list[int] = np.frombuffer(file.read(_TOKEN * count), _IDS).tolist()
    except OSError:
        return None
    return SegmentHeader(tokens, kv_bytes, state_bytes) if len(tokens) == count else None


def read_kv(path: Path, tokens: int, kv_bytes: int) -> memoryview:
    """A segment's KV. Raises OSError or DamagedSegmentError."""
    before = _HEADER.size + _TOKEN * tokens
    return _checked(path, 0, before + kv_bytes)[before:]


def read_state(path: Path, tokens: int, kv_bytes: int, state_bytes: int) -> memoryview:
    """The state after a segment's last token. Raises OSError or DamagedSegmentError."""
    return _checked(path, _HEADER.size + _TOKEN * tokens + kv_bytes + _CHECKSUM, state_bytes)


def write_segment(path: Path, tokens: Sequence[int], kv: bytes, state: bytes) -> None:
    """Write a segment's file atomically. Raises OSError."""
    header = _HEADER.pack(_MAGIC, len(tokens), len(kv), len(state)) + np.array(tokens, _IDS).tobytes()
    parts = [header, kv, _checksum(header, kv)]
    if state:
        parts += [state, _checksum(state)]
    write_whole(path, b"".join(parts), lasting=False)


def _checked(path: Path, start: int, size: int) -> memoryview:
    """Read `size` bytes and verify the checksum that follows them."""
    # np.empty requests huge pages, which Linux may have to assemble first: that takes longer than reading.
    data = memoryview(mmap.mmap(-1, size + _CHECKSUM))
    with _opened(path) as file:
        file.seek(start)
        count = file.readinto(data)
    if count < len(data) or _checksum(data[:size]) != data[size:]:
        raise DamagedSegmentError
    return data[:size]


def _opened(path: Path) -> BufferedReader:
    """Open a segment's file. Raises OSError, also if it is not a regular file; never blocks on a pipe."""
    return open(open_regular(path, follow_links=False), "rb")


def _checksum(*parts: bytes | memoryview) -> bytes:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value.to_bytes(_CHECKSUM, "little")
