"""Message widgets: user messages, answers and tool results."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Collapsible, Static

from gguf_io.media import is_sound
from localllm.answer.event import AnswerPart, PartKind
from localllm.chats import OUTPUT, Attachment, Message
from localllm.text import counted, harmless, human_bytes, human_seconds, shortened
from tui.widgets.frame import preview
from tui.widgets.pictures import DrawnPicture

if TYPE_CHECKING:
    from localllm.quoting.quotations import QuotationChecker

MAX_NAMED = 3
MOST_LINES = 20  # of a command's output that is shown at once; Ctrl+T shows the rest
MAX_ARGUMENTS = 300  # characters shown of a call's arguments; the approval dialog shows all of them


class MessageView(Vertical, can_focus=True, can_focus_children=False):
    """A message; while it is selected, key bindings run commands on it.

    Only keys select it: a click or a drag that selects text must not change what keys do. No letter is bound, so that
    typing always reaches the prompt.
    """

    FOCUS_ON_CLICK = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+e", "app.command('edit')", "Edit", id="message.edit"),
        Binding("ctrl+r", "app.command('regenerate')", "Regenerate", id="message.regenerate"),
        Binding("ctrl+o", "app.command('fork')", "Fork", id="message.fork"),
        Binding("ctrl+y", "app.command('copy')", "Copy", id="message.copy"),
        Binding("ctrl+b", "app.command('code')", "Copy code", id="message.code"),
        Binding("ctrl+t", "app.command('think')", "Thinking", id="message.think"),
        Binding("left", "screen.variant(-1)", "Variant", id="message.variant.earlier"),
        Binding("right", "screen.variant(1)", "Variant", id="message.variant.later", show=False),
        Binding("up", "screen.select(-1)", "Up", id="message.up", show=False),
        Binding("down", "screen.select(1)", "Down", id="message.down", show=False),
    ]

    def __init__(self, message: Message, variant: tuple[int, int] = (1, 1)) -> None:
        """variant: the message's 1-based position among its variants, and their count."""
        super().__init__(classes=f"message {message.role}")
        self.message = message
        self.variant = variant

    def toggle(self) -> None:
        """Show or hide the results of tools and commands."""
        for folded in self.query(Collapsible):
            folded.collapsed = not folded.collapsed

    def _variant_mark(self) -> list[str]:
        return [f"◂ {self.variant[0]}/{self.variant[1]} ▸"] if self.variant[1] > 1 else []


class UserView(MessageView):
    """A user message and the names of its attachments."""

    def compose(self) -> ComposeResult:
        """Plain text: the user's text is not parsed as markup."""
        yield Static(harmless(self.message.content), markup=False, classes="said")
        excerpts = [file for file in self.message.attachments if file.line]
        if excerpts:
            places = ", ".join(file.label for file in excerpts)
            text = f"▤ {counted(len(excerpts), 'excerpt')}{_tokens(excerpts)} · {places}"
            yield Static(harmless(text), markup=False, classes="attachment")
        pages: dict[str, list[Attachment]] = {}
        for file in self.message.attachments:
            if file.picture and file.page and not file.line:
                pages.setdefault(file.name, []).append(file)
            elif not file.line:
                yield from self._file(file)
        for name, drawings in pages.items():
            yield from self._pages(name, drawings)
        for mark in self._variant_mark():
            yield Static(mark, classes="figures")

    def _file(self, file: Attachment) -> ComposeResult:
        tokens = _tokens([file])
        if file.name == OUTPUT and self.message.content.startswith("!"):
            lines = file.text.count("\n") + 1
            title: Any = Content(f"▤ {counted(lines, 'line')}{tokens}")
            shown = Static(harmless(file.text), markup=False)
            yield Collapsible(shown, title=title, collapsed=lines > MOST_LINES, classes="result")
            return
        data = file.picture_data()
        size = f" · {human_bytes(len(data))}" if data else ""
        yield Static(harmless(f"{'▣' if data else '▤'} {file.label}{size}{tokens}"), markup=False, classes="attachment")
        if data and not is_sound(data):
            yield DrawnPicture(data)

    def _pages(self, name: str, pages: Sequence[Attachment]) -> ComposeResult:
        """The pages of a PDF that are pictures; only the first is drawn."""
        text = f"▣ {name} · {counted(len(pages), 'page')} as pictures{_tokens(pages)}"
        yield Static(harmless(text), markup=False, classes="attachment")
        yield DrawnPicture(pages[0].picture_data())


