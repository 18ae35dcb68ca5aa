"""The tool that changes files: replaces one text by another, or creates a file."""

import difflib
import glob
import threading
from pathlib import PurePosixPath
from typing import Any

from localllm.actions.action import Action, FileChange, Tool, ToolError, schema_of
from localllm.actions.folder import PATH, Folder
from localllm.wings.tools.journal import Journal


def editing_tool(folder: Folder, journal: Journal) -> Tool:
    """edit_file. Every change is written to the journal before it is made."""
    text = {"type": "string"}
    return Tool(
        "edit_file",
        "Change a text file: old_text, which must occur exactly once, is replaced by new_text. "
        "An empty old_text creates a new file with new_text. The user sees the change and decides.",
        schema_of({"path": PATH, "old_text": text, "new_text": text}, "path", "old_text", "new_text"),
        lambda arguments: _plan(folder, journal, arguments),
    )


def _plan(folder: Folder, journal: Journal, arguments: dict[str, Any]) -> Action:
    path = folder.resolve_for_writing(arguments["path"])
    name = folder.name(path)
    before = journal.content(path)
    after = _edited(name, before, arguments["old_text"], arguments["new_text"])
    if after == before:
        raise ToolError(f"{name}: old_text and new_text are the same; nothing would change.")
    preview = diff(name, before, after)

    def run(stop: threading.Event) -> str:
        if stop.is_set():
            raise ToolError("Stopped by the user.")
        # Resolve again: a parent folder may have become a link since the user approved.
        if folder.resolve_for_writing(arguments["path"]) != path:
            raise ToolError(f"{name}: leads to another file now; nothing was changed.")
        journal.write(path, before, after)
        return f"Changed:\n{preview}"

    pattern = None if folder.is_hidden(path) else _pattern(name)
    return Action("edit_file", name, preview, run, pattern=pattern, change=FileChange(path, before, after))


def _edited(name: str, before: bytes | None, old: str, new: str) -> bytes:
    if before is None:
        if old:
            raise ToolError(f"{name}: there is no such file. An empty old_text creates it.")
        return new.encode()
    try:
        text = before.decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"{name}: is not UTF-8 text.") from error
    if not old:
        raise ToolError(f"{name}: exists already. Give the old_text to replace.")
    if "\r\n" in text and "\r\n" not in old:  # models write LF line endings
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    count = text.count(old)
    if count != 1:
        raise ToolError(f"{name}: old_text occurs {count} times; it must occur exactly once. Read the file first.")
    return text.replace(old, new).encode()


def diff(name: str, before: bytes | None, after: bytes | None) -> str:
    """A unified diff; None means that the file does not exist."""
    old, new = ([] if data is None else data.decode("utf-8", "replace").splitlines() for data in (before, after))
    source, target = ("/dev/null" if data is None else name for data in (before, after))
    lines = list(difflib.unified_diff(old, new, source, target, lineterm=""))
    if not lines:  # only line endings differ, or a file is empty
        what = "new file, empty" if before is None else "removed" if after is None else "only line ends differ"
        lines = [f"--- {source}", f"+++ {target}", f"({what})"]
    return "\n".join(lines)


def _pattern(name: str) -> str:
    """A pattern for files with the same folder and extension."""
    path = PurePosixPath(name)
    folder = "" if path.parent == PurePosixPath(".") else f"{glob.escape(path.parent.as_posix())}/"
    return f"{folder}*{glob.escape(path.suffix)}" if path.suffix else glob.escape(name)
