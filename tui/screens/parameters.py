"""The parameters panel: sampler settings, limits, presets and the system prompt."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Static, TextArea

from localllm.chats.parameters import PRESETS, Parameters
from localllm.errors import RequestError
from tui.widgets.frame import KeyBar

_HINTS = {
    "temperature": "0 always picks the likeliest token",
    "top_k": "keep the N likeliest tokens; 0 is off",
    "top_p": "nucleus sampling; 1 is off",
    "min_p": "minimum probability relative to the top token; 0 is off",
    "repeat_penalty": "above 1 avoids repetition",
    "repeat_last_n": "window in tokens; -1 is all, 0 is off",
    "presence_penalty": "penalty for tokens that occurred",
    "frequency_penalty": "penalty for each occurrence",
    "typical_p": "locally typical; 1 is off",
    "mirostat": "2 turns Mirostat on; 0 is off",
    "mirostat_tau": "target entropy in bits",
    "mirostat_eta": "learning rate",
    "max_tokens": "maximum tokens of an answer",
    "ctx": "context limit in tokens",
    "seed": "makes answers reproducible",
    "think": "on, off or default",
    "rivals": "top alternatives to record per token",
    "tools": "on: the model may use files and commands",
    "folder": "of documents to answer from",
}


class ParametersScreen(ModalScreen[Parameters | None]):
    """Returns the new parameters, or None. An empty field uses the model's default."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Back", id="list.back", priority=True),
        Binding("ctrl+s", "keep", "Save", id="parameters.keep", priority=True),
    ]

    def __init__(self, parameters: Parameters, defaults: Parameters) -> None:
        super().__init__()
        self._parameters, self._defaults = parameters, defaults
        self._system = TextArea(parameters.system, id="system", show_line_numbers=False, tab_behavior="focus")
        texts = {name: parameters.text(name) for name in _HINTS}
        self._fields = {
            name: Input("" if text == "default" else text, id=name, placeholder="default", compact=True)
            for name, text in texts.items()
        }
        self._error = Static("", classes="error", markup=False)
        self._left = self._texts()  # discarded without a warning: unchanged texts, or those already warned about

    def _texts(self) -> list[str]:
        return [self._system.text, *(field.value for field in self._fields.values())]

    def action_leave(self) -> None:
        """Go back; if there are changes, the first call only warns."""
        if self._texts() == self._left:
            self.dismiss(None)
            return
        self._left = self._texts()
        self._error.update("Ctrl+S saves the changes. Esc again discards them.")

    def compose(self) -> ComposeResult:
        with Vertical(classes="panel wide"):
            yield Static("Settings of this chat", classes="heading")
            with Horizontal(classes="presets"):
                for name in PRESETS:
                    yield Button(name, id=f"preset-{name}", compact=True)
            with VerticalScroll():
                yield Label("System prompt")
                yield self._system
                with Grid(classes="fields"):
                    for name in _HINTS:
                        yield Label(name)
                        yield self._fields[name]
                        yield Label(_HINTS[name], classes="hint")
            yield self._error
            yield KeyBar(palette=False)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        for name, value in PRESETS[str(event.button.label)].items():
            self._fields[name].value = str(value)

    def on_input_submitted(self) -> None:
        self.action_keep()

    def action_keep(self) -> None:
        """Check all fields and return them; focus the first invalid one and show the reason."""
        parameters = self._parameters
        for name in ("system", *_HINTS):
            text = self._system.text if name == "system" else self._fields[name].value
            try:
                parameters = parameters.with_text(name, text.strip(), self._defaults)
            except RequestError as error:
                self._error.update(str(error))
                self._fields[name].focus()
                return
        self.dismiss(parameters)