class AnswerView(MessageView):
    """An answer, as streaming Markdown. `add` appends to it, `finish` ends it."""

    def __init__(
        self, message: Message, variant: tuple[int, int] = (1, 1), checker: "QuotationChecker | None" = None
    ) -> None:
        """checker: checks its quotations; None if there are no documents to quote."""
        from tui.widgets.markdown import AnswerMarkdown  # slow to import; not needed at startup

        super().__init__(message, variant)
        self._checker = checker
        self._markdown = AnswerMarkdown(harmless(self._checked(message.content, message.finish_reason is not None)))
        self._end = Static("", classes="figures")
        # These are mounted when there is something to show. They are attributes, not queried: parts of an answer may
        # arrive after the widgets have been unmounted.
        self._reasoning = Static("", classes="reasoning", markup=False)
        self._thinking = Collapsible(self._reasoning, title="Thinking", classes="thinking", collapsed=True)
        self._calls = Static("", classes="calls")
        self._error = Static("", classes="error", markup=False)
        words = len(message.summary.split())
        title = f"Up to here: a summary of {words} words · /compact undo"
        self._summary = Collapsible(Static(harmless(message.summary), markup=False), title=title, classes="thinking")

    def compose(self) -> ComposeResult:
        yield from (self._markdown, self._end)

    def on_mount(self) -> None:
        self._show(self._summary, bool(self.message.summary))
        self._show_thinking(done=True)
        self._show_calls()
        self.show_end()

    def add(self, parts: tuple[AnswerPart, ...]) -> None:
        """Append parts to the message and to the screen."""
        if parts:
            self._end.display = False
        for part in parts:
            text = self.message.add(part)
            if part.kind is PartKind.REASONING:
                self._show_thinking(done=False)
            elif part.kind is PartKind.TOOL_CALLS:
                self._show_calls()
            if text:
                self._markdown.append(harmless(self._checked(text)))

    def _checked(self, text: str, whole: bool = False) -> str:
        """The text that can be shown after a further part of the answer. whole: no more parts follow."""
        if self._checker is None:
            return text
        return self._checker.push(text) + (self._checker.flush() if whole else "")

    def finish(self) -> None:
        """Draw pending text and the statistics."""
        self._markdown.append(harmless(self._checked("", whole=True)))
        self._show_thinking(done=True)
        self.show_end()

    def _show(self, part: Widget, wanted: bool) -> None:
        """Show or hide an optional part of the answer."""
        part.display = wanted
        if not wanted or part.parent is not None or not self.is_attached:
            return
        if part is self._thinking:
            self.mount(part, before=0)
        elif part is self._summary:
            self.mount(part)
        else:
            self.mount(part, before=self._error if part is self._calls and self._error.parent else self._end)

    def toggle_thinking(self) -> None:
        self._thinking.collapsed = not self._thinking.collapsed

    def on_collapsible_expanded(self) -> None:
        """Update the reasoning text, which is not updated while collapsed."""
        self._show_thinking(done=self.message.finish_reason is not None)

    def show_end(self, variant: tuple[int, int] | None = None) -> None:
        """Show a finished answer's statistics and its error."""
        self.variant = variant or self.variant
        message = self.message
        self._show(self._error, bool(message.error))
        self._error.update(harmless(message.error or ""))
        empty = not (message.content or message.reasoning or message.calls)
        self._end.display = message.finish_reason is not None or empty
        self._end.update(Content("…") if message.finish_reason is None else self._figures())

    def _show_thinking(self, done: bool) -> None:
        thinking = self._thinking
        self._show(thinking, bool(self.message.reasoning))
        words = len(self.message.reasoning.split())
        thinking.title = f"{'Thought' if done else 'Thinking …'} · {words} words"
        if not thinking.collapsed:
            self._reasoning.update(harmless(self.message.reasoning.strip()))

    def _show_calls(self) -> None:
        """Show the answer's tool calls; their results are separate messages."""
        self._show(self._calls, bool(self.message.calls))
        lines = [
            Content.assemble(
                (f"⚙ {harmless(call.name)} ", "bold $secondary"),
                harmless(shortened(json.dumps(call.arguments, ensure_ascii=False), MAX_ARGUMENTS)),
            )
            for call in self.message.calls
        ]
        self._calls.update(Content("\n").join(lines))

    def _figures(self) -> Content:
        stats = self.message.stats
        parts = self._variant_mark()
        if stats.get("generated"):
            parts.append(counted(stats["generated"], "token"))
        if stats.get("speed"):
            parts.append(f"{stats['speed']:.0f} tok/s")
        if stats.get("drafted"):
            took = f" in {human_seconds(stats['drafting_s'])}" if stats.get("drafting_s") else ""
            parts.append(f"{stats['accepted']} of {stats['drafted']} drafted{took}")
        if stats.get("ttft_s"):
            parts.append(f"TTFT {human_seconds(stats['ttft_s'])}")
        if stats.get("cached"):
            parts.append(f"{stats['cached']} of {stats['prompt']} cached")
        ended = {"cancelled": "stopped", "length": "cut: /continue"}.get(self.message.finish_reason or "")
        figures = Content(" · ".join([*parts, ended] if ended else parts))
        if self._checker is not None and self.message.content:
            figures = Content.assemble(_verdict(self._checker), "\n", figures)
        for seen in reversed(stats.get("pictures") or ()):
            figures = Content.assemble(f"▣ {harmless(str(seen))}", "\n", figures)
        if not stats.get("unseen"):
            return figures
        what = without(stats["unseen"])
        return Content.assemble((f"Answered without {what}: this model reads text only.", "$warning"), "\n", figures)


