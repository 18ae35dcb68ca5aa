"""Atomic file writes, temporary names that localllm recognises, and paths that users write.

os.path.isfile, isdir and exists answer False where a folder above may not be entered. Path's methods of similar names,
and Path.glob, raise PermissionError there before Python 3.14, so they are not used.
"""

import codecs
import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gguf_io.system import open_own, read_file, replace, sync_file, sync_folder
from gguf_io.wrong_files import EXAMINED_BYTES, described_binary
from localllm.errors import LocalLLMError, RequestError

# Every temporary file begins with this, so that files left by a killed process are known to be ours.
TEMPORARY = ".localllm-"
STALE_S = 3600  # younger temporary files may be in use
SETTLED_NS = 2 * 10**9  # files that changed this recently may change again with the same time stamp


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
        handle, name = open_own(temporary, new=True), str(temporary)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            sync_file(file.fileno())
        os.chmod(name, mode)
        replace(Path(name), path)
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


def stale(path: Path) -> bool:
    """Whether a temporary file has not been written for STALE_S, so a killed process must have left it."""
    try:
        return path.lstat().st_mtime < time.time() - STALE_S
    except OSError:  # its writer has just renamed or removed it
        return False


def unsettled_s(changed_ns: int) -> float:
    """Seconds, at most twice SETTLED_NS, until a change of a file is sure to get another time stamp than changed_ns.

    0.0 for stamps in the future too, as those of files written before the clock was set back.
    """
    left = changed_ns + SETTLED_NS - time.time_ns()
    return left / 1e9 if 0 < left <= 2 * SETTLED_NS else 0.0


def read_text(
    path: Path,
    kind: type[LocalLLMError] = RequestError,
    missing: str | None = None,
    what: str = "",
    pipes: bool = False,
) -> str:
    """The text of a file that a person wrote, see `decoded`. missing: returned if there is no such file.

    pipes: whether it may be a pipe, as in <(command), whose end is waited for. Raises `kind` naming the file if it
    cannot be read or is not text. what: begins the message, such as a setting.
    """
    try:
        return text_of(path.read_bytes() if pipes else read_file(path), f"{what}{path}", kind)
    except (FileNotFoundError, NotADirectoryError) as error:
        if missing is not None:
            return missing
        raise kind(f"{what}{path}: cannot be read: {error.strerror}. Check the path.") from error
    except (OSError, ValueError) as error:  # a ValueError for a null character
        words = getattr(error, "strerror", None) or str(error)
        raise kind(f"{what}{path}: cannot be read: {words}. Check the path and its permissions.") from error


def text_of(data: bytes, source: str, kind: type[LocalLLMError] = RequestError, utf_16: bool = True) -> str:
    """`decoded`, but raises `kind` naming the source if it is not text. utf_16: whether that is accepted."""
    try:
        return decoded(data, utf_16)
    except UnicodeDecodeError as error:
        if what := described_binary(data[:EXAMINED_BYTES]):
            raise kind(f"{source}: is not text: {what}. Choose another file.") from error
        raise kind(f"{source}: is not UTF-8 text (byte {error.start}). Convert it first.") from error


def decoded(data: bytes, utf_16: bool = True) -> str:
    """Text that a person wrote: UTF-8, or UTF-16 with a byte order mark, and either kind of line end.

    Byte order marks are left out, and lines end with "\\n". Raises UnicodeDecodeError.
    """
    is_utf_16 = utf_16 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_utf_16 else "utf-8-sig").replace("\r\n", "\n")


def walked(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As os.walk, which recurses before Python 3.12: each folder, with its folders' and its files' names.

    A caller may remove folders from the list, which are then not visited, or sort it. Links are not followed; what
    cannot be read is left out.
    """
    waiting = [os.fspath(root)]
    while waiting:
        parent = waiting.pop()
        folders: list[str] = []
        files: list[str] = []
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                (folders if os.path.isdir(entry) else files).append(entry.name)
        yield parent, folders, files
        paths = [os.path.join(parent, name) for name in folders]
        waiting += [path for path in reversed(paths) if not os.path.islink(path)]


def listed(folder: Path, report: Callable[[OSError], object] = lambda _error: None) -> list[Path]:
    """The entries of a folder, sorted; none if there is none. report: receives why an existing one cannot be read."""
    try:
        return sorted(map(Path, os.scandir(folder)))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a ValueError for a null character
        return []
    except OSError as error:
        report(error)
        return []


def file_problem(path: Path) -> str:
    """Why there is no file to read at a path, as the end of a sentence; "" if there is one."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError) as error:  # a ValueError for a null character
        return f"it cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(mode):
        return "it is a folder"
    return "" if stat.S_ISREG(mode) else "it is not a regular file"


def with_slashes(path: str) -> str:
    """A path that a user wrote on this system, with slashes, which Windows takes too."""
    return path.replace(os.sep, "/")


def user_path(text: str) -> Path:
    """The path that a user wrote, with ~ expanded; with an unknown user name it stays unchanged."""
    return Path(os.path.expanduser(text))
