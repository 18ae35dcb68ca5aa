"""The widgets around the messages: title bar, welcome, notes and notices, status line, key bar."""

from collections.abc import Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.binding import ActiveBinding
from textual.containers import Center, Horizontal, Vertical
from textual.content import Content
from textual.style import Style
from textual.timer import Timer
from textual.widgets import Static

from localllm.text import columns_of, harmless
from tui.status import MUTED, Status

LOGO = """\
 _                 _ _ _
| | ___   ___ __ _| | | |_ __ ___
| |/ _ \\ / __/ _` | | | | '_ ` _ \\
| | (_) | (_| (_| | | | | | | | | |
|_|\\___/ \\___\\__,_|_|_|_|_| |_| |_|"""

_HINTS = (("/", "commands"), ("@", "files"), ("F1", "help"), ("Ctrl+P", "find a command"), ("Ctrl+D", "leave"))


USUAL_COLUMNS = 80
MATCH = "bold underline $accent"  # style of a search match; bold and underline also work without colours
CURRENT = "bold reverse"  # style of the current match
_DIFF_COLOURS = {"+": "$success", "-": "$error", "@": "$accent"}


@dataclass(frozen=True, slots=True)
class TabMark:
    """A tab as the title bar shows it. sign, style: of its state; both "" for none."""

    title: str
    sign: str = ""
    style: str = ""


class TitleBar(Horizontal):
    """The conversation's title and the model's name; with several chats open, the titles of all instead."""

    def __init__(self) -> None:
        super().__init__()
        self.title, self.model = "New chat", ""
        self._tags: Sequence[str] = ()
        self.label = Static("New chat", id="title", markup=False)
        self._model = Static("", id="model", markup=False)
        self._marks: Sequence[TabMark] = ()
        self._current = 0

    def compose(self) -> ComposeResult:
        yield Static("localllm", id="brand")
        yield self.label
        yield self._model

    def show_tabs(self, marks: Sequence[TabMark], current: int) -> None:
        """Update all tabs; if there are several, they replace the title."""
        self._marks, self._current = marks, current
        self._redraw()

    def show_title(self, title: str, tags: Sequence[str]) -> None:
        self.title, self._tags = title, tags
        self._redraw()

    def show_model(self, model: str) -> None:
        self.model = model
        self._model.update(harmless(model))
        self.call_after_refresh(self._redraw)

    def on_resize(self) -> None:
        """Fit the tabs to the new width, which is known after the next layout."""
        self.call_after_refresh(self._redraw)

    def _redraw(self) -> None:
        several = len(self._marks) > 1
        if self._model.display is several:
            self._model.display = not several  # the status line shows it too
            self.call_after_refresh(self._redraw)
        if several:
            self.label.update(_tab_row(self._marks, self._current, self.label.size.width))
        else:
            tags = "".join(f"  #{tag}" for tag in self._tags)
            self.label.update(Content.assemble(harmless(self.title), (harmless(tags), "$accent")))


def _tab_row(marks: Sequence[TabMark], current: int, width: int) -> Content:
    """The tabs side by side: number, sign, and as much of each title as fits. A click brings a tab to the front."""
    room = width - sum(6 if mark.sign else 4 for mark in marks)
    titles = [Content(harmless(mark.title)) for mark in marks]
    shown = dict(enumerate(titles))
    # Short titles leave space for long ones; the current one may take half the width.
    by_length = sorted(shown, key=lambda place: (place != current, titles[place].cell_length))
    for before, place in enumerate(by_length):
        most = max(room // (2 if place == current else len(marks) - before), 1)
        shown[place] = titles[place].truncate(most, ellipsis=True)
        room -= shown[place].cell_length
    pieces: list[Content] = []
    for place, mark in enumerate(marks):
        title = shown[place]
        tab = Content.assemble(f" {place + 1} ", (mark.sign, mark.style), " " if mark.sign else "", title, " ")
        tab = tab.stylize_before("bold reverse" if place == current else MUTED)
        pieces.append(tab.stylize(Style.from_meta({"@click": f"app.tab({place})"})))
    return Content("").join(pieces)


class StatusLine(Static):
    """Shows a Status on one line."""

    def __init__(self) -> None:
        super().__init__("", id="status", markup=False)
        self.facts = Status()

    def on_resize(self) -> None:
        self.redraw()

    def redraw(self) -> None:
        """Draw the facts. The line's height is fixed, so that nothing else is laid out."""
        self.update(self.facts.line(self.size.width), layout=False)


class KeyBar(Static):
    """The active keys, in one line, as many as fit without cutting one; a click presses a key.

    While a panel covers the screen, it keeps showing the keys from before.
    """

    ALLOW_SELECT = False

    def __init__(self, palette: bool = True) -> None:
        """palette: show the palette's key, on the right, in windows of any width."""
        super().__init__("", markup=False)
        self.auto_links = False
        self._palette = palette

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, lambda _screen: self.redraw())

    def on_resize(self) -> None:
        self.redraw()

    def redraw(self) -> None:
        """Draw the keys that are active now."""
        if not self.screen.is_active or not self.size.width:
            return
        active = self.screen.active_bindings
        shown: dict[str, Content] = {}  # by action: an action may have several keys
        for each in active.values():
            if each.binding.show:
                shown.setdefault(each.binding.action, self._key(each))
        keys = [*shown.values()]
        last = active.get(self.app.COMMAND_PALETTE_BINDING) if self._palette else None
        end = Content.assemble(("▏", "$foreground 20%"), self._key(last)) if last else Content()
        room = max(self.size.width - end.cell_length, 0)
        while keys and sum(key.cell_length for key in keys) > room:
            keys.pop()
        row = Content("").join(keys)
        self.update(Content.assemble(row, " " * (room - row.cell_length), end), layout=False)

    def _key(self, each: ActiveBinding) -> Content:
        name, what = self.app.get_key_display(each.binding), each.binding.description
        key = Content.assemble((f" {name} ", "bold $footer-key-foreground"), f"{what} " if what else "")
        return key.stylize(Style.from_meta({"@click": f"app.simulate_key({each.binding.key!r})"}))


