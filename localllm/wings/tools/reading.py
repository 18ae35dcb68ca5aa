"""Read-only tools: read a file, list files, search for text."""

import fnmatch
import glob
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from localllm.actions.action import Action, Tool, ToolError, schema_of
from localllm.actions.folder import PATH, Files, Folder, read_text
from localllm.files import walked

LINES = 400  # returned per call
MAX_NAMES = 500
MAX_HITS = 100
MAX_SEARCHED = 20_000  # files
HIT_CHARS = 240

_TEXT = {"type": "string"}
_DISK = Files()


def reading_tools(folder: Folder) -> list[Tool]:
    """read_file, list_files and search_files. Hidden files and folders (leading dot) need approval."""
    return [
        Tool(
            "read_file",
            f"Read a text file. Long files come in parts of {LINES} lines; `start` is the first line, from 1.",
            schema_of({"path": PATH, "start": {"type": "integer", "minimum": 1}}, "path"),
            lambda arguments: _plan_read(folder, arguments),
        ),
        Tool(
            "list_files",
            "List the files below a folder. `pattern` limits them, for example *.py. Hidden files are left out.",
            schema_of({"path": PATH, "pattern": _TEXT}),
            lambda arguments: _plan_list(folder, arguments),
        ),
        Tool(
            "search_files",
            "Find the lines that contain a text, whatever its case, in the files below a folder. "
            "`pattern` limits the files, for example *.py. Hidden files are left out.",
            schema_of({"text": {"type": "string", "minLength": 1}, "path": PATH, "pattern": _TEXT}, "text"),
            lambda arguments: _plan_search(folder, arguments),
        ),
    ]


def _action(folder: Folder, tool: str, path: Path, read: Callable[[threading.Event], str], preview: str) -> Action:
    """An action on a path; it needs approval if the path is hidden."""
    hidden = folder.is_hidden(path)
    name = folder.name(path)

    def run(stop: threading.Event) -> str:
        if folder.resolve(name) != path:  # a link was put in the way after the call was checked
            raise ToolError(f"{name}: leads to another file now.")
        return read(stop)

    return Action(tool, name, preview, run, asks=hidden, pattern=None if hidden else glob.escape(name))


def _plan_read(folder: Folder, arguments: dict[str, Any]) -> Action:
    path, start = folder.resolve(arguments["path"]), arguments.get("start", 1)

    def read(_stop: threading.Event) -> str:
        lines = read_text(path, folder.files).splitlines(keepends=True)
        part = lines[start - 1 : start - 1 + LINES]
        if not part:
            return f"[no line {start}: the file has {len(lines)} lines]"
        whole = len(part) == len(lines)
        return "".join(part) + ("" if whole else f"\n[lines {start} to {start + len(part) - 1} of {len(lines)}]")

    return _action(folder, "read_file", path, read, f"read {folder.name(path)}")


def _plan_list(folder: Folder, arguments: dict[str, Any]) -> Action:
    path, pattern = folder.resolve(arguments.get("path", ".")), arguments.get("pattern") or "*"

    def read(stop: threading.Event) -> str:
        found: list[str] = []
        for file in _files(folder, path, pattern, stop):
            if len(found) == MAX_NAMES:
                return "\n".join([*found, f"[more than {MAX_NAMES} files: name a folder or a pattern]"])
            found.append(folder.name(file))
        return "\n".join(found) or "[no files]"

    return _action(folder, "list_files", path, read, f"list {pattern} in {folder.name(path)}")


def _plan_search(folder: Folder, arguments: dict[str, Any]) -> Action:
    path, pattern = folder.resolve(arguments.get("path", ".")), arguments.get("pattern") or "*"
    wanted = arguments["text"].casefold()

    def read(stop: threading.Event) -> str:
        hits: list[str] = []
        for number, file in enumerate(_files(folder, path, pattern, stop)):
            if number == MAX_SEARCHED:
                return "\n".join([*hits, f"[stopped after {MAX_SEARCHED} files: name a folder or a pattern]"])
            try:
                text = read_text(file, _DISK)  # an editor would be asked thousands of times
            except (ToolError, OSError):  # skip files that are not text, too large, or gone
                continue
            for line, words in enumerate(text.splitlines(), 1):
                if wanted in words.casefold():
                    if len(hits) == MAX_HITS:
                        return "\n".join([*hits, f"[more than {MAX_HITS} lines: search for something longer]"])
                    hits.append(f"{folder.name(file)}:{line}: {words.strip()[:HIT_CHARS]}")
        return "\n".join(hits) or "[not found]"

    return _action(folder, "search_files", path, read, f"search {arguments['text']!r} in {folder.name(path)}")


def _files(folder: Folder, path: Path, pattern: str, stop: threading.Event) -> Iterator[Path]:
    """The regular files below a path, sorted, without hidden ones. Does not follow links. Raises ToolError."""
    if os.path.isfile(path):
        yield path
        return
    if not os.path.isdir(path):
        raise ToolError(f"{folder.name(path)}: there is no such folder.")
    for parent, folders, files in walked(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if stop.is_set():
                raise ToolError("Stopped by the user.")
            file = Path(parent, name)
            if name.startswith(".") or file.is_symlink() or not os.path.isfile(file):
                continue
            relative = file.relative_to(path).as_posix()
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(relative, pattern):
                yield file
