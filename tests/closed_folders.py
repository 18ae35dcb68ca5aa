"""Folders that may not be entered, also for a root user, who is the usual one in containers."""

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_VERSION = 0x20080522  # of capget's and capset's structures
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH (linux/capability.h)


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Close a folder to this thread, and to those that it starts meanwhile."""
    if sys.platform == "win32":
        pytest.skip("Windows closes folders by lists of access, which modes do not change")
    libc = ctypes.CDLL(None, use_errno=True)
    head, state = struct.pack("<Ii", _VERSION, 0), ctypes.create_string_buffer(24)
    assert libc.capget(head, state) == 0
    effective, *others = struct.unpack("<6I", state.raw)
    folder.chmod(0)
    assert libc.capset(head, struct.pack("<6I", effective & ~_OVERRIDES, *others)) == 0
    try:
        assert not os.access(folder, os.X_OK, effective_ids=True)
        yield
    finally:
        assert libc.capset(head, state) == 0
        folder.chmod(0o700)
