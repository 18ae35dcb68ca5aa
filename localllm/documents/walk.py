"""Finding the files of a folder that may hold text."""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localllm.files import TEMPORARY

MAX_FILES = 100_000
# Folders of other people's code and of what programs made, by the names that their tools give them.
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "venv"})
# Formats without text, so that they need not be opened.
_NO_TEXT = re.compile(
    r"\.(7z|a|avi|bin|bmp|bz2|class|db|deb|dll|dylib|eot|exe|flac|gguf|gif|gz|ico|iso|jar|jpe?g|m4a|mkv|mov|mp[34]|npy|npz"
    r"|o|og[gv]|onnx|otf|parquet|pickle|pkl|png|pt|pyc|rar|rpm|safetensors|so|sqlite|tar|tgz|tiff?|ttf|wasm|wav|web[mp]"
    r"|whl|woff2?|xz|zip|zst)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A regular file. name: its path in the folder, with slashes. mtime: in nanoseconds."""

    name: str
    path: Path
    size: int
    mtime: int


def found_files(root: Path) -> Iterator[FoundFile]:
    """The files below a folder in a fixed order, at most MAX_FILES + 1.

    Left out: hidden files and folders, symbolic links, other programs' folders, formats without text, and names that
    are not UTF-8. What vanishes meanwhile is left out too.
    """
    count = 0
    for parent, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        for name in sorted(files):
            path = Path(parent, name)
            if name.startswith((".", TEMPORARY)) or _NO_TEXT.fullmatch(path.suffix) or not _is_utf8(str(path)):
                continue
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield FoundFile(path.relative_to(root).as_posix(), path, status.st_size, status.st_mtime_ns)
                count += 1
                if count > MAX_FILES:
                    return


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