class ToolView(MessageView):
    """A tool's result, collapsed unless it is a file change."""

    def compose(self) -> ComposeResult:
        """A title that names the call, with the result below it."""
        (call,) = self.message.calls
        text = self.message.content
        failed = self.message.is_failure
        changed = call.name == "edit_file" and not failed
        subject = next((str(value) for value in call.arguments.values() if isinstance(value, str)), "")
        what = text.partition("\n")[0] if failed else counted(len(text.splitlines()), "line")
        parts = " · ".join(part for part in (call.name, shortened(what, 40), shortened(subject)) if part)
        title: Any = Content(harmless(f"⚙ {' '.join(parts.split())}"))  # a text would be read as markup
        shown = preview(text.rstrip("\n"), is_diff=changed)
        yield Collapsible(Static(shown, markup=False), title=title, collapsed=not changed, classes="result")


def _tokens(files: Sequence[Attachment]) -> str:
    """What files take together, as far as it is known."""
    known = [file.tokens for file in files if file.tokens is not None]
    return f" · {sum(known):,} tokens" if known else ""


def _verdict(checker: "QuotationChecker") -> Content:
    """How many of an answer's quotations are in the documents."""
    missing = sum(each.place is None for each in checker.quotations)
    count = len(checker.quotations)
    if not count:
        return Content.styled("It quotes nothing: nothing was checked.", "$warning")
    what = counted(count, "quotation")
    if missing:
        return Content.styled(f"{what}, {missing} not found word for word.", "$warning")
    return Content.styled(f"{what}, found word for word.", "$success")


def without(pictures: Sequence[str]) -> str:
    """The names of the pictures, or their count if there are more than MAX_NAMED."""
    return harmless(", ".join(pictures)) if len(pictures) <= MAX_NAMED else f"{len(pictures)} pictures"
