"""Completions above the prompt: commands after a slash, files after an at sign."""

import re

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tui.attachments import matching_paths
from tui.commands.table import COMMANDS

MOST_SHOWN = 8

# What has been written of a mention: a path, or in quotes one that may have blanks.
_PATH = re.compile(r"""(?<!\S)@(?:"([^"]*)|([^"\s]\S*)?)$""")


class Completion(OptionList, can_focus=False):
    """Offers what could complete the word before the cursor. The prompt's keys move in it and take from it."""

    def __init__(self) -> None:
        super().__init__(id="completion", markup=False, compact=True)
        self.display = False
        self._values: list[str] = []
        self._length = 0

    def offer(self, before: str, whole: str) -> None:
        """Show what fits; before is the line up to the cursor, whole the field's text."""
        self._values, self._length = [], len(before)
        rows: list[Content] = []
        if whole.startswith("/") and before == whole and " " not in whole:
            fitting = [command for command in COMMANDS if command.name.startswith(whole[1:])][: 2 * MOST_SHOWN]
            if [command.name for command in fitting] != [whole[1:]]:
                self._values = [f"/{command.name}{' ' if command.argument else ''}" for command in fitting]
                rows = [
                    Content.assemble(
                        (f"/{command.name} {command.argument}".ljust(26), "bold"), (command.title, "$foreground 60%")
                    )
                    for command in fitting
                ]
        elif mention := _PATH.search(before):
            self._length = len(mention[0]) - 1
            begun = mention[1] or mention[2] or ""
            paths = matching_paths(begun, MOST_SHOWN)
            rows = [Content(path) for path in paths]
            quoted = mention[1] is not None
            whole_already = paths == [begun] and not quoted
            self._values = [] if whole_already else [_mentioned(path, quoted) for path in paths]
        self.display = bool(self._values)
        self.clear_options()
        if self._values:
            self.add_options(Option(row) for row in rows)
            self.highlighted = 0

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


def _mentioned(path: str, quoted: bool) -> str:
    """A path as a mention has it behind the at sign: blanks need quotes, which a folder's name leaves open."""
    if not quoted and not any(letter.isspace() for letter in path):
        return path
    return f'"{path}' if path.endswith("/") else f'"{path}"'
