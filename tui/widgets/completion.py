"""Completions above the prompt: commands after a slash, files after an at sign."""

import re

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tui.attachments import matching_paths
from tui.commands.table import COMMANDS

MOST_SHOWN = 8

_PATH = re.compile(r"(?<!\S)@(\S*)$")


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
            self._length = len(mention[1])
            self._values = matching_paths(mention[1], MOST_SHOWN)
            rows = [Content(value) for value in self._values]
            if self._values == [mention[1]]:
                self._values = []
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
