"""The prompt's completions: commands, names of saved prompts and personas, and files."""

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from textual import work
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from gguf_io.system import read_file
from localllm.background import in_thread
from localllm.chats.saved import saved_names
from localllm.extraction import packed_suffix
from localllm.files import decoded, listed, user_path, with_slashes
from localllm.text import counted, harmless, human_bytes
from tui.status import MUTED

MOST_SHOWN = 8
LISTED_S = 10.0  # how long a listing of the folder's files is reused
COMMAND_COLUMNS, FILE_COLUMNS = 20, 40
MOST_LISTED = 20_000
MOST_COUNTED = 256 * 2**10  # bytes; tokens of larger files are not counted, their size is shown instead

Suggestion = tuple[str, str, str]
"""A slash command: its name, its argument, and what it does."""

# An incomplete mention before the cursor: a path, in quotes if it contains spaces.
_PATH = re.compile(r"""(?<!\S)@(?:"([^"]*)|([^"\s]\S*)?)$""")
_SAVED = re.compile(r"/(prompt|persona) (\S*)")


@dataclass(frozen=True, slots=True)
class FileChoice:
    """A path to choose. letters: the indices of the matched characters."""

    path: str
    letters: tuple[int, ...] = ()


class Completion(OptionList, can_focus=False):
    """Offers completions of the word before the cursor. The prompt's key bindings control it."""

    def __init__(self, commands: Sequence[Suggestion], count_tokens: Callable[[str], int | None]) -> None:
        """count_tokens: counts the tokens of offered files; returns None if unknown."""
        super().__init__(id="completion", markup=False, compact=True)
        self._commands = commands
        self._count_tokens = count_tokens
        self.display = False
        self._values: list[str] = []
        self._length = 0
        self._offered = "", ""  # the last arguments of `offer`
        self._files: Sequence[str] = ()  # the folder's files, listed at time _listed
        self._listed = -LISTED_S

    def offer(self, before: str, whole: str) -> None:
        """Show matching completions. before: the line up to the cursor. whole: the field's text."""
        self._offered = before, whole
        self.workers.cancel_group(self, "count")
        found: list[tuple[str, Content]] = []  # what is inserted, and how it is shown
        if whole.startswith("/") and before == whole and " " not in whole:
            self._length = len(whole)
            fitting = [each for each in self._commands if each[0].startswith(whole[1:])][: 2 * MOST_SHOWN]
            if [name for name, _, _ in fitting] != [whole[1:]]:
                for name, argument, title in fitting:
                    shown = f"/{name} {argument}".ljust(COMMAND_COLUMNS)
                    row = Content.assemble((shown, "bold"), (title, MUTED))
                    found.append((f"/{name}{' ' if argument else ''}", row))
        elif named := _SAVED.fullmatch(whole):
            self._length = len(named[2])
            names = [name for name in saved_names(named[1]) if name.startswith(named[2]) and name != named[2]]
            found = [(name, Content(harmless(name))) for name in names]
        elif mention := _PATH.search(before):
            self._length = len(mention[0]) - 1
            found = self._files_for(mention[1] or mention[2] or "", mention[1] is not None)
        self._values = [value for value, _ in found]
        self.display = bool(found)
        self.clear_options()
        if found:
            self.add_options(Option(row) for _, row in found)
            self.highlighted = 0

    def _files_for(self, begun: str, quoted: bool) -> list[tuple[str, Content]]:
        """Paths that start with the typed text, then fuzzy matches among the folder's files."""
        found = [FileChoice(path) for path in matching_paths(begun, MOST_SHOWN)]
        if begun and not begun.startswith(("/", "~", ".")):
            paths = {choice.path for choice in found}
            found += [choice for choice in ranked(self._files, begun, MOST_SHOWN) if choice.path not in paths]
            if time.monotonic() - self._listed > LISTED_S:
                self._listed = time.monotonic()
                self._list()
        found = found[:MOST_SHOWN]
        if not quoted and begun in [choice.path for choice in found]:
            return []  # it is complete
        self._count(found)
        return [(_mentioned(choice.path, quoted), _file_row(choice, self.size.width)) for choice in found]

    @work(exclusive=True, group="list")
    async def _list(self) -> None:
        self._files = await in_thread(list_files)
        self.offer(*self._offered)

    @work(group="count")
    async def _count(self, found: Sequence[FileChoice]) -> None:
        """Show each file's size in tokens, one file after the other."""
        for place, choice in enumerate(found):
            size = await in_thread(lambda choice=choice: size_of(choice.path, self._count_tokens))  # type: ignore[misc]
            if size and place < self.option_count:
                self.replace_option_prompt_at_index(place, _file_row(choice, self.size.width, size))

    @property
    def is_open(self) -> bool:
        """Whether anything is offered."""
        return bool(self._values)

    def move(self, step: int) -> None:
        """Highlight the next or previous entry, wrapping around."""
        self.highlighted = ((self.highlighted or 0) + step) % len(self._values)

    def take(self) -> tuple[int, str]:
        """How many characters before the cursor the highlighted entry replaces, and its text."""
        return self._length, self._values[self.highlighted or 0]

    def shut(self) -> None:
        """Offer nothing until the text changes."""
        self._values, self.display = [], False
        self.workers.cancel_node(self)


