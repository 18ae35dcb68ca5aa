"""Atomic file writes, temporary names that localllm recognises, and paths that users write."""

import os
import tempfile
import time
from pathlib import Path

# Every temporary file begins with this, so that files left by a killed process are known to be ours.
TEMPORARY = ".localllm-"
STALE_S = 3600  # younger temporary files may be in use


def write_whole(
    path: Path, data: bytes, *, lasting: bool = True, mode: int = 0o600, temporary: Path | None = None
) -> None:
    """Write a file atomically, so that no reader sees a part; if lasting, it survives a power cut. Raises OSError.

    mode: the file's permissions. temporary: where to write it first, if that must be known; a file there is replaced.
    """
    if temporary is None:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY, suffix=".tmp")
    else:
        temporary.unlink(missing_ok=True)
        handle, name = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), str(temporary)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if lasting:
        sync_folder(path.parent)


def usual_mode() -> int:
    """The permissions of a new file of this process. Reading the umask requires setting it briefly."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def stale(path: Path) -> bool:
    """Whether a temporary file has not been written for STALE_S, so a killed process must have left it."""
    try:
        return path.lstat().st_mtime < time.time() - STALE_S
    except OSError:  # its writer has just renamed or removed it
        return False


def user_path(text: str) -> Path:
    """The path that a user wrote, with ~ expanded; with an unknown user name it stays unchanged."""
    return Path(os.path.expanduser(text))
