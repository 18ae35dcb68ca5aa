"""The scrolling list of messages. Only a window of a long conversation is mounted, so its length costs nothing."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual.containers import VerticalScroll
from textual.widget import Widget

from localllm.chats import Message, Role
from localllm.chats.conversation import Conversation
from localllm.text import harmless
from tui.widgets.frame import Note, Welcome
from tui.widgets.messages import AnswerView, MessageView, ToolView, UserView

if TYPE_CHECKING:
    from tui.widgets.markdown import AnswerMarkdown

WINDOW = 8  # messages


class Transcript(VerticalScroll, can_focus=False):
    """Shows the end of a conversation and follows it until the user scrolls; scrolling up mounts earlier messages."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(id="transcript")
        self._conversation = conversation
        self._first = self._last = 0  # the mounted range of messages, end exclusive
        self._growing = False
        self._following = False
        self._changing = asyncio.Lock()  # serializes changes of the mounted messages

    @property
    def messages(self) -> Sequence[Message]:
        return self._conversation.messages

    @property
    def views(self) -> list[MessageView]:
        """The mounted messages, first to last."""
        return list(self.query(MessageView))

    def selected(self, role: Role | None = None) -> MessageView | None:
        """The focused message if it has this role, else the last one of this role."""
        views = [view for view in self.views if role is None or view.message.role is role]
        focused = self.screen.focused
        if isinstance(focused, MessageView) and focused in views:
            return focused
        return views[-1] if views else None

    def select(self, step: int) -> bool:
        """Focus the next message up (-1) or down (1); False past the last one."""
        views, focused = self.views, self.screen.focused
        index = views.index(focused) if isinstance(focused, MessageView) else len(views)
        index = max(index + step, 0)
        if index >= len(views):
            return False
        views[index].focus()
        return True

    async def show(self) -> None:
        """Mount the conversation's last messages and go to their end; show the welcome if there are none."""
        async with self._changing:
            await self._mount_window(max(len(self.messages) - WINDOW, 0), len(self.messages))
            if self.messages:
                self._follow()
            else:
                await self.mount(Welcome())

    async def _mount_window(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        await self._remove([*self.children])
        await self.mount_all(self._view(message) for message in self.messages[first:last])

    async def _remove(self, views: Sequence[Widget]) -> None:
        """Unmount messages, and free what was drawn of them: a cache of Textual's keeps their StylesCache alive."""
        parts = [part for view in views for part in view.walk_children(Widget, with_self=True)]
        await self.remove_children(views)
        for part in parts:
            part._styles_cache.clear()

    async def reveal(self, number: int) -> MessageView:
        """Mount a message with some around it, if it is not mounted. Does not scroll to it."""
        async with self._changing:
            self.anchor(False)
            self._following = False
            if not self._first <= number < self._last:
                begin = max(number - WINDOW // 2, 0)
                await self._mount_window(begin, min(begin + WINDOW, len(self.messages)))
            return self.views[number - self._first]

    async def append(self, message: Message) -> MessageView:
        """Show a message that was added at the end, and scroll to it. Unmounts the first ones of a long window."""
        view = self._view(message)
        async with self._changing:
            await self.query(Welcome).remove()
            await self.query(Note).remove()  # a note is dismissed by the next message
            if self._last + 1 < len(self.messages):  # the window is in an earlier part
                end = len(self.messages) - 1
                await self._mount_window(max(end - WINDOW, 0), end)
            await self.mount(view)
            self._last += 1
            excess = self.views[: -2 * WINDOW]
            self._first += len(excess)
            await self._remove(excess)
            self._follow()
        return view

    async def note(self, note: Note) -> None:
        """Show a note below the messages, scrolled to its start; replaces an earlier note."""
        async with self._changing:
            await self.query(Note).remove()
            await self.mount(note)
        self.screen.refresh_bindings()  # it can be closed
        self.call_after_refresh(self._go_to, note)

    def show_error(self, text: str) -> None:
        """Show an error note below the messages."""
        self.run_worker(self.note(Note(text, failure=True)))

    def _view(self, message: Message) -> MessageView:
        variant = self._conversation.variant(message)
        if message.role is Role.ASSISTANT:
            return AnswerView(message, variant, self._conversation.checker(message))
        return (UserView if message.role is Role.USER else ToolView)(message, variant)

    def _go_to(self, note: Note) -> None:
        if note.size.height > self.size.height:  # anchored at the end, only its end would be visible
            self.anchor(False)
            self._following = False
        note.scroll_visible(top=True, animate=False, immediate=True)

    def tell(self, notice: str, as_note: bool = True) -> None:
        """Show what is to be known about the model, in place of what was said about another one.

        It is a part of the welcome if there are no messages yet, else a note, if as_note.
        """
        self.query(".of-model").remove()
        welcome = self.query(Welcome)
        if welcome:
            welcome.first().tell(notice)
        elif notice and as_note:
            note = Note(notice)
            note.add_class("of-model")
            self.run_worker(self.note(note))

    def forget_errors(self) -> None:
        """Remove the error that is shown, because the next model makes it old."""
        self.query(".failure").remove()

    def on_answer_markdown_link_clicked(self, event: "AnswerMarkdown.LinkClicked") -> None:
        """Copy a link from an answer; never open it."""
        self.app.copy_to_clipboard(event.href)
        self.notify(f"Copied {harmless(event.href)}", markup=False)

    def on_resize(self) -> None:
        """Update the anchor: the messages may now overflow the screen, or no longer."""
        self._anchor_if_full()

    def watch_virtual_size(self) -> None:
        """Update the anchor: the messages may now overflow the screen, or no longer."""
        self._anchor_if_full()

    def _follow(self) -> None:
        """Scroll to the end and stay there until the user scrolls. Messages that fit the screen start at its top."""
        self.anchor(False)
        self._following = True
        self.call_after_refresh(self._anchor_if_full)

    def _anchor_if_full(self) -> None:
        # Anchored content lower than the screen would be pushed to its bottom, and content added later below it.
        full = self.max_scroll_y > 0
        if self._following and full != self.is_anchored:
            self.anchor(full)

    def watch_scroll_y(self, old: float, new: float) -> None:
        """Mount earlier or later messages when the first or last mounted one comes into view."""
        super().watch_scroll_y(old, new)
        if self._growing:
            return
        if new <= 0 < old and self._first:
            self._growing = True
            self.run_worker(self._grow())
        elif old < new >= self.max_scroll_y and self._last < len(self.messages):
            self._growing = True
            self.run_worker(self._grow_down())

    async def _grow_down(self) -> None:
        async with self._changing:
            end = min(self._last + WINDOW, len(self.messages))
            await self.mount_all(self._view(message) for message in self.messages[self._last : end])
            self._last = end
            self._growing = False

    async def _grow(self) -> None:
        async with self._changing:
            if self.scroll_y > 0:  # scrolled away, or other messages are shown
                self._growing = False
                return
            begin = max(self._first - WINDOW, 0)
            earlier = [self._view(message) for message in self.messages[begin : self._first]]
            height = self.virtual_size.height
            await self.mount_all(earlier, before=0)
            self._first = begin

        def stay() -> None:
            self.scroll_to(y=self.virtual_size.height - height, animate=False, immediate=True)
            self._growing = False

        self.call_after_refresh(stay)
