"""Vim's normal mode: which keys do what while the user does not type."""

from dataclasses import dataclass

from textual.widgets import TextArea

# In the field: the method of TextArea. Those behind which typing goes on are in _INSERTS too.
_EDITS = {
    "h": "action_cursor_left",
    "l": "action_cursor_right",
    "w": "action_cursor_word_right",
    "b": "action_cursor_word_left",
    "0": "action_cursor_line_start",
    "$": "action_cursor_line_end",
    "x": "action_delete_right",
    "D": "action_delete_to_end_of_line",
    "C": "action_delete_to_end_of_line",
    "dd": "action_delete_line",
    "cc": "action_delete_line",
    "u": "action_undo",
    "a": "action_cursor_right",
    "I": "action_cursor_line_start",
    "A": "action_cursor_line_end",
    "i": "",
}
_INSERTS = frozenset({"i", "a", "I", "A", "C", "cc"})
# In the messages, and beside them: what Prompt.Wanted names.
_WANTED = {
    "j": "down",
    "k": "up",
    "ctrl+d": "half-down",
    "ctrl+u": "half-up",
    "gg": "first",
    "G": "last",
    "/": "find",
    "n": "find-next",
    "N": "find-previous",
}
_FIRST = frozenset({"g", "d", "c"})  # of two letters
KEYS = frozenset({key for key in (*_EDITS, *_WANTED) if len(key) == 1} | _FIRST | {"ctrl+d", "ctrl+u"})


@dataclass(slots=True)
class NormalMode:
    """What was pressed of a command of two letters."""

    begun: str = ""

    def press(self, field: TextArea, key: str) -> tuple[bool, str]:
        """Act on a key: whether typing goes on behind it, and what is wanted outside the field, "" for nothing."""
        whole, self.begun = self.begun + key, ""
        if whole in _FIRST:
            self.begun = whole
        elif whole in _EDITS:
            if name := _EDITS[whole]:
                getattr(field, name)()
            return whole in _INSERTS, ""
        return False, _WANTED.get(whole, "")
