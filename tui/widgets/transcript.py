"""The messages, scrolled. Only a window of a long conversation is mounted, so that its length costs nothing."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from textual.containers import VerticalScroll

from localllm.text import harmless
from tui.sessions import Message, Role
from tui.widgets.frame import Note, Welcome
from tui.widgets.messages import MessageView, view_of

if TYPE_CHECKING:
    from textual.widgets import Markdown

    from localllm.documents.quotations import QuotationChecker

WINDOW = 24


class Transcript(VerticalScroll, can_focus=False):
    """Shows the end of a conversation and follows it until the user scrolls; scrolling to the top shows earlier ones.

    variant tells which of its variants a message is, checker what checks its quotations.
    """

    def __init__(
        self,
        variant: Callable[[Message], tuple[int, int]],
        checker: Callable[[Message], "QuotationChecker | None"] = lambda _message: None,
    ) -> None:
        super().__init__(id="transcript")
        self._variant = variant
        self._checker = checker
        self._messages: Sequence[Message] = ()
        self._first = self._last = 0  # which of the messages are mounted; the last one is not
        self._growing = False
        self._following = False
        self._changing = asyncio.Lock()  # what is shown changes in steps that wait for each other

    @property
    def views(self) -> list[MessageView]:
        """The mounted messages, first to last."""
        return list(self.query(MessageView))

    def selected(self, role: Role | None = None) -> MessageView | None:
        """The message that has the focus, else the last one of this role."""
        views = [view for view in self.views if role is None or view.message.role is role]
        focused = self.screen.focused
        if isinstance(focused, MessageView) and focused in views:
            return focused
        return views[-1] if views else None

    def select(self, step: int) -> bool:
        """Give the focus to the next message up (-1) or down; False past the last one."""
        views, focused = self.views, self.screen.focused
        index = views.index(focused) if isinstance(focused, MessageView) else len(views)
        index = max(index + step, 0)
        if index >= len(views):
            return False
        views[index].focus()
        return True

    async def show(self, messages: Sequence[Message]) -> None:
        """Show other messages, from the end on. The sequence is kept, so that earlier ones can follow."""
        async with self._changing:
            self._messages = messages
            await self._mount_window(max(len(messages) - WINDOW, 0), len(messages))
            self._follow()

    async def _mount_window(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        await self.remove_children()
        await self.mount_all(self._view(message) for message in self._messages[first:last])

    async def reveal(self, number: int) -> MessageView:
        """Mount a message, if it is not, with some before and behind it; it is not scrolled to."""
        async with self._changing:
            self.anchor(False)
            self._following = False
            if not self._first <= number < self._last:
                begin = max(number - WINDOW // 2, 0)
                await self._mount_window(begin, min(begin + WINDOW, len(self._messages)))
            return self.views[number - self._first]

    async def append(self, message: Message) -> MessageView:
        """Show a message that was added at the end, and go there. The first of a long window are unmounted."""
        view = self._view(message)
        async with self._changing:
            await self.query(Welcome).remove()
            await self.query(Note).remove()  # the user has read it and goes on
            if self._last + 1 < len(self._messages):  # an earlier part is shown
                end = len(self._messages) - 1
                await self._mount_window(max(end - WINDOW, 0), end)
            await self.mount(view)
            self._last += 1
            excess = self.views[: -2 * WINDOW]
            self._first += len(excess)
            await self.remove_children(excess)
            self._follow()
        return view

    async def note(self, note: Note) -> None:
        """Show something below the messages, from its beginning on, in place of what was shown so before."""
        async with self._changing:
            await self.query(Note).remove()
            await self.mount(note)
        self.screen.refresh_bindings()  # it can be closed
        self.call_after_refresh(self._go_to, note)

    def show_error(self, text: str) -> None:
        """Say what is wrong, and what to do, below the messages."""
        self.run_worker(self.note(Note(text, failure=True)))

    def _view(self, message: Message) -> MessageView:
        checker = self._checker(message) if message.role is Role.ASSISTANT else None
        return view_of(message, self._variant(message), checker)

    def _go_to(self, note: Note) -> None:
        if note.size.height > self.size.height:  # its end alone would be seen
            self.anchor(False)
            self._following = False
        note.scroll_visible(top=True, animate=False, immediate=True)

    async def welcome(self, messages: Sequence[Message]) -> None:
        """Show where to begin, until the first message is appended."""
        async with self._changing:
            await self.remove_children()
            self._messages, self._first, self._last = messages, 0, 0
            await self.mount(Welcome())

    def tell(self, notice: str) -> None:
        """Say something in passing: where nothing has been said yet, it stands there and covers nothing."""
        welcome = self.query(Welcome)
        if welcome:
            welcome.first().tell(notice)
        else:
            self.run_worker(self.note(Note(notice)))

    def on_markdown_link_clicked(self, event: "Markdown.LinkClicked") -> None:
        """A link that a model wrote is copied, never opened."""
        self.app.copy_to_clipboard(event.href)
        self.notify(f"Copied {harmless(event.href)}", markup=False)

    def on_resize(self) -> None:
        """The messages may have become higher than the screen, or lower."""
        self._anchor_if_full()

    def watch_virtual_size(self) -> None:
        """Keep to the end while there is more than the screen holds."""
        self._anchor_if_full()

    def _follow(self) -> None:
        """Go to the end and stay there until the user scrolls. Few messages stand at the top."""
        self.anchor(False)
        self._following = True
        self.call_after_refresh(self._anchor_if_full)

    def _anchor_if_full(self) -> None:
        # Textual would push what is lower than the screen down to its bottom, and what is added then below it.
        full = self.max_scroll_y > 0
        if self._following and full != self.is_anchored:
            self.anchor(full)

    def watch_scroll_y(self, old: float, new: float) -> None:
        """Mount earlier messages when the first one that is mounted comes into view."""
        super().watch_scroll_y(old, new)
        if self._growing:
            return
        if new <= 0 < old and self._first:
            self._growing = True
            self.run_worker(self._grow())
        elif old < new >= self.max_scroll_y and self._last < len(self._messages):
            self._growing = True
            self.run_worker(self._grow_down())

    async def _grow_down(self) -> None:
        async with self._changing:
            end = min(self._last + WINDOW, len(self._messages))
            await self.mount_all(self._view(message) for message in self._messages[self._last : end])
            self._last = end
            self._growing = False

    async def _grow(self) -> None:
        async with self._changing:
            if self.scroll_y > 0:  # something else is shown by now
                self._growing = False
                return
            begin = max(self._first - WINDOW, 0)
            earlier = [self._view(message) for message in self._messages[begin : self._first]]
            height = self.virtual_size.height
            await self.mount_all(earlier, before=0)
            self._first = begin

        def stay() -> None:
            self.scroll_to(y=self.virtual_size.height - height, animate=False, immediate=True)
            self._growing = False

        self.call_after_refresh(stay)
