"""The model picker: local models and models to pull, with their size and whether they fit in memory."""

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
from localllm.errors import LocalLLMError
from localllm.text import columns_of, harmless, human_bytes, human_speed
from tui.backend import Backend, ModelChoice
from tui.background import in_thread
from tui.status import MUTED
from tui.widgets.frame import KeyBar


class ModelsScreen(ModalScreen[str | None]):
    """Returns the name of the model to load, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Take", id="list.take", priority=True),
        Binding("escape", "dismiss(None)", "Back", id="list.back", priority=True),
        Binding("up", "move(-1)", "Up", id="list.up", show=False, priority=True),
        Binding("down", "move(1)", "Down", id="list.down", show=False, priority=True),
    ]

    def __init__(self, backend: Backend, present: str | None, heading: str = "Models") -> None:
        super().__init__()
        self._backend = backend
        self._present = present
        self._heading = heading
        self._all: Sequence[ModelChoice] = ()
        # Kept as attributes, not queried: results and layout callbacks may come after the widgets have been unmounted.
        self._field = Input(placeholder="Search, or type a name, a URL or a path")
        self._entries = OptionList(markup=False)
        self._memory = Static("Looking …", id="memory", markup=False)

    def compose(self) -> ComposeResult:
        with Vertical(classes="panel"):
            yield Static(self._heading, classes="heading")
            yield from (self._field, self._entries, self._memory)
            yield KeyBar(show_command_palette=False)

    async def on_mount(self) -> None:
        self.run_worker(self._find())

    async def _find(self) -> None:
        try:
            self._all = await in_thread(lambda: self._backend.models(self._present))
        except LocalLLMError as error:
            self._memory.update(harmless(str(error)))
            return
        free = human_bytes(available_memory())
        self._memory.update(f"{free} of memory is free")
        self._list()

    def on_resize(self) -> None:
        """Fit the rows to the new width, which is known after the next layout."""
        self.call_after_refresh(self._list)

    def on_input_changed(self) -> None:
        self._list()

    def action_choose(self) -> None:
        # Priority keys overtake queued characters. Queueing on the field, then here, waits for them and their effects.
        self._field.call_later(self.call_later, self._choose)

    def _choose(self) -> None:
        entries = self._entries
        marked = entries.highlighted_option
        self.dismiss(marked.id if marked else self._field.value.strip() or None)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_move(self, step: int) -> None:
        entries = self._entries
        if step < 0:
            entries.action_cursor_up()
        else:
            entries.action_cursor_down()

    def _list(self) -> None:
        search = self._field.value.lower()
        shown = [choice for choice in self._all if search in choice.name.lower()]
        free = available_memory()
        entries = self._entries
        width = max(entries.outer_size.width - 5, 20)  # padding of list and rows, and a scrollbar
        entries.clear_options()
        to_pull = [choice for choice in shown if not choice.here]
        entries.add_options(_option(choice, free, width) for choice in shown if choice.here)
        if to_pull:
            entries.add_option(Option(Content.styled("\nTo pull from ollama.com", "$accent"), disabled=True))
            entries.add_options(_option(choice, free, width) for choice in to_pull)
        entries.highlighted = 0 if shown and shown[0].here else 1 if shown else None


def _option(choice: ModelChoice, free: int, width: int) -> Option:
    """Two lines: name, use or source, and speed; then size, quantization, context, licence and memory."""
    name = harmless(choice.name.rpartition("/")[2])
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
