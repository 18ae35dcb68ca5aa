"""One message on the screen."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static

from localllm.text import harmless
from tui.sessions import Message


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
            sign = "▣" if file.picture else "▤"
            yield Static(harmless(f"{sign} {file.name}{tokens}"), markup=False, classes="attachment")


def view_of(message: Message, variant: tuple[int, int]) -> MessageView:
    """The widget that shows a message."""
    if message.role == "user":
        return UserView(message)
    from tui.widgets.answer_view import AnswerView  # Markdown costs a part of the start, and nothing is said yet

    return AnswerView(message, variant)
