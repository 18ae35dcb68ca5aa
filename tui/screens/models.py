"""The model picker: local models and models to pull, with their size and whether they fit in memory."""

import os
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from cpu_kernels.limits import available_memory
from localllm.background import in_thread
from localllm.errors import LocalLLMError
from localllm.files import user_path, with_slashes
from localllm.text import columns_of, counted, harmless, human_bytes, human_speed
from tui.backend import Backend, PickerRow, short_name
from tui.status import MUTED
from tui.widgets.completion import matching_paths
from tui.widgets.frame import KeyBar

MOST_PATHS = 1000
_DRIVE = re.compile(r"[A-Za-z]:/")  # on Windows


class PickerScreen(ModalScreen[str | None]):
    """Returns the name of the model to load, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Select", id="list.take", priority=True),
        Binding("escape", "dismiss(None)", "Back", id="list.back", priority=True),
        Binding("up", "move(-1)", "Up", id="list.up", show=False, priority=True),
        Binding("down", "move(1)", "Down", id="list.down", show=False, priority=True),
        Binding("tab", "complete", "Complete", id="list.complete", priority=True),
    ]

    def __init__(self, backend: Backend, present: str | None, heading: str = "Models") -> None:
        super().__init__()
        self._backend = backend
        self._present = present
        self._heading = heading
        self.choices: Sequence[PickerRow] = ()
        # Kept as attributes, not queried: results and layout callbacks may come after the widgets have been unmounted.
        self.field = Input(placeholder="Search, or type a name, a URL or a path")
        self.entries = OptionList(markup=False)
        self.memory = Static("Looking …", id="memory", markup=False)

    def compose(self) -> ComposeResult:
        with Vertical(classes="panel"):
            yield Static(self._heading, classes="heading")
            yield from (self.field, self.entries, self.memory)
            yield KeyBar(palette=False)

    async def on_mount(self) -> None:
        self.run_worker(self._find())

    async def _find(self) -> None:
        try:
            self.choices = await in_thread(lambda: self._backend.models(self._present))
        except LocalLLMError as error:
            self.memory.update(harmless(str(error)))
            return
        self._list()

    def on_resize(self) -> None:
        """Fit the rows to the new width, which is known after the next layout."""
        self.call_after_refresh(self._list)

    def on_input_changed(self) -> None:
        self._list()

    def action_choose(self) -> None:
        # Priority keys overtake queued characters. Queueing on the field, then here, waits for them and their effects.
        self.field.call_later(self.call_later, self._choose)

    def _choose(self) -> None:
        entries = self.entries
        marked = entries.highlighted_option
        name = marked.id if marked and marked.id else self.field.value.strip()
        if name and self._is_path(name) and not os.path.isfile(user_path(name)):
            self._enter(name)
        else:
            self.dismiss(name or None)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._choose()

    def action_complete(self) -> None:
        """Complete a path to the highlighted entry."""
        if (marked := self.entries.highlighted_option) and marked.id:
            self._enter(marked.id)

    def _enter(self, path: str) -> None:
        """Continue with a path in the field."""
        self.field.value = path + "/" * (os.path.isdir(user_path(path)) and not path.endswith("/"))
        self.field.cursor_position = len(self.field.value)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer completion only for paths."""
        return self._is_path(self.field.value) if action == "complete" else True

    def _is_path(self, text: str) -> bool:
        """Whether the user types a path, not a name or the address of a model."""
        text = with_slashes(text)
        begun = text.startswith(("/", "./", "../", "~/")) or bool(_DRIVE.match(text))
        return begun or ("/" in text and "://" not in text and os.path.isdir(user_path(text.rpartition("/")[0])))

    def action_move(self, step: int) -> None:
        entries = self.entries
        if step < 0:
            entries.action_cursor_up()
        else:
            entries.action_cursor_down()

    def _list(self) -> None:
        self.refresh_bindings()
        if self._is_path(self.field.value):
            self._list_paths(self.field.value)
            return
        if self.choices:
            self.memory.update(f"{human_bytes(available_memory())} of memory is free")
        search = self.field.value.lower()
        shown = [choice for choice in self.choices if search in choice.name.lower()]
        free = available_memory()
        entries = self.entries
        width = max(entries.outer_size.width - 5, 20)  # padding of list and rows, and a scrollbar
        entries.clear_options()
        to_pull = [choice for choice in shown if not choice.here]
        entries.add_options(_option(choice, free, width) for choice in shown if choice.here)
        if to_pull:
            entries.add_option(Option(Content.styled("\nTo pull from ollama.com", "$accent"), disabled=True))
            entries.add_options(_option(choice, free, width) for choice in to_pull)
        entries.highlighted = 0 if shown and shown[0].here else 1 if shown else None

    def _list_paths(self, begun: str) -> None:
        entries, found = self.entries, _paths_at(begun)
        entries.clear_options()
        entries.add_options(_path_option(path) for path in found)
        entries.highlighted = 0 if found else None
        models = sum(not path.endswith("/") for path in found)
        self.memory.update(counted(models, ".gguf file") if found else f"No .gguf file or folder: {harmless(begun)}")


def _paths_at(begun: str) -> list[str]:
    """Folders and .gguf files whose paths start with a text."""
    found = matching_paths(begun, MOST_PATHS)
    return [path for path in found if path.endswith("/") or path.lower().endswith(".gguf")]


def _path_option(path: str) -> Option:
    """A folder, or a file with its size."""
    file = user_path(path)
    size = f"  {human_bytes(os.path.getsize(file))}" if os.path.isfile(file) else ""
    return Option(
        Content.assemble(
            (harmless(path.rstrip("/").rpartition("/")[2]), "bold"), "/" * path.endswith("/"), (size, MUTED)
        ),
        id=path,
    )


def _option(choice: PickerRow, free: int, width: int) -> Option:
    """Two lines: name, use or source, and speed; then size, quantization, context, licence and memory."""
    name = harmless(short_name(choice.name))
    speed = f"about {human_speed(choice.speed)} tok/s" if choice.speed else ""
    right = (_fitting([choice.suits or choice.source, speed], width - columns_of(name) - 2), MUTED)
    if choice.loaded:
        right = ("● loaded", "$success")
    facts = [choice.parameters, choice.quantization, human_bytes(choice.size) if choice.size else ""]
    facts.append(f"{_context(choice.context)} context" if choice.context else "")
    facts.append(choice.licence)
    needs = ("", "")
    if choice.memory:
        fits = choice.memory <= free
        needs = (f"needs {human_bytes(choice.memory)}", "$success" if fits else "$error")
    left = (_fitting(facts, width - columns_of(needs[0]) - 2), MUTED)
    return Option(Content("\n").join([_line((name, "bold"), right, width), _line(left, needs, width)]), id=choice.name)


def _fitting(facts: Iterable[str], room: int) -> str:
    """Join as many leading facts as fit without cutting one."""
    known = [harmless(fact) for fact in facts if fact]
    while len(known) > 1 and columns_of(" · ".join(known)) > room:
        known.pop()
    return " · ".join(known)


def _context(tokens: int) -> str:
    """A context size as in model cards: 32K is 32768."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _line(left: tuple[str, str], right: tuple[str, str], width: int) -> Content:
    """One line with a part at each end. The left part is shortened first, down to half the line, then the right."""
    start, end = Content.styled(*left), Content.styled(*right)
    end = end.truncate(max(width - min(start.cell_length, width // 2) - 2, 8), ellipsis=True)
    text = start.truncate(max(width - end.cell_length - 2, 8), ellipsis=True)
    return Content.assemble(text, " " * max(width - text.cell_length - end.cell_length, 2), end)