def _mentioned(path: str, quoted: bool) -> str:
    """A path as written after "@": quoted if it has spaces, with the quote left open for a folder."""
    if not quoted and not any(letter.isspace() for letter in path):
        return path
    return f'"{path}' if path.endswith("/") else f'"{path}"'


def _file_row(choice: FileChoice, columns: int, size: str = "") -> Content:
    """A row with a path, its matched characters marked, and its size. A path that is too long loses its start."""
    path = Content(harmless(choice.path))
    for place in choice.letters:
        path = path.stylize("bold $accent", place, place + 1)
    room = max(columns - len(size) - 4, FILE_COLUMNS)
    if len(path) > room:
        path = Content.assemble("…", path[len(path) - room + 1 :])
    return Content.assemble(path, " " * max(FILE_COLUMNS - path.cell_length, 2) if size else "", (size, MUTED))


def matching_paths(beginning: str, limit: int) -> list[str]:
    """Paths that start with the given text, folders with a trailing slash; hidden ones only if the name is begun."""
    beginning = with_slashes(beginning)
    folder, _, name = beginning.rpartition("/")
    prefix = f"{folder}/" if folder or beginning.startswith("/") else ""
    entries = sorted(listed(user_path(prefix or ".")), key=lambda path: (not os.path.isdir(path), path.name.lower()))
    begun = os.path.normcase(name)  # the same but on Windows
    shown = [
        path
        for path in entries
        if os.path.normcase(path.name).startswith(begun) and (name or not path.name.startswith("."))
    ]
    return [f"{prefix}{path.name}{'/' if os.path.isdir(path) else ''}" for path in shown[:limit]]


def list_files() -> list[str]:
    """Paths of the first MOST_LISTED files below the current folder that may contain text."""
    from localllm.walk import found_files

    return [file.name for file in islice(found_files(Path()), MOST_LISTED)]


def ranked(paths: Iterable[str], letters: str, most: int) -> list[FileChoice]:
    """The paths that contain all letters in order, best first: substring of the name, of the path, scattered.

    Takes linear time; textual.fuzzy tries every alignment of the letters, of which long paths have millions.
    """
    folded = letters.lower()
    apart = re.compile("".join(f"[^{re.escape(each)}]*({re.escape(each)})" for each in folded), re.DOTALL)
    found: list[tuple[tuple[int, int, str], FileChoice]] = []
    for path in paths:
        lower = path.lower()
        if len(lower) != len(path):
            lower = path  # lower-casing changed the length, which would shift the indices
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
    """A file's size for display: in tokens if they can be counted, else in bytes; "" if it is not a readable file."""
    file = user_path(path)
    try:
        size = os.stat(file).st_size
        if not os.path.isfile(file):
            return ""
        is_counted = size <= MOST_COUNTED and not packed_suffix(read_file(file, 8), path)
        text = decoded(read_file(file)) if is_counted else None
    except OSError:
        return ""
    except UnicodeDecodeError:
        text = None
    tokens = count_tokens(text) if text is not None else None
    return human_bytes(size) if tokens is None else counted(tokens, "token")
