"""The folder that tools are confined to, reading files in it, and what runs commands there."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from gguf_io.system import NotRegularError, can_name_file, open_regular, same_place
from localllm.actions.action import ToolError
from localllm.settings import config_path, sessions_path

MAX_FILE_BYTES = 4 * 2**20  # of a file to read or edit
LIMIT_S = 120  # for a command
PATH = {"type": "string", "description": "relative to the user's folder, which is ."}  # the schema of a path


class Files:
    """Where the tools read and write the contents of files: the disk."""

    def read(self, path: Path) -> bytes:
        """A file's content. Raises what read_bytes does."""
        text = self.unsaved(path)
        if text is None:
            return read_bytes(path)
        data = text.encode("utf-8", "replace")
        _check_size(path, len(data))
        return data

    def unsaved(self, path: Path) -> str | None:
        """A file's text if it has one that is not on the disk. Raises ToolError."""
        return None

    def write(self, path: Path, content: bytes) -> bool:
        """Write a file otherwise than to the disk; False if that is not possible. Raises ToolError."""
        return False


class Folder:
    """A folder, and the contents of its files. Refuses paths outside it, also through .. and symbolic links."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = Path(os.path.realpath(root))
        self.files = files or Files()

    def resolve(self, text: str) -> Path:
        """The real path of a name relative to the folder; it may not exist. Raises ToolError if it is outside."""
        if "\0" in text:
            raise ToolError("A path cannot contain a NUL character.")
        path = Path(os.path.realpath(self.root / text))
        if path != self.root and self.root not in path.parents:
            raise ToolError(f"{text}: is outside the folder {self.root}. Tools reach this folder only.")
        if not all(map(can_name_file, path.relative_to(self.root).parts)):
            raise ToolError(f"{text}: Windows reserves a name in this path. Use another one.")
        return path

    def name(self, path: Path) -> str:
        """A path as users and models see it: relative to the folder, with slashes."""
        return path.relative_to(self.root).as_posix()

    def is_hidden(self, path: Path) -> bool:
        """Whether a part of the path starts with a dot; such files often hold secrets or settings."""
        return any(part.startswith(".") for part in path.relative_to(self.root).parts)

    def resolve_for_writing(self, text: str) -> Path:
        """`resolve` for a file to change. Raises ToolError for folders and for the files of Git and localllm."""
        path = self.resolve(text)
        own = [Path(os.path.realpath(place.parent)) for place in (config_path(), sessions_path())]
        if ".git" in (part.lower() for part in path.parts) or any(
            same_place(place, parent) for place in own for parent in path.parents
        ):
            raise ToolError(f"{text}: files of Git's and of localllm's own are not changed by tools.")
        if path == self.root or os.path.isdir(path):
            raise ToolError(f"{text}: is a folder. Name a file.")
        return path


# Runs a shell command in a folder, for LIMIT_S at most, and returns what it printed and how it ended; setting the event
# ends it. May raise ToolError.
RunCommand = Callable[[str, Folder, threading.Event], str]


def read_bytes(path: Path) -> bytes:
    """A regular file's content. Raises ToolError for other types and large files, OSError if it cannot be read."""
    try:
        fd = open_regular(path, follow_links=False)  # the path was resolved, so a link was placed there since
    except NotRegularError as error:
        raise ToolError(f"{path.name}: {error.strerror}.") from error
    with open(fd, "rb") as file:
        _check_size(path, os.fstat(fd).st_size)
        return file.read(MAX_FILE_BYTES + 1)


def _check_size(path: Path, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise ToolError(f"{path.name}: has {size} bytes; tools take files up to {MAX_FILE_BYTES}.")


def read_text(path: Path, files: Files) -> str:
    """A text file's content with its line endings. Raises what Files.read does, and ToolError if it is not UTF-8."""
    try:
        return files.read(path).decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"{path.name}: is not UTF-8 text.") from error
