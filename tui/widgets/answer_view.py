"""A message of the model's: Markdown that streams, its reasoning folded, its figures below."""

import json
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownStream

from localllm.answer.event import AnswerPart, PartKind
from localllm.cli.terminal import harmless
from tui.sessions import Message
from tui.status import human_seconds
from tui.widgets.message_views import MessageView

MAX_NAMED = 3


def without(pictures: Sequence[str]) -> str:
    """Pictures by their names, or how many where that would be long."""
    return harmless(", ".join(pictures)) if len(pictures) <= MAX_NAMED else f"{len(pictures)} pictures"


class AnswerView(MessageView):
    """What the model says. `add` shows more of it, `finish` ends it."""

    def __init__(self, message: Message, variant: tuple[int, int] = (1, 1)) -> None:
        super().__init__(message)
        self._variant = variant
        self._streaming: MarkdownStream | None = None
        # Held, not looked for: an answer may still come when they have left the screen.
        self._reasoning = Static("", classes="reasoning", markup=False)
        self._thinking = Collapsible(self._reasoning, title="Thinking", classes="thinking", collapsed=True)
        self._markdown = Markdown(harmless(message.content), open_links=False)
        self._calls = Static("", classes="calls")
        self._error = Static("", classes="error", markup=False)
        self._end = Static("", classes="figures")

    def compose(self) -> ComposeResult:
        """Reasoning folded above, the answer, and its figures below."""
        yield from (self._thinking, self._markdown, self._calls, self._error, self._end)

    def on_mount(self) -> None:
        """Show what is there already."""
        self._show_thinking(done=True)
        self._show_calls()
        self.show_end()

    async def add(self, parts: tuple[AnswerPart, ...]) -> None:
        """Append parts to the message and to the screen."""
        if parts:
            self._end.display = False
        for part in parts:
            if part.kind is PartKind.REASONING:
                self.message.reasoning += part.text
                self._show_thinking(done=False)
                continue
            if part.kind is PartKind.TOOL_CALLS:
                self.message.calls += part.tool_calls
                self._show_calls()
                continue
            text = part.text if self.message.content else part.text.lstrip("\n")
            self.message.content += text
            if self._streaming is None:
                self._streaming = Markdown.get_stream(self._markdown)
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
        self._thinking.collapsed = not self._thinking.collapsed

    def on_collapsible_expanded(self) -> None:
        """Folded text is not kept up to date; do it when it is seen."""
        self._show_thinking(done=self.message.finish_reason is not None)

    def show_end(self, variant: tuple[int, int] | None = None) -> None:
        """Show the figures of a finished answer and what went wrong."""
        self._variant = variant or self._variant
        self._error.display = bool(self.message.error)
        self._error.update(harmless(self.message.error or ""))
        message = self.message
        empty = not (message.content or message.reasoning or message.calls)
        self._end.display = message.finish_reason is not None or empty
        self._end.update(Content("…") if message.finish_reason is None else self._figures())

    def _show_thinking(self, done: bool) -> None:
        thinking = self._thinking
        thinking.display = bool(self.message.reasoning)
        words = len(self.message.reasoning.split())
        thinking.title = f"{'Thought' if done else 'Thinking …'} · {words} words"
        if not thinking.collapsed:
            self._reasoning.update(harmless(self.message.reasoning.strip()))

    def _show_calls(self) -> None:
        """The tools that the model asks for; nobody here runs them."""
        self._calls.display = bool(self.message.calls)
        lines = [
            Content.assemble(
                (f"⚙ {harmless(call.name)} ", "bold $secondary"),
                harmless(json.dumps(call.arguments, ensure_ascii=False)),
            )
            for call in self.message.calls
        ]
        self._calls.update(Content("\n").join(lines))

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
        figures = Content("  ·  ".join([*parts, ended] if ended else parts))
        if not stats.get("unseen"):
            return figures
        what = without(stats["unseen"])
        return Content.assemble((f"Answered without {what}: this model reads text only.", "$warning"), "\n", figures)
