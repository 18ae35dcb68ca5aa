"""A question with two answers."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static

from localllm.text import harmless
from tui.widgets.frame import KeyBar


class QuestionScreen(ModalScreen[bool]):
    """Returns whether the user chose to do it. What changes nothing is highlighted first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Select", id="list.take", priority=True),
        Binding("escape", "dismiss(False)", "Back", id="list.back", priority=True),
    ]

    def __init__(self, question: str, no: str, yes: str) -> None:
        super().__init__()
        self._question = question
        self._options = OptionList(harmless(no), harmless(yes), markup=False)

    def compose(self) -> ComposeResult:
        with Vertical(classes="panel question"):
            yield Static(harmless(self._question), classes="heading", markup=False)
            yield self._options
            yield KeyBar(palette=False)

    def on_mount(self) -> None:
        self._options.highlighted = 0
        self._options.focus()

    def action_choose(self) -> None:
        self.dismiss(self._options.highlighted == 1)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_index == 1)
