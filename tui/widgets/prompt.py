"""The prompt: an input field that grows with its text, with history, completions and vim keys.

No text is lost. What an earlier prompt or an edit replaces is set aside and comes back; `unsent` is all that the user
wrote and did not send.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from textual import work
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.binding import Binding, BindingType
from textual.events import Key, Paste
from textual.message import Message
from textual.widgets import TextArea

from localllm.background import in_thread
from localllm.chats import Attachment
from localllm.chats import Message as ChatMessage
from tui.attachments import Weight, mention_of, pasted
from tui.widgets.completion import Completion, Suggestion

# Longer pasted texts become attachments: they would push the question out of the field.
PASTED_LINES = 12
PASTED_CHARS = 2000

PAUSE_S = 0.3  # pause in typing before tokens are counted

_JOINERS = frozenset("\u200c\u200d")

# Without kitty's keyboard protocol, Alt+Enter arrives as ESC and a line end, which Textual would read as Enter.
for _sequence in ("\x1b\r", "\x1b\n"):
    ANSI_SEQUENCES_KEYS[_sequence] = (SimpleNamespace(value="alt+enter"),)  # type: ignore[index]


class Prompt(TextArea):
    """Enter sends. Shift+Enter, Alt+Enter, Ctrl+J, or Enter after a backslash insert a line break.

    Up on the first line and Down on the last one recall history.
    """

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
        Binding("ctrl+x", "begin_editor", "Editor", priority=True, id="prompt.editor", show=False),
        Binding("ctrl+e", "open_editor", "Editor", priority=True, show=False),
        Binding("ctrl+d", "leave", "Leave", priority=True, id="leave"),
    ]

    @dataclass
    class Sent(Message):
        """The user has submitted a prompt."""

        text: str

    class QueueChanged(Message):
        """A prompt was queued, or left the queue."""

    @dataclass
    class Wanted(Message):
        """A normal-mode key requests an action outside the field. what: one of the values of _WANTED."""

        what: str

    def __init__(
        self,
        commands: Sequence[Suggestion],
        count_tokens: Callable[[str], int | None],
        weigh: Callable[[str], Weight | None],
        newline: str,
    ) -> None:
        """commands: offered when the text starts with a slash. count_tokens: for the files that are offered.

        weigh: what a text ("" and commands too) and its attachments weigh, shown on the border; called in a thread.
        newline: the key that inserts a line break, as shown to the user.
        """
        super().__init__(
            id="prompt",
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder=f"Ask anything · / commands · @ files · {newline} new line",
            tab_behavior="focus",
        )
        self.sent: list[str] = []
        self.queued: list[str] = []  # to be sent when the running answer has ended
        self.pasted: dict[str, Attachment] = {}  # long pasted texts by the name that replaces them
        self.completion = Completion(commands, count_tokens)
        self._weigh = weigh
        self._place: int | None = None  # in _recalled
        self._recalled: list[str] = []  # the history as it is edited while the user steps through it, then the draft
        self._aside = ""  # the draft that an edit replaced
        self._written = False
        self.editing: ChatMessage | None = None  # the earlier message that the text will replace
        self._vim = False
        self._begun = ""  # the first letter of an incomplete two-letter command of vim's normal mode
        self.inserts = True  # False in vim's normal mode
        self._editor_begun = False  # whether Ctrl+X was the last key

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
        editing = "Editing an earlier message · Enter sends, Esc cancels" if self.editing else ""
        self.border_title = " · ".join(filter(None, [mode, editing])) or None

    def on_paste(self, event: Paste) -> None:
        """Turn a pasted or dropped file path, or a long text, into an attachment."""
        mention = mention_of(event.text)
        lines = event.text.splitlines()
        if mention is None and (len(event.text) > PASTED_CHARS or len(lines) > PASTED_LINES):
            attached = pasted("\n".join(lines))
            self.pasted[attached.name] = attached
            mention = f"@{attached.name}"
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
        self._editor_begun = False
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
        if not self.text.strip() or self.text.startswith("/"):
            self._show_weight(None)
        self.weigh_again()

    @work(exclusive=True, group="count")
    async def weigh_again(self) -> None:
        """Show on the border what the text weighs, after a pause in typing."""
        await asyncio.sleep(PAUSE_S)
        text = self.text
        weight = await in_thread(lambda: self._weigh(text))
        if self.text == text:
            self._show_weight(weight)

    def _show_weight(self, weight: Weight | None) -> None:
        self.border_subtitle = str(weight) if weight else None
        self.set_class(weight is not None and weight.is_too_much, "too-much")

    def action_send(self) -> None:
        """Submit the text and clear the field; the screen may return the text with `give_back`."""
        # Priority keys overtake queued characters; a callback runs after them.
        self.call_later(self._send)

    def _send(self) -> None:
        self.completion.shut()
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        if (len(before) - len(before.rstrip("\\"))) % 2:
            self.replace("\n", (row, column - 1), (row, column))
        elif self.text.strip():
            text = self.text
            self._leave_history()
            self.text = ""
            self.post_message(self.Sent(text))

    async def action_leave(self) -> None:
        await self.app.action_quit()

    def action_newline(self) -> None:
        self.call_later(self.insert, "\n")

    def action_begin_editor(self) -> None:
        self._editor_begun = True

    async def action_open_editor(self) -> None:
        self._editor_begun = False
        await self.run_action("app.command('editor')")

    def action_complete(self) -> None:
        length, value = self.completion.take()
        row, column = self.cursor_location
        self.replace(value, (row, column - length), (row, column))

    def action_mark(self, step: int) -> None:
        self.completion.move(step)

    def action_shut(self) -> None:
        self.completion.shut()

    @property
    def unsent(self) -> list[str]:
        """Every text that was written and not sent, the one in the field last."""
        written = self.text if not self.editing or self.text != self.editing.content else ""
        texts = [*self.queued, self._aside, *self._recalled[-1:], written]
        return [text for place, text in enumerate(texts) if text.strip() and text not in (*self.sent, *texts[:place])]

    def accept(self, text: str) -> None:
        """Add a text that was sent to the history, and return to the draft that it replaced."""
        self.keep(text)
        if self.editing is None:
            self._return_to_draft()

    def queue(self, text: str) -> None:
        """Keep a text for later, and return to the draft that it replaced."""
        self.queued.append(text)
        self._return_to_draft()
        self.post_message(self.QueueChanged())

    def unqueue(self, place: int) -> str:
        """Remove a text from the queue and return it."""
        self.post_message(self.QueueChanged())
        return self.queued.pop(place)

    def give_back_queue(self) -> None:
        """Put the queued texts back into the field."""
        if self.queued:
            self.give_back("\n".join(self.queued))
            self.queued.clear()
            self.post_message(self.QueueChanged())

    def keep(self, text: str) -> None:
        """Add a text to the history, where Up finds it."""
        if text.strip() and self.sent[-1:] != [text]:
            self.sent.append(text)

    def give_back(self, text: str) -> None:
        """Restore a text that could not be sent, before anything typed since."""
        self.put(f"{text}\n{self.text}" if self.text else text)

    def begin_edit(self, message: ChatMessage) -> None:
        """Start editing an earlier message, and show that on the border. The draft comes back with `end_edit`."""
        if self.editing is not None:
            self._keep_edit()
        elif self._place is not None:
            self._leave_history()
        else:
            self._aside = self.text
        self.editing = message
        self._show_mode()
        self.put(message.content)

    def end_edit(self, abandoned: bool = False) -> None:
        """Leave editing, and return to the draft. abandoned: the history keeps what was edited."""
        if abandoned:
            self._keep_edit()
            self.text = ""
        self.editing = None
        self._show_mode()
        self._return_to_draft()

    def free_edit(self) -> None:
        """Leave editing because its message is no longer shown: the text stays, unless a draft waits for its place."""
        self.end_edit(abandoned=bool(self._aside.strip()))

    def _keep_edit(self) -> None:
        if self.editing and self.text != self.editing.content:
            self.keep(self.text)

    def _return_to_draft(self) -> None:
        """Put the draft back that was set aside, before anything typed since."""
        draft, self._aside = self._aside, ""
        if draft:
            self.give_back(draft)

    def replace_draft(self, text: str) -> None:
        """Put another text into the field; the history keeps what was there."""
        self.keep(self.text)
        self.put(text)

    def put(self, text: str) -> None:
        """Replace the text and move the cursor to its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Give completions their keys only while they are open, and the history only on the first or last line."""
        if action in ("complete", "mark", "shut"):
            return self.completion.is_open
        if action in ("begin_editor", "open_editor"):  # with a selection, Ctrl+X cuts it
            return self._editor_begun if action == "open_editor" else not self.selected_text
        if action == "normal":
            return self.takes_escape and not self.completion.is_open
        if action == "leave":  # with text, Ctrl+D deletes to the right; in normal mode, it scrolls
            return not self.text and self.inserts
        row, last = self.cursor_location[0], self.document.line_count - 1
        at_edge = row == 0 if parameters == (-1,) else row == last and self._place is not None
        return action != "recall" or (at_edge and bool(self.sent or self.queued))

    def action_recall(self, step: int) -> None:
        """Step through the history; after its newest entry comes the unsent draft. Changes of entries are kept.

        In an empty field, Up takes the last queued prompt back first.
        """
        if self.queued and not self.text and step < 0:
            self.put(self.unqueue(-1))
            return
        if self._place is None:
            self._recalled = [*self.sent, self.text]
            self._place = len(self._recalled) - 1
        self._recalled[self._place] = self.text
        self._place = min(max(self._place + step, 0), len(self._recalled) - 1)
        self.put(self._recalled[self._place])
        if self._place == len(self._recalled) - 1:
            self._place, self._recalled = None, []
        self.completion.shut()

    def _leave_history(self) -> None:
        """Stop stepping through the history: set the draft aside, and keep entries that were changed."""
        if self._place is None:
            return
        changed = [text for place, text in enumerate(self._recalled[:-1]) if place != self._place]
        self._aside, self._place, self._recalled = self._recalled[-1], None, []
        for text in changed:
            if text not in self.sent:
                self.keep(text)


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
