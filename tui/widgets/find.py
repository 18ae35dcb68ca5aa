"""Search within a chat: a find bar above the prompt, with matches highlighted in the messages."""

import re
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.geometry import Region
from textual.widget import Widget
from textual.widgets import Collapsible, Input, Static

from tui.widgets.frame import CURRENT, MATCH
from tui.widgets.messages import MessageView
from tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from tui.widgets.markdown import AnswerMarkdown

Place = tuple[int, int]
"""A match: the index of its message, and its index among the matches in that message."""


class FindBar(Horizontal):
    """Takes the search text, shows the number of matches, and steps through them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "step(-1)", "Previous match", id="find.previous"),
        Binding("down", "step(1)", "Next match", id="find.next"),
    ]

    def __init__(self, transcript: Transcript) -> None:
        super().__init__(id="find")
        self._transcript = transcript
        self._field = Input(placeholder="Search in this chat", compact=True)
        self.count = Static("", id="count")
        self._pattern: re.Pattern[str] | None = None
        self._places: list[Place] = []
        self._at = 0
        self._then: Widget | None = None
        self._marked: dict[Static, tuple[Content, Content]] = {}  # original content, and with matches highlighted
        self._answers: list[AnswerMarkdown] = []  # with matches
        self.display = False

    def compose(self) -> ComposeResult:
        yield self._field
        yield self.count

    def open(self, text: str = "", then: Widget | None = None) -> None:
        """Open the bar. If it is already open, go to the previous match.

        then: gets the focus when Enter is pressed. None keeps the focus here, and Enter goes to the previous match.
        """
        self._then = then
        if self.display and not text:
            self.action_step(-1)
        self.display = True
        if text:
            self._field.value = text
        self._field.focus()

    def shut(self) -> None:
        """Remove the highlights and hide the bar."""
        self._unmark()
        self.display = False
        self._pattern, self._places = None, []
        with self.prevent(Input.Changed):
            self._field.value = ""

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search while the user types, starting at the last match."""
        pattern = re.compile(re.escape(event.value), re.IGNORECASE)
        self._pattern = pattern if event.value else None
        self._places = [
            (number, count)
            for number, message in enumerate(self._transcript.messages if event.value else ())
            for count, _ in enumerate(pattern.finditer(message.content))
        ]
        self._at = len(self._places) - 1
        self._go()

    def on_input_submitted(self) -> None:
        """Go to the previous match, since the search starts at the end; or move the focus to `then`."""
        if self._then is None:
            self.action_step(-1)
        else:
            self._then.focus()

    def action_step(self, step: int) -> None:
        """Go to the next (1) or previous (-1) match, wrapping around."""
        if self._places:
            self._at = (self._at + step) % len(self._places)
            self._go()

    def _go(self) -> None:
        count = len(self._places)
        self.count.update(f"{self._at + 1} of {count}" if count else "not found" if self._pattern else "")
        self._show()

    @work(exclusive=True, group="find")
    async def _show(self) -> None:
        """Highlight the matches in mounted messages, and scroll the current one into view."""
        self._unmark()
        if self._pattern is None or not self._places:
            return
        number, count = self._places[self._at]
        present = await self._transcript.reveal(number)
        for view in self._transcript.views:
            found = self._mark(view, self._pattern)
            if view is not present:
                continue
            if not found:  # the match is markup that is not rendered, such as asterisks
                view.scroll_visible(animate=False)
                continue
            self._bring(*found[min(count, len(found) - 1)])

    def _mark(self, view: MessageView, pattern: re.Pattern[str]) -> "list[tuple[Static | AnswerMarkdown, int, int]]":
        """Highlight a message's matches; returns (widget, start, end) for each; in an answer, (widget, number, -1)."""
        from tui.widgets.markdown import AnswerMarkdown  # imported late, as in tui.widgets.messages

        found: list[tuple[Static | AnswerMarkdown, int, int]] = []
        for part in view.walk_children():
            if isinstance(part, AnswerMarkdown):
                if count := part.mark(pattern):
                    self._answers.append(part)
                found += [(part, number, -1) for number in range(count)]
            if not isinstance(part, Static):
                continue
            before = part.visual
            if not isinstance(before, Content) or part.has_class("figures", "attachment"):
                continue
            spans = [match.span() for match in pattern.finditer(before.plain)]
            if spans:
                marked = before
                for start, end in spans:
                    marked = marked.stylize(MATCH, start, end)
                self._put(part, before, marked)
                found += [(part, start, end) for start, end in spans]
        return found

    def _bring(self, part: "Static | AnswerMarkdown", start: int, end: int) -> None:
        for folded in part.ancestors_with_self:
            if isinstance(folded, Collapsible):
                folded.collapsed = False
        before = Content()
        if isinstance(part, Static):
            before, marked = self._marked[part]
            self._put(part, before, marked.stylize(CURRENT, start, end))

        def scroll() -> None:
            width = part.content_size.width
            wrapped = len(before[:end].wrap(width)) if width else 1
            line = wrapped - 1 if isinstance(part, Static) else part.go(start)
            at = part.content_region.offset - self._transcript.content_region.offset
            region = Region(at.x, at.y + line, max(width, 1), 1).translate(self._transcript.scroll_offset)
            self._transcript.scroll_to_region(region, animate=False, center=True, force=True)

        self.call_after_refresh(scroll)

    def _put(self, static: Static, before: Content, marked: Content) -> None:
        static.update(marked)
        self._marked[static] = before, marked

    def _unmark(self) -> None:
        for static, (before, marked) in self._marked.items():
            if static.visual is marked:  # else its content has changed since
                static.update(before)
        self._marked.clear()
        for answer in self._answers:
            answer.mark(None)
        self._answers.clear()
