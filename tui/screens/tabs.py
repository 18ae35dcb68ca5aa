"""Several chats at once: each is a screen in its own mode. One is visible; the others keep running."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from textual.app import App

from localllm.errors import RequestError
from tui.screens.chat_view import ChatView

MOST = 9

TabT = TypeVar("TabT", bound=ChatView)


class Tabs(Generic[TabT]):
    """The open chats in order."""

    def __init__(self, app: App[Any], make: Callable[[str], TabT]) -> None:
        """make: builds a chat for the mode with the given name."""
        self._app, self._make = app, make
        self._made = 0
        self.all: list[TabT] = []

    @property
    def current(self) -> TabT:
        """The visible tab, or the one under the visible screen."""
        return next(tab for tab in self.all if tab.mode == self._app.current_mode)

    def add(self) -> TabT:
        """Append a new tab and its mode. Raises RequestError if MOST tabs are open."""
        if len(self.all) >= MOST:
            raise RequestError(f"{MOST} chats are open. /close closes one; it stays in the list (F3).")
        self._made += 1
        tab = self._make(f"tab-{self._made}")
        self.all.append(tab)
        self._app.add_mode(tab.mode, lambda: tab)
        return tab

    async def show(self, tab: TabT) -> None:
        """Bring a tab to the front."""
        await self._app.switch_mode(tab.mode)
        tab.unread = False
        self.redraw()

    async def step(self, step: int) -> None:
        """Bring the next (1) or previous (-1) tab to the front, wrapping around."""
        await self.show(self.all[(self.all.index(self.current) + step) % len(self.all)])

    async def close(self, tab: TabT) -> None:
        """Remove a tab. It must not be the only one, and its answer must have ended."""
        place = self.all.index(tab)
        if tab is self.current:
            await self.show(self.all[place - 1 if place else 1])
        self.all.remove(tab)
        self.redraw()
        await self._app.remove_mode(tab.mode)

    def redraw(self) -> None:
        """Redraw the tab titles and states."""
        current = self.current
        marks = [tab.mark() for tab in self.all]
        current.title_bar.show_tabs(marks, self.all.index(current))
