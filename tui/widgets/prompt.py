"""The prompt: an input field that grows with its text, with history, completions and vim keys."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.events import Key, Paste
from textual.message import Message
from textual.widgets import TextArea

from localllm.text import counted
from tui.attachments import mention_of
from tui.background import in_thread
from tui.sessions import Attachment
from tui.sessions import Message as ChatMessage
from tui.widgets.completion import Completion, Suggestion

# Longer pasted texts become attachments: they would push the question out of the field.
PASTED_LINES = 12
PASTED_CHARS = 2000

PAUSE_S = 0.3  # pause in typing before tokens are counted

_JOINERS = frozenset("\u200c\u200d")


class Prompt(TextArea):
    """Enter sends; Shift+Enter, Alt+Enter or Ctrl+J insert a line break; Up and Down at the edges recall history."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "complete", "Complete", priority=True, id="prompt.complete", show=False),
        Binding("up", "mark(-1)", "Mark above", priority=True, id="prompt.above", show=False),
        Binding("down", "mark(1)", "Mark below", priority=True, id="prompt.below", show=False),
        Binding("escape", "shut", "Close", priority=True, id="prompt.close", show=False),
        Binding("escape", "normal", "Normal mode", priority=True, id="prompt.normal", show=False),
        Binding("enter", "send", "Send", priority=True, id="prompt.send", show=False),
        Binding("shift+enter,alt+enter,ctrl+j", "newline", "New line", priority=True, id="prompt.newline", show=False),
        Binding("up", "recall(-1)", "Earlier prompt", priority=True, id="prompt.earlier", show=False),
        Binding("down", "recall(1)", "Later prompt", priority=True, id="prompt.later", show=False),
        Binding("ctrl+d", "leave", "Leave", priority=True, id="leave"),
    ]

    @dataclass
    class Sent(Message):
        """The user has submitted a prompt."""

        text: str

    @dataclass
    class Wanted(Message):
        """A normal-mode key requests an action outside the field. what: one of the values of _WANTED."""

        what: str

    def __init__(self, commands: Sequence[Suggestion], count_tokens: Callable[[str], int | None]) -> None:
        """commands: offered when the text starts with a slash. count_tokens: the text's count, shown on the border."""
        super().__init__(
            id="prompt",
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder="Ask anything · / for commands · @ for files",
            tab_behavior="focus",
        )
        self.sent: list[str] = []
        self.pasted: dict[str, Attachment] = {}  # long pasted texts by the name that replaces them
        self.completion = Completion(commands, count_tokens)
        self._count_tokens = count_tokens
        self._place: int | None = None
        self._draft = ""
        self._written = False
        self.editing: ChatMessage | None = None  # the earlier message that the text will replace
        self._vim = False
        self._begun = ""  # the first letter of an incomplete two-letter command of vim's normal mode
        self.inserts = True  # False in vim's normal mode

    def use_vim(self, wanted: bool) -> None:
        """Turn vim keys on or off; starts in insert mode."""
        self._vim, self._begun, self.inserts = wanted, "", True
        self._show_mode()

    @property
    def takes_escape(self) -> bool:
        """Whether Esc leaves insert mode."""
        return self._vim and self.inserts and self.has_focus

    def press(self, key: str) -> None:
        """Handle a key in normal mode."""
        whole, self._begun = self._begun + key, ""
        if whole in _FIRST:
            self._begun = whole
        elif whole in _WANTED:
            self.post_message(self.Wanted(_WANTED[whole]))
        elif whole in _EDITS:
            if name := _EDITS[whole]:
                getattr(self, name)()
            self.inserts = whole in _INSERTS
            self._show_mode()

    def action_normal(self) -> None:
        self.call_later(self._leave_insert)

    def _leave_insert(self) -> None:
        self.completion.shut()
        self.inserts = False
        self._show_mode()

    def _show_mode(self) -> None:
        """Show vim's mode and a running edit on the border."""
        mode = "" if not self._vim else "INSERT" if self.inserts else "NORMAL"
        editing = "Editing an earlier message · Enter sends, Esc gives up" if self.editing else ""
        self.border_title = " · ".join(filter(None, [mode, editing])) or None

    def on_paste(self, event: Paste) -> None:
        """Turn a pasted or dropped file path, or a long text, into an attachment."""
        mention = mention_of(event.text)
        lines = event.text.splitlines()
        if mention is None and (len(event.text) > PASTED_CHARS or len(lines) > PASTED_LINES):
            text = "\n".join(lines)
            name = f"pasted-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:6]}"
            self.pasted[name] = Attachment(name, text)
            mention = f"@{name}"
        if mention is None:
            return
        event.prevent_default()
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        self.insert(f"{' ' if before and not before.endswith(' ') else ''}{mention} ")

    async def _on_key(self, event: Key) -> None:
        """Accept zero-width joiners, which Persian, Hindi and emoji families need and Textual ignores.

        In normal mode, keys are commands.
        """
        key = event.character if event.is_printable and event.character else event.key
        if not self.inserts and (event.is_printable or key in KEYS):
            event.stop()
            event.prevent_default()
            self.press(key)
        elif event.character in _JOINERS:
            event.stop()
            event.prevent_default()
            self.insert(event.character)
        else:
            await super()._on_key(event)

    def on_text_area_changed(self) -> None:
        if bool(self.text) != self._written:
            self._written = bool(self.text)
            self.refresh_bindings()
        row, column = self.cursor_location
        self.completion.offer(self.document.get_line(row)[:column], self.text)
        if self.text.strip() and not self.text.startswith("/"):
            self._count(self.text)
        else:
            self.border_subtitle = None

    @work(exclusive=True, group="count")
    async def _count(self, text: str) -> None:
        await asyncio.sleep(PAUSE_S)
        count = await in_thread(lambda: self._count_tokens(text))
        if count is not None and self.text == text:
            self.border_subtitle = counted(count, "token")

    def action_send(self) -> None:
        """Submit the text and clear the field; the screen may return the text with `give_back`."""
        # Priority keys overtake queued characters; a callback runs after them.
        self.call_later(self._send)

    def _send(self) -> None:
        self.completion.shut()
        if self.text.strip():
            text, self.text = self.text, ""
            self.post_message(self.Sent(text))

    async def action_leave(self) -> None:
        await self.app.action_quit()

    def action_newline(self) -> None:
        self.call_later(self.insert, "\n")

    def action_complete(self) -> None:
        length, value = self.completion.take()
        row, column = self.cursor_location
        self.replace(value, (row, column - length), (row, column))

    def action_mark(self, step: int) -> None:
        self.completion.move(step)

    def action_shut(self) -> None:
        self.completion.shut()

    def accept(self, text: str) -> None:
        """Add a text that was sent to the history."""
        if self.sent[-1:] != [text]:
            self.sent.append(text)
        self._place = None

    def give_back(self, text: str) -> None:
        """Restore a text that could not be sent, before anything typed since."""
        self.put(f"{text}\n{self.text}" if self.text else text)

    def begin_edit(self, message: ChatMessage) -> None:
        """Start editing an earlier message, and show that on the border."""
        self.editing = message
        self._show_mode()
        self.put(message.content)

    def end_edit(self, empty: bool = False) -> None:
        """Leave editing. empty: the edit was abandoned, so clear the text."""
        self.editing = None
        self._show_mode()
        self._place = None
        if empty:
            self.text = ""

    def put(self, text: str) -> None:
        """Replace the text and move the cursor to its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Give completions their keys only while they are open, and the history only on the first or last line."""
        if action in ("complete", "mark", "shut"):
            return self.completion.is_open
        if action == "normal":
            return self.takes_escape and not self.completion.is_open
        if action == "leave":  # with text, Ctrl+D deletes to the right; in normal mode, it scrolls
            return not self.text and self.inserts
        if action == "recall":
            row, last = self.cursor_location[0], self.document.line_count - 1
            at_edge = row == 0 if parameters == (-1,) else row == last and self._place is not None
            return at_edge and bool(self.sent)
        return True

    def action_recall(self, step: int) -> None:
        """Step through the history; after its newest entry comes the unsent draft."""
        if self._place is None:
            self._place, self._draft = len(self.sent), self.text
        self._place = max(self._place + step, 0)
        if self._place >= len(self.sent):
            self._place = None
            self.put(self._draft)
        else:
            self.put(self.sent[self._place])
        self.completion.shut()


# Normal-mode commands on the field -> TextArea method. Those that switch to insert mode are also in _INSERTS.
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
# Normal-mode commands outside the field -> Prompt.Wanted.what.
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
_FIRST = frozenset({"g", "d", "c"})  # first letters of two-letter commands
KEYS = frozenset({key for key in (*_EDITS, *_WANTED) if len(key) == 1} | _FIRST | {"ctrl+d", "ctrl+u"})