class Welcome(Vertical):
    """The logo and hints for getting started; shown while there are no messages."""

    def __init__(self) -> None:
        super().__init__()
        self._notice = Static("", classes="notice", markup=False)
        self._notice.display = False

    def compose(self) -> ComposeResult:
        yield Center(Static(LOGO, markup=False, classes="logo"))
        yield Static("Language models on your own machine", classes="motto")
        yield Static(
            Content.assemble(
                *(piece for key, what in _HINTS for piece in ((f"  {key}", "bold $accent"), (f" {what} ", MUTED)))
            )
        )
        yield self._notice

    def tell(self, text: str) -> None:
        """Show a notice about the model below the hints; "" for none."""
        self._notice.update(harmless(text))
        self._notice.display = bool(text)


Row = tuple[str, str, str]
"""A row of a note: a name, its description, and a muted third column."""


class Note(Static):
    """Help, parameters or an error below the messages, shown until the next message."""

    def __init__(self, content: Content | str | Sequence[Row], failure: bool = False) -> None:
        """content: a text, or rows to align in columns. failure: styles it as an error."""
        self._rows = () if isinstance(content, (str, Content)) else content
        text = aligned(self._rows, USUAL_COLUMNS) if self._rows else content
        super().__init__(
            harmless(text) if isinstance(text, str) else text,  # type: ignore[arg-type]
            markup=False,
            classes="note failure" if failure else "note",
        )

    def on_resize(self) -> None:
        if self._rows:
            self.update(aligned(self._rows, self.content_size.width))


class Notice(Static):
    """A line above the prompt for temporary notifications; it covers nothing."""

    def __init__(self) -> None:
        super().__init__("", id="notice", markup=False)
        self.display = False
        self._timer: Timer | None = None

    def show(self, text: str, severity: str, seconds: float) -> None:
        """Show a text for some seconds. severity: information, warning or error."""
        if self._timer is not None:
            self._timer.stop()
        self.set_classes(severity)
        self.update(harmless(text))
        self.display = True
        self._timer = self.set_timer(seconds, self._hide)

    def _hide(self) -> None:
        self.display = False


class Queue(Static):
    """The prompts that wait for the running answer to end; a click on one takes it back into the field."""

    MOST = 4  # prompts shown

    def __init__(self) -> None:
        super().__init__("", id="queue", markup=False)
        self.display = False
        self._texts: Sequence[str] = ()

    def show(self, texts: Sequence[str]) -> None:
        """Show these prompts, one a line."""
        self._texts, self.display = [*texts], bool(texts)
        self._redraw()

    def on_resize(self) -> None:
        self._redraw()

    def _redraw(self) -> None:
        rows: list[Content] = []
        for number, text in enumerate(self._texts[: self.MOST], 1):
            click = Style.from_meta({"@click": f"app.command('queue', '{number}')"})
            row = Content(f"▸ {number}  {harmless(' '.join(text.split()))}")
            rows.append(row.truncate(max(self.content_size.width, 1), ellipsis=True).stylize(click))
        if (more := len(self._texts) - self.MOST) > 0:
            rows.append(Content(f"… and {more} more"))
        rows.append(Content.styled("Sent when the answer ends · ↑ takes the last back, /queue N another", MUTED))
        self.update(Content("\n").join(rows))


def aligned(rows: Sequence[Row], width: int) -> Content:
    """Align rows in three columns of minimal width; the second and third wrap together, next to the name.

    A name without a description may be wider than the name column.
    """
    first = max((columns_of(name) for name, what, _ in rows if what), default=0) + 2
    second = max((columns_of(what) for _, what, beside in rows if beside), default=0) + 2
    if first + second + max(columns_of(beside) for _, _, beside in rows) > width:
        second = 0  # the third column follows the second without alignment
    lines: list[Content] = []
    for name, what, beside in rows:
        gap = " " * max(second - columns_of(what), 2) if beside else ""
        rest = Content.assemble(harmless(what) + gap, (harmless(beside), MUTED)).wrap(max(width - first, first))
        named = harmless(name) + " " * (first - columns_of(name))
        lines.append(Content.assemble((named, "bold"), *rest[:1]))
        lines += [Content.assemble(" " * first, line) for line in rest[1:]]
    return Content("\n").join(lines)


def key_names(keys: str) -> str:
    """Key names for display: "ctrl+j,f1" becomes "Ctrl+J, F1"."""
    return ", ".join("+".join(part.capitalize() for part in key.strip().split("+")) for key in keys.split(",") if key)


def preview(text: str, is_diff: bool) -> Content:
    """A diff in colours, or plain text; control characters are replaced."""
    if not is_diff:
        return Content(harmless(text))
    lines = [(harmless(line), _DIFF_COLOURS.get(line[:1], "")) for line in text.split("\n")]
    return Content("\n").join(Content.styled(line, style) if style else Content(line) for line, style in lines)
