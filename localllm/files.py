"""Writing files that are there in full or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes, *, lasting: bool = True) -> None:
    """Write a file that nobody ever sees half done, and that (if lasting) outlives a power cut. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if lasting:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder last."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
