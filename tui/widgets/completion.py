"""What the prompt offers to complete: commands, names of saved prompts, and files."""

import re
import time
from collections.abc import Callable, Sequence
from functools import partial

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option
from textual.worker import Worker

from localllm.text import harmless
from tui.background import in_thread
from tui.files import FileChoice, list_files, matching_paths, ranked, size_of
from tui.saved import saved_names
from tui.status import MUTED

MOST_SHOWN = 8
LISTED_S = 10.0  # for so long the folder's files are taken to be the same
COMMAND_COLUMNS, FILE_COLUMNS = 20, 40

Suggestion = tuple[str, str, str]
"""A slash command: its name, what may follow it, and what it does."""

# What has been written of a mention: a path, or in quotes one that may have blanks.
_PATH = re.compile(r"""(?<!\S)@(?:"([^"]*)|([^"\s]\S*)?)$""")
_SAVED = re.compile(r"/(prompt|persona) (\S*)")


class Completion(OptionList, can_focus=False):
    """Offers what could complete the word before the cursor. The prompt's keys move in it and take from it."""

    def __init__(self, commands: Sequence[Suggestion], count_tokens: Callable[[str], int | None]) -> None:
        """count_tokens: of the files that are offered."""
        super().__init__(id="completion", markup=False, compact=True)
        self._commands = commands
        self._count_tokens = count_tokens
        self.display = False
        self._values: list[str] = []
        self._length = 0
        self._files: Sequence[str] = ()  # of the folder, as it was at _listed
        self._listed = -LISTED_S
        self._listing: Worker[None] | None = None
        self._counting: Worker[None] | None = None

    def offer(self, before: str, whole: str) -> None:
        """Show what fits. before: the line up to the cursor; whole: the field's text."""
        self._values, self._length = [], len(before)
        rows: list[Content] = []
        if whole.startswith("/") and before == whole and " " not in whole:
            fitting = [each for each in self._commands if each[0].startswith(whole[1:])][: 2 * MOST_SHOWN]
            if [name for name, _, _ in fitting] != [whole[1:]]:
                self._values = [f"/{name}{' ' if argument else ''}" for name, argument, _ in fitting]
                rows = [
                    Content.assemble((f"/{name} {argument}".ljust(COMMAND_COLUMNS), "bold"), (title, MUTED))
                    for name, argument, title in fitting
                ]
        elif named := _SAVED.fullmatch(whole):
            self._length = len(named[2])
            self._values = [name for name in saved_names(named[1]) if name.startswith(named[2]) and name != named[2]]
            rows = [Content(name) for name in self._values]
        elif mention := _PATH.search(before):
            self._length = len(mention[0]) - 1
            rows = self._offer_files(mention[1] or mention[2] or "", mention[1] is not None, before, whole)
        self.display = bool(self._values)
        self.clear_options()
        if self._values:
            self.add_options(Option(row) for row in rows)
            self.highlighted = 0

    def _offer_files(self, begun: str, quoted: bool, before: str, whole: str) -> list[Content]:
        """Paths that go on from what was written, then files of the folder whose paths have its letters in order."""
        found = [FileChoice(path) for path in matching_paths(begun, MOST_SHOWN)]
        if begun and not begun.startswith(("/", "~", ".")):
            paths = {choice.path for choice in found}
            found += [choice for choice in ranked(self._files, begun, MOST_SHOWN) if choice.path not in paths]
            if time.monotonic() - self._listed > LISTED_S:
                self._listed = time.monotonic()
                listing = partial(self._list, before, whole)
                self._listing = self.run_worker(listing, exclusive=True, group="list")
        found = found[:MOST_SHOWN]
        if quoted or begun not in [choice.path for choice in found]:  # else it is written already
            self._values = [_mentioned(choice.path, quoted) for choice in found]
            self._counting = self.run_worker(partial(self._count, found), exclusive=True, group="count")
        return [_file_row(choice, self.size.width) for choice in found]

    async def _list(self, before: str, whole: str) -> None:
        self._files = await in_thread(list_files)
        if self.display or not self._values:
            self.offer(before, whole)

    async def _count(self, found: Sequence[FileChoice]) -> None:
        """Show how much of the context each file takes, one after the other."""
        for place, choice in enumerate(found):
            size = await in_thread(lambda choice=choice: size_of(choice.path, self._count_tokens))  # type: ignore[misc]
            if size and place < self.option_count:
                self.replace_option_prompt_at_index(place, _file_row(choice, self.size.width, size))

    @property
    def is_open(self) -> bool:
        """Whether anything is offered."""
        return bool(self._values)

    def move(self, step: int) -> None:
        """Mark the next or previous entry, around the ends."""
        self.highlighted = ((self.highlighted or 0) + step) % len(self._values)

    def take(self) -> tuple[int, str]:
        """How many characters before the cursor the marked entry replaces, and by what."""
        return self._length, self._values[self.highlighted or 0]

    def shut(self) -> None:
        """Offer nothing until the text changes."""
        self._values, self.display = [], False
        self.workers.cancel_node(self)


def _mentioned(path: str, quoted: bool) -> str:
    """A path as a mention has it behind the at sign: blanks need quotes, which a folder's name leaves open."""
    if not quoted and not any(letter.isspace() for letter in path):
        return path
    return f'"{path}' if path.endswith("/") else f'"{path}"'


def _file_row(choice: FileChoice, columns: int, size: str = "") -> Content:
    """A path with the letters that were written, and what it takes. A path that is too long loses its beginning."""
    path = Content(harmless(choice.path))
    for place in choice.letters:
        path = path.stylize("bold $accent", place, place + 1)
    room = max(columns - len(size) - 4, FILE_COLUMNS)
    if len(path) > room:
        path = Content.assemble("…", path[len(path) - room + 1 :])
    return Content.assemble(path, " " * max(FILE_COLUMNS - path.cell_length, 2) if size else "", (size, MUTED))
