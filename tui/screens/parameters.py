"""The parameters panel: sampler settings, limits, presets and the system prompt."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from localllm.chats.parameters import PRESETS, Parameters
from localllm.chats.saved import delete_persona, read_persona, rename_persona, save_persona, saved_names
from localllm.errors import RequestError
from localllm.text import harmless
from tui.status import MUTED
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
    """Returns the new parameters, or None. An empty field uses the model's default.

    Presets come first: ours, which change sampler parameters, and the user's, which are personas.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Back", id="list.back", priority=True),
        Binding("ctrl+s", "keep", "Save", id="parameters.keep", priority=True),
        Binding("ctrl+n", "save_as", "New preset", id="parameters.save", priority=True),
        Binding("ctrl+e", "rename", "Rename", id="parameters.rename", priority=True),
        Binding("ctrl+d", "delete", "Delete", id="parameters.delete", priority=True),
    ]

    def __init__(self, parameters: Parameters, defaults: Parameters, model: str) -> None:
        """model: named in a comment of presets that are saved."""
        super().__init__()
        self._parameters, self._defaults, self._model = parameters, defaults, model
        self._system = TextArea(id="system", show_line_numbers=False, tab_behavior="focus")
        self._fields = {name: Input(id=name, placeholder="default", compact=True) for name in _HINTS}
        self._error = Static("", classes="error", markup=False)
        self._presets = OptionList(id="presets", markup=False)
        self._saved: list[str] = []  # the user's presets, listed after ours
        self._naming = Input(id="naming")
        self._name_taken: Callable[[str], None] = lambda _name: None
        self._to_delete = ""  # the preset whose deletion was asked for once
        self._fill(parameters)
        self._left = self._texts()  # discarded without a warning: unchanged texts, or those already warned about

    def _fill(self, parameters: Parameters) -> None:
        """Show parameters in the fields."""
        self._system.text = parameters.system
        for name, field in self._fields.items():
            text = parameters.text(name)
            field.value = "" if text == "default" else text

    def _texts(self) -> list[str]:
        return [self._system.text, *(field.value for field in self._fields.values())]

    def action_leave(self) -> None:
        """End the naming of a preset, else go back; if there are changes, the first call only warns."""
        if self._naming.display:
            self._end_naming()
            return
        if self._texts() == self._left:
            self.dismiss(None)
            return
        self._left = self._texts()
        self._error.update("Ctrl+S saves the changes. Esc again discards them.")

    def compose(self) -> ComposeResult:
        with Vertical(classes="panel wide"):
            yield Static("Settings of this chat", classes="heading")
            yield self._presets
            yield self._naming
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

    def on_mount(self) -> None:
        self._naming.display = False
        self._list()
        self._presets.focus()

    def _list(self, marked: str = "") -> None:
        """List the presets again, and highlight one of the user's."""
        self._saved = saved_names("persona")
        rows = [_row(name, _values(values)) for name, values in PRESETS.items()]
        self._presets.clear_options().add_options(rows + [_row(name, _persona_values(name)) for name in self._saved])
        self._presets.highlighted = len(PRESETS) + self._saved.index(marked) if marked in self._saved else 0

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Put a preset into the fields."""
        name = self._marked
        if not name:
            preset = [*PRESETS][event.option_index]
            for field, value in PRESETS[preset].items():
                self._fields[field].value = str(value)
            self._error.update(f"Ctrl+S uses {preset} in this chat.")
            return
        try:
            persona = read_persona(name)
            self._fill(persona.over(self._parsed(), self._defaults))
        except RequestError as error:
            self._error.update(str(error))
            return
        model = f" /persona {name} also loads {persona.model}." if persona.model else ""
        self._error.update(f"Ctrl+S uses {name} in this chat.{model}")

    def on_option_list_option_highlighted(self) -> None:
        self._to_delete = ""
        self.refresh_bindings()

    def on_descendant_focus(self) -> None:
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only the user's presets can be renamed and deleted."""
        own = self._presets.has_focus and bool(self._marked)
        return own if action in ("rename", "delete") else True

    @property
    def _marked(self) -> str:
        """The highlighted preset if it is the user's, else ""."""
        place = (self._presets.highlighted or 0) - len(PRESETS)
        return self._saved[place] if 0 <= place < len(self._saved) else ""

    def action_save_as(self) -> None:
        """Save what the fields have under a name."""

        def save(name: str) -> None:
            path = save_persona(name, self._parsed(), self._defaults, self._model)
            self._error.update(f"Saved: {path}")

        self._ask_name("Name of the new preset", "", save)

    def action_rename(self) -> None:
        old = self._marked
        self._ask_name("New name of the preset", old, lambda new: rename_persona(old, new))

    def action_delete(self) -> None:
        """Delete a preset when called twice."""
        name = self._marked
        if self._to_delete != name:
            self._to_delete = name
            self._error.update(f"Ctrl+D again deletes {name} for good.")
            return
        self._attempt(lambda: delete_persona(name))
        self._list()

    def _ask_name(self, hint: str, text: str, take: Callable[[str], None]) -> None:
        """Ask for the name of a preset, and call `take` with it."""
        self._naming.placeholder, self._naming.value, self._naming.display = hint, text, True
        self._name_taken = take
        self._naming.focus()

    def _end_naming(self) -> None:
        self._naming.display = False
        self._presets.focus()

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do something with presets; False if it failed, after showing why."""
        self._error.update("")
        try:
            work()
        except RequestError as error:
            self._error.update(str(error))
            return False
        return True

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input is not self._naming:
            self.action_keep()
            return
        name = event.value.strip()
        if self._attempt(lambda: self._name_taken(name)):
            self._end_naming()
            self._list(name)

    def action_keep(self) -> None:
        """Check all fields and return them; focus the first invalid one and show the reason."""
        try:
            self.dismiss(self._parsed())
        except RequestError as error:
            self._error.update(str(error))

    def _parsed(self) -> Parameters:
        """The fields as parameters. Raises RequestError after focusing the first invalid one."""
        parameters = self._parameters
        for name in ("system", *_HINTS):
            text = self._system.text if name == "system" else self._fields[name].value
            try:
                parameters = parameters.with_text(name, text.strip(), self._defaults)
            except RequestError:
                self._fields[name].focus()
                raise
        return parameters


def _row(name: str, values: str) -> Option:
    return Option(Content.assemble((f"{name:10}", "bold"), " ", (harmless(values), MUTED)))


def _values(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {' '.join(str(value).split())}" for name, value in values.items())


def _persona_values(name: str) -> str:
    """What a persona sets, or why it cannot be read."""
    try:
        return _values(read_persona(name).values)
    except RequestError as error:
        return str(error)
