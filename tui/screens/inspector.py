"""The inspector: the machine at work, drawn from the engine's own data."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ItemGrid, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import Footer, Static

from localllm.engine.inspection import EngineSnapshot
from tui import drawings
from tui.status import Latency

REFRESH_S = 0.25
PICTURES = {
    "schedule": "Schedule: rows of each step",
    "pages": "KV pages",
    "tree": "Prefix tree",
    "requests": "Requests",
    "latency": "Latency",
    "choices": "Tokens",
}
NO_ENGINE = "No engine runs in this process: no model is loaded yet, or a server answers."


WIDE = 112  # columns for two boxes in which nothing is wrapped


class InspectorScreen(Screen[None]):
    """Draws until it is closed. ask returns what will hold a snapshot, or None where no engine can be looked into."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f2,q", "app.pop_screen", "Back to the chat", id="inspector.back"),
        Binding("p", "rivals", "Probabilities", id="inspector.rivals"),
    ]

    def __init__(
        self, ask: Callable[[], "Future[EngineSnapshot] | None"], latency: Latency, note_rivals: Callable[[], None]
    ) -> None:
        super().__init__()
        self._ask = ask
        self._latency = latency
        self._note_rivals = note_rivals
        # Held, not looked for: a look into the engine may come when they have left the screen.
        self._pictures = {name: Static("", id=name) for name in PICTURES}

    def compose(self) -> ComposeResult:
        """One box for each picture; two columns where there is room."""
        with VerticalScroll(), ItemGrid(min_column_width=36, stretch_height=True):
            for name, title in PICTURES.items():
                with Vertical(classes="picture") as box:
                    box.border_title = title
                    yield self._pictures[name]
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Draw what the chat has measured, and look into the engine."""
        self.run_worker(self._watch())

    def on_resize(self, event: Resize) -> None:
        """Two columns from 80 columns on, wider ones where there is room."""
        self.query_one(ItemGrid).min_column_width = 36 if event.size.width < WIDE else 56

    async def _watch(self) -> None:
        while self.is_current:
            asked = self._ask()
            if asked is None:
                self._draw("schedule", lambda _: Content(NO_ENGINE))
            else:
                try:
                    self._draw_engine(await asyncio.wrap_future(asked))
                except asyncio.CancelledError:
                    if not asked.cancelled():  # this worker, not the engine, is ending
                        raise
            self._draw_chat()
            await asyncio.sleep(REFRESH_S)

    def _draw_engine(self, snapshot: EngineSnapshot) -> None:
        self._draw("schedule", lambda width: drawings.schedule(snapshot.steps, width, drawings.height_for(width)))
        self._draw("pages", lambda width: drawings.pages(snapshot, width, drawings.height_for(width)))
        self._draw("tree", lambda _: drawings.tree(snapshot.prefixes))
        self._draw("requests", lambda _: drawings.requests(snapshot))

    def _draw_chat(self) -> None:
        latency = self._latency
        self._draw(
            "latency",
            lambda width: Content("\n").join(
                [
                    drawings.histogram("TTFT", latency.ttft, width),
                    drawings.histogram("ITL", latency.itl, width),
                    drawings.speculation(latency.drafted, latency.accepted),
                ]
            ),
        )
        self._draw("choices", lambda _: drawings.choices(tuple(latency.choices)))

    def _draw(self, name: str, draw: Callable[[int], Content]) -> None:
        picture = self._pictures[name]
        if picture.size.width:
            picture.update(draw(picture.size.width))

    def action_rivals(self) -> None:
        """Note alternatives from the next answer on."""
        self._note_rivals()
