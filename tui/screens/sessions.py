"""The list of sessions: search, open, rename, delete and undo."""

import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.chats import SessionStore, SessionSummary
from localllm.chats.store import change_tags, split_search
from localllm.errors import LocalLLMError
from localllm.text import counted, harmless
from tui.backend import short_name
from tui.status import MUTED
from tui.widgets.frame import KeyBar, Notice

_SEARCH = "Search titles and messages; #tag"
AROUND = 24  # characters of a message shown before a match; twice as many after it


class SessionsScreen(ModalScreen[int | None]):
    """Returns the id of the session to open, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open", id="sessions.open", priority=True),
        Binding("up", "move(-1)", "Up", id="list.up", show=False, priority=True),
        Binding("down", "move(1)", "Down", id="list.down", show=False, priority=True),
        Binding("ctrl+e", "rename", "Rename", id="sessions.rename", priority=True),
        Binding("ctrl+t", "tag", "Tags", id="sessions.tag", priority=True),
        Binding("ctrl+d", "delete", "Delete", id="sessions.delete", priority=True),
        Binding("ctrl+z", "undo", "Undo", id="sessions.undo", priority=True),
        Binding("escape", "leave", "Back", id="list.back", priority=True),
    ]

    def __init__(self, store: SessionStore, search: str = "") -> None:
        super().__init__()
        self._store = store
        self._search = search
        self.sessions: list[SessionSummary] = []
        self._deleted: list[int] = []
        self.edited: int | None = None  # the session whose title or tags the field edits
        self._edit: Callable[[int, str], None] = store.rename
        # Kept as attributes, not queried: a key may arrive after the widgets have been unmounted.
        self.field = Input(search, placeholder=_SEARCH)
        self.entries = OptionList(markup=False)

    def compose(self) -> ComposeResult:
        with Vertical(classes="panel"):
            yield Static("Chats", classes="heading")
            yield from (self.field, self.entries)
            yield Notice()
            yield KeyBar(palette=False)

    def on_mount(self) -> None:
        self._list()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self.edited is None:
            self._search = event.value
            self._list()

    def action_open(self) -> None:
        """Open the highlighted session, or accept the new title or tags."""
        # Priority keys overtake queued characters. Queueing on the field, then here, waits for them and their effects.
        self.field.call_later(self.call_later, self._open)

    def _open(self) -> None:
        if self.edited is None:
            if (marked := self._marked()) is not None:
                self.dismiss(marked.id)
            return
        if text := self.field.value.strip():
            self._act(lambda identity: self._edit(identity, text), self.edited)
        self._end_edit()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self.sessions[event.option_index].id)

    def action_leave(self) -> None:
        if self.edited is None:
            self.dismiss(None)
        else:
            self._end_edit()

    def action_move(self, step: int) -> None:
        entries = self.entries
        if self.sessions:
            entries.highlighted = ((entries.highlighted or 0) + step) % len(self.sessions)

    def action_rename(self) -> None:
        if (marked := self._marked()) is not None:
            self._begin_edit(marked.id, self._store.rename, marked.title, "New title")

    def action_tag(self) -> None:
        if (marked := self._marked()) is not None:
            self._begin_edit(marked.id, partial(change_tags, self._store), "", "Tags to add; -tag removes one")

    def _begin_edit(self, session_id: int, edit: Callable[[int, str], None], text: str, hint: str) -> None:
        self.edited, self._edit = session_id, edit
        self.field.value, self.field.placeholder = text, hint
        self.field.focus()

    def action_delete(self) -> None:
        if (marked := self._marked()) is not None and self._act(self._store.delete, marked.id):
            self._deleted.append(marked.id)
            self.refresh_bindings()
            self.notify(f"Deleted {marked.title!r}. Ctrl+Z brings it back.", markup=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable Undo only if there is a deleted session to restore."""
        return bool(self._deleted) if action == "undo" else True

    def action_undo(self) -> None:
        if self._deleted and self._act(self._store.restore, self._deleted[-1]):
            self._deleted.pop()
            self.refresh_bindings()

    def _end_edit(self) -> None:
        self.edited = None
        field = self.field
        field.value, field.placeholder = self._search, _SEARCH
        self._list()

    def _act(self, change: Callable[[int], None], session_id: int) -> bool:
        """Change a session and list again; False if that failed, after showing why."""
        try:
            change(session_id)
        except LocalLLMError as error:
            self.notify(str(error), severity="error", markup=False)
            return False
        finally:
            self._list()
        return True

    def _marked(self) -> SessionSummary | None:
        place = self.entries.highlighted
        return self.sessions[place] if place is not None and place < len(self.sessions) else None

    def _list(self) -> None:
        search, tags = split_search(self._search)
        try:
            self.sessions = self._store.sessions(search, tags=tags)
        except LocalLLMError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        entries = self.entries
        entries.clear_options()
        entries.add_options(Option(_row(session, search)) for session in self.sessions)
        if self._search and not self.sessions:
            entries.add_option(Option("Nothing found.", disabled=True))
        entries.highlighted = 0 if self.sessions else None


def snippet(text: str, search: str) -> tuple[str, str, str]:
    """One line of context around the match: the text before it, the match, the text after it."""
    line = " ".join(text.split())
    at = line.casefold().find(" ".join(search.split()).casefold())
    if at < 0:  # no match within the normalized line
        return line[: 2 * AROUND], "", ""
    end = at + len(" ".join(search.split()))
    before = line[max(at - AROUND, 0) : at]
    return ("…" if at > AROUND else "") + before, line[at:end], line[end : end + 2 * AROUND]


def _row(session: SessionSummary, search: str = "") -> Content:
    detail = (
        f"{age(time.time() - session.updated)} · {counted(session.messages, 'message')} · {short_name(session.model)}"
    )
    tags = harmless("".join(f"  #{tag}" for tag in session.tags))
    title = Content.assemble((harmless(session.title), "bold"), (tags, "$accent"))
    row = Content.assemble(title, "\n", (harmless(detail), MUTED))
    if not session.found:
        return row
    before, itself, behind = map(harmless, snippet(session.found, search))
    return Content.assemble(row, "\n", before, (itself, "bold $accent"), behind)


def age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
