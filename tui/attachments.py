"""Files that go with a message: @path in its text."""

import re
from collections.abc import Callable
from pathlib import Path

from localllm.errors import RequestError
from tui.sessions import Attachment

# At the beginning or after a space, as in "compare @a.py and @b.py"; quotes allow spaces in the name.
_MENTION = re.compile(r"""(?<!\S)@(?:"([^"]+)"|(\S+))""")

MAX_FILE_BYTES = 2 * 2**20


def find_attachments(text: str, count_tokens: Callable[[str], int | None]) -> tuple[Attachment, ...]:
    """Read the files that a prompt names. Words after an @ that name no file stay words.

    Raises RequestError where a file cannot be read, is no text or is too large.
    """
    found = []
    for quoted, plain in _MENTION.findall(text):
        name = quoted or plain.rstrip(".,;:!?)")
        path = Path(name).expanduser()
        if path.is_file():
            content = _read(path)
            found.append(Attachment(name, content, count_tokens(content)))
    return tuple(found)


def matching_paths(beginning: str, limit: int) -> list[str]:
    """Paths that go on from what has been written, folders with a slash; hidden ones only when asked for."""
    folder, _, name = beginning.rpartition("/")
    base = Path(folder + "/" if beginning.startswith("/") or folder else ".").expanduser()
    try:
        entries = sorted(base.iterdir(), key=lambda path: (not path.is_dir(), path.name.lower()))
    except OSError:
        return []  # a path that does not exist yet has no completions
    shown = [path for path in entries if path.name.startswith(name) and (name or not path.name.startswith("."))]
    prefix = f"{folder}/" if folder or beginning.startswith("/") else ""
    return [f"{prefix}{path.name}{'/' if path.is_dir() else ''}" for path in shown[:limit]]


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RequestError(f"{path}: is larger than {MAX_FILE_BYTES // 2**20} MiB. Attach a part of it.")
        return path.read_bytes().decode()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: is not UTF-8 text (byte {error.start}). Only text can be attached.") from error
