"""The first line: which conversation, which model."""

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.reactive import reactive
from textual.widgets import Static

from localllm.text import harmless


class TitleBar(Horizontal):
    """Shows the conversation's title and the model's name."""

    title = reactive("New chat", init=False)
    model = reactive("", init=False)

    def __init__(self) -> None:
        super().__init__()
        self._title = Static("", id="title", markup=False)
        self._model = Static("", id="model", markup=False)

    def compose(self) -> ComposeResult:
        """Name of the program, title, model."""
        yield Static("localllm", id="brand")
        yield self._title
        yield self._model

    def watch_title(self, title: str) -> None:
        """Show another title."""
        self._title.update(harmless(title))

    def watch_model(self, model: str) -> None:
        """Show another model."""
        self._model.update(harmless(model))
