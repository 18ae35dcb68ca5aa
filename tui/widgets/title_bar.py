"""The first line: which conversation, which model."""

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.reactive import reactive
from textual.widgets import Static

from localllm.cli.terminal import harmless


class TitleBar(Horizontal):
    """Shows the conversation's title and the model's name."""

    title = reactive("New chat", init=False)
    model = reactive("", init=False)

    def compose(self) -> ComposeResult:
        """Name of the program, title, model."""
        yield Static("localllm", id="brand")
        yield Static(self.title, id="title", markup=False)
        yield Static(self.model, id="model", markup=False)

    def watch_title(self, title: str) -> None:
        """Show another title."""
        self.query_one("#title", Static).update(harmless(title))

    def watch_model(self, model: str) -> None:
        """Show another model."""
        self.query_one("#model", Static).update(harmless(model))
