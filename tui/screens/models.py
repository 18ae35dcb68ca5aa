"""The model picker: what is at hand, how large it is, whether it fits."""

from collections.abc import Sequence
from typing import ClassVar

import psutil
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.cli.terminal import harmless, human_bytes, human_count
from localllm.errors import LocalLLMError
from tui.backend import Backend, ModelChoice
from tui.background import in_thread


class ModelsScreen(ModalScreen[str | None]):
    """Returns the name of the model to load, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back", id="list.back", priority=True),
        Binding("up", "move(-1)", "Up", id="list.up", show=False, priority=True),
        Binding("down", "move(1)", "Down", id="list.down", show=False, priority=True),
    ]

    def __init__(self, backend: Backend, present: str | None) -> None:
        super().__init__()
        self._backend = backend
        self._present = present
        self._all: Sequence[ModelChoice] = ()
        self._shown: list[ModelChoice] = []

    def compose(self) -> ComposeResult:
        """A field to narrow the list or to name a model that is not in it, the list, the memory there is."""
        with Vertical(classes="panel"):
            yield Static("Models", classes="heading")
            yield Input(placeholder="Narrow the list, or give a path")
            yield OptionList(markup=False)
            yield Static("Looking …", id="memory", markup=False)
            yield Footer(show_command_palette=False)

    async def on_mount(self) -> None:
        """Read the models' headers beside everything else."""
        self.run_worker(self._find())

    async def _find(self) -> None:
        free = psutil.virtual_memory().available
        try:
            self._all = await in_thread(lambda: self._backend.models(self._present))
        except LocalLLMError as error:
            self.query_one("#memory", Static).update(harmless(str(error)))
            return
        self.query_one("#memory", Static).update(f"{human_bytes(free)} of memory is free")
        self._list("")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Narrow the list while the user types."""
        self._list(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the marked model, else what was written."""
        place = self.query_one(OptionList).highlighted
        self.dismiss(self._shown[place].name if self._shown and place is not None else event.value.strip() or None)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Take the one that was clicked."""
        self.dismiss(self._shown[event.option_index].name)

    def action_move(self, step: int) -> None:
        """Mark another model."""
        entries = self.query_one(OptionList)
        if self._shown:
            entries.highlighted = ((entries.highlighted or 0) + step) % len(self._shown)

    def _list(self, search: str) -> None:
        self._shown = [choice for choice in self._all if search.lower() in choice.name.lower()]
        free = psutil.virtual_memory().available
        entries = self.query_one(OptionList)
        entries.clear_options()
        entries.add_options(Option(_row(choice, free)) for choice in self._shown)
        entries.highlighted = 0 if self._shown else None


def _row(choice: ModelChoice, free: int) -> Content:
    facts = [choice.parameters, choice.quantization, human_bytes(choice.size) if choice.size else ""]
    facts.append(f"context {human_count(choice.context)}" if choice.context else "")
    needs: tuple[str, str] = ("", "")
    if choice.memory:
        needs = (f" · needs {human_bytes(choice.memory)}", "$error" if choice.memory > free else "$success")
    return Content.assemble(
        (harmless(choice.name.rpartition("/")[2]), "bold"),
        ("  ● loaded" if choice.loaded else "", "$success"),
        "\n",
        (harmless(" · ".join(filter(None, facts))), "$foreground 60%"),
        needs,
    )
