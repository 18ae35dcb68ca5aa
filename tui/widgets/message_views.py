"""One message on the screen: the user's as plain text, the model's as Markdown that streams."""

import json
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownStream

from localllm.cli.terminal import harmless
from localllm.engine.answer_parts import AnswerPart, PartKind
from tui.sessions import Message
from tui.status import human_seconds


class MessageView(Vertical, can_focus=True, can_focus_children=False):
    """A message that keys can act on while it has the focus. The keys run the screen's commands on it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "screen.command('edit')", "Edit", id="message.edit"),
        Binding("r", "screen.command('regenerate')", "Again", id="message.regenerate"),
        Binding("f", "screen.command('fork')", "Fork", id="message.fork"),
        Binding("c", "screen.command('copy')", "Copy", id="message.copy"),
        Binding("b", "screen.command('code')", "Copy code", id="message.code"),
        Binding("t", "screen.command('think')", "Thinking", id="message.think"),
        Binding("left", "screen.variant(-1)", "Variant", id="message.variant.earlier"),
        Binding("right", "screen.variant(1)", "Variant", id="message.variant.later", show=False),
        Binding("up", "screen.select(-1)", "Up", id="message.up", show=False),
        Binding("down", "screen.select(1)", "Down", id="message.down", show=False),
    ]

    def __init__(self, message: Message) -> None:
        super().__init__(classes=f"message {message.role}")
        self.message = message


class UserView(MessageView):
    """What the user said, and the names of the files that went with it."""

    def compose(self) -> ComposeResult:
        """Plain text: the user's words are no markup."""
        yield Static(harmless(self.message.content), markup=False, classes="said")
        for file in self.message.attachments:
            tokens = "" if file.tokens is None else f" · {file.tokens} tokens"
            yield Static(harmless(f"▤ {file.name}{tokens}"), markup=False, classes="attachment")


class AnswerView(MessageView):
    """What the model says. `add` shows more of it, `finish` ends it."""

    def __init__(self, message: Message, variant: tuple[int, int] = (1, 1)) -> None:
        super().__init__(message)
        self._variant = variant
        self._streaming: MarkdownStream | None = None

    def compose(self) -> ComposeResult:
        """Reasoning folded above, the answer, and its figures below."""
        with Collapsible(title="Thinking", classes="thinking", collapsed=True):
            yield Static("", classes="reasoning", markup=False)
        yield Markdown(harmless(self.message.content), open_links=False)
        yield Static("", classes="error", markup=False)
        yield Static("", classes="figures")

    def on_mount(self) -> None:
        """Show what is there already."""
        self.query_one(Collapsible).display = bool(self.message.reasoning)
        self._show_thinking(done=True)
        self.show_end()

    async def add(self, parts: tuple[AnswerPart, ...]) -> None:
        """Append parts to the message and to the screen."""
        for part in parts:
            if part.kind is PartKind.REASONING:
                self.message.reasoning += part.text
                self._show_thinking(done=False)
                continue
            text = part.text
            if part.kind is PartKind.TOOL_CALLS:
                text = "".join(
                    f"\n```json\n{call.name}({json.dumps(call.arguments, ensure_ascii=False)})\n```\n"
                    for call in part.tool_calls
                )
            if not self.message.content:
                text = text.lstrip("\n")
            self.message.content += text
            if self._streaming is None:
                self._streaming = Markdown.get_stream(self.query_one(Markdown))
            await self._streaming.write(harmless(text))

    async def finish(self) -> None:
        """Draw what is still pending, and the figures."""
        if self._streaming is not None:
            await self._streaming.stop()
            self._streaming = None
        self._show_thinking(done=True)
        self.show_end()

    def toggle_thinking(self) -> None:
        """Fold or unfold the reasoning."""
        thinking = self.query_one(Collapsible)
        thinking.collapsed = not thinking.collapsed

    def on_collapsible_expanded(self) -> None:
        """Folded text is not kept up to date; do it when it is seen."""
        self._show_thinking(done=self.message.finish_reason is not None)

    def show_end(self, variant: tuple[int, int] | None = None) -> None:
        """Show the figures of a finished answer and what went wrong."""
        self._variant = variant or self._variant
        error = self.query_one(".error", Static)
        error.display = bool(self.message.error)
        error.update(harmless(self.message.error or ""))
        figures = self.query_one(".figures", Static)
        figures.display = self.message.finish_reason is not None
        figures.update(self._figures())

    def _show_thinking(self, done: bool) -> None:
        thinking = self.query_one(Collapsible)
        thinking.display = bool(self.message.reasoning)
        words = len(self.message.reasoning.split())
        thinking.title = f"{'Thought' if done else 'Thinking …'} · {words} words"
        if not thinking.collapsed:
            thinking.query_one(".reasoning", Static).update(harmless(self.message.reasoning.strip()))

    def _figures(self) -> Content:
        stats = self.message.stats
        parts = []
        if self._variant[1] > 1:
            parts.append(f"◂ {self._variant[0]}/{self._variant[1]} ▸")
        if "generated" in stats:
            parts.append(f"{stats['generated']} tokens")
        if stats.get("speed"):
            parts.append(f"{stats['speed']:.0f} tok/s")
        if stats.get("ttft_s"):
            parts.append(f"first after {human_seconds(stats['ttft_s'])}")
        if stats.get("cached"):
            parts.append(f"{stats['cached']} of {stats['prompt']} cached")
        ended = {"cancelled": "stopped", "length": "cut: /continue"}.get(self.message.finish_reason or "")
        return Content("  ·  ".join([*parts, ended] if ended else parts))


def view_of(message: Message, variant: tuple[int, int]) -> MessageView:
    """The widget that shows a message."""
    return UserView(message) if message.role == "user" else AnswerView(message, variant)
