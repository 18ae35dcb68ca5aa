"""Files to choose from while a mention is written: paths that go on from it, and files that have its letters."""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from localllm.files import user_path
from localllm.text import human_bytes

MOST_LISTED = 20_000
MOST_COUNTED = 256 * 2**10  # bytes of a file whose tokens are counted; of others the size is shown


@dataclass(frozen=True, slots=True)
class FileChoice:
    """A path to choose. letters: the places in it of those that were searched."""

    path: str
    letters: tuple[int, ...] = ()


def matching_paths(beginning: str, limit: int) -> list[str]:
    """Paths that go on from what has been written, folders with a slash; hidden ones only when asked for."""
    folder, _, name = beginning.rpartition("/")
    base = user_path(folder + "/" if beginning.startswith("/") or folder else ".")
    try:
        entries = sorted(base.iterdir(), key=lambda path: (not path.is_dir(), path.name.lower()))
    except OSError:
        return []  # a path that does not exist yet has no completions
    shown = [path for path in entries if path.name.startswith(name) and (name or not path.name.startswith("."))]
    prefix = f"{folder}/" if folder or beginning.startswith("/") else ""
    return [f"{prefix}{path.name}{'/' if path.is_dir() else ''}" for path in shown[:limit]]


def list_files() -> list[str]:
    """Paths of the files below the current folder that may hold text, the first MOST_LISTED of them."""
    from localllm.documents.walk import found_files

    return [file.name for file in islice(found_files(Path()), MOST_LISTED)]


def ranked(paths: Iterable[str], letters: str, most: int) -> list[FileChoice]:
    """The paths that have all letters in this order, best first: whole in the name, whole in the path, apart.

    Linear in the lengths; textual.fuzzy tries every way in which the letters fit, of which long paths have millions.
    """
    folded = letters.lower()
    apart = re.compile("".join(f"[^{re.escape(each)}]*({re.escape(each)})" for each in folded), re.DOTALL)
    found: list[tuple[tuple[int, int, str], FileChoice]] = []
    for path in paths:
        lower = path.lower()
        if len(lower) != len(path):
            lower = path  # a letter that is two in lower case; places must stay what they are
        at = lower.rfind(folded)
        if at >= 0:
            rank, places = int(at < lower.rfind("/")), range(at, at + len(folded))
        elif match := apart.match(lower):
            rank, places = 2, [match.start(group) for group in range(1, len(folded) + 1)]  # type: ignore[assignment]
        else:
            continue
        found.append(((rank, len(path), path), FileChoice(path, tuple(places))))
    return [choice for _, choice in sorted(found, key=lambda each: each[0])[:most]]


def size_of(path: str, count_tokens: Callable[[str], int | None]) -> str:
    """What a file would take: its tokens, else its size; "" for a folder or what cannot be read."""
    file = user_path(path)
    try:
        size = os.stat(file).st_size
        if not file.is_file():
            return ""
        text = file.read_bytes().decode() if size <= MOST_COUNTED else None
    except OSError:
        return ""
    except UnicodeDecodeError:
        text = None
    tokens = count_tokens(text) if text is not None else None
    return human_bytes(size) if tokens is None else "1 token" if tokens == 1 else f"{tokens} tokens"
