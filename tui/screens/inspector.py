"""The inspector: charts of the engine's own data, and forecasts of step costs under other settings."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static, TabbedContent, TabPane

from localllm.background import in_thread
from localllm.engine.inspection import EngineSnapshot
from localllm.engine.inspection_data import snapshot_data
from localllm.errors import LocalLLMError
from tui import drawings
from tui.backend import Backend
from tui.laboratory import NO_COSTS, Laboratory, last_request, timeline, wrapped
from tui.status import Latency
from tui.widgets.frame import KeyBar, Notice

REFRESH_S = 0.25
# Page -> chart -> the chart's title.
PAGES: Mapping[str, Mapping[str, str]] = {
    "Engine": {
        "schedule": "Schedule: rows of each step",
        "pages": "KV pages by how many hold them",
        "tree": "Prefix tree",
        "requests": "Requests",
    },
    "Timeline": {"timeline": "Phases of the last requests", "last_request": "The last request, phase by phase"},
    "Laboratory": {"roofline": "Roofline", "what_if": "What if", "parts": "Cost of a decoding step"},
    "Answers": {"latency": "Latency", "choices": "Tokens: probability, alternatives"},
}
NO_ENGINE = "No engine to look into: no model is loaded yet, or a server answers that is not localllm's."
WIDE = 100  # minimum columns for two charts side by side
# Minimum rows of a chart with its frame; a page with too little space scrolls.
LEAST_ROWS = {"page-laboratory": 13, "page-answers": 14}
USUAL_ROWS = 9


class InspectorScreen(Screen[None]):
    """Redraws until it is closed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f2,q", "app.pop_screen", "Back", id="inspector.back"),
        Binding("1", "page('engine')", "Page", key_display="1-4", id="inspector.page"),
        Binding("2", "page('timeline')", show=False, id="inspector.timeline"),
        Binding("3", "page('laboratory')", show=False, id="inspector.laboratory"),
        Binding("4", "page('answers')", show=False, id="inspector.answers"),
        Binding("p", "rivals", "Probabilities", id="inspector.rivals"),
        Binding("e", "export", "Export", id="inspector.export"),
        Binding("b", "change('b')", "Batch", id="inspector.batch"),
        Binding("B", "change('B')", show=False, id="inspector.batch_less"),
        Binding("c", "change('c')", "Context", id="inspector.context"),
        Binding("C", "change('C')", show=False, id="inspector.context_less"),
        Binding("k", "change('k')", "KV type", id="inspector.kv_type"),
        Binding("w", "change('w')", "Weights", id="inspector.bits"),
        Binding("W", "change('W')", show=False, id="inspector.bits_more"),
        Binding("d", "change('d')", "Draft", id="inspector.draft"),
        Binding("D", "change('D')", show=False, id="inspector.draft_less"),
    ]

    def __init__(self, backend: Backend, latency: Latency, note_rivals: Callable[[], None]) -> None:
        """note_rivals: turns recording of the tokens' alternatives on or off."""
        super().__init__()
        self._backend = backend
        self._times = latency
        self._note_rivals = note_rivals
        self._snapshot: EngineSnapshot | None = None
        self._laboratory: Laboratory | None = None
        self._absent = NO_ENGINE
        self._looks = True  # whether there is an engine to inspect
        # Kept as attributes, not queried: a snapshot may arrive after the widgets have been unmounted.
        self._pictures = {name: Static("", id=name) for names in PAGES.values() for name in names}

    def compose(self) -> ComposeResult:
        with TabbedContent(id="inspected"):
            for number, (page, names) in enumerate(PAGES.items(), 1):
                with TabPane(f"{number} {page}", id=f"page-{page.lower()}"), VerticalScroll(), Grid():
                    for name, title in names.items():
                        with Vertical(classes="picture") as box:
                            box.border_title = title
                            yield self._pictures[name]
        yield Notice()
        yield KeyBar(palette=False)

    def on_mount(self) -> None:
        self.run_worker(self._learn())
        self.run_worker(self._watch())

    def on_resize(self) -> None:
        self.call_after_refresh(self._arrange)

    def on_tabbed_content_tab_activated(self) -> None:
        self.call_after_refresh(self._arrange)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable the laboratory's keys only on its page."""
        if action == "change":
            return self._page == "page-laboratory" and self._laboratory is not None
        return True

    def action_page(self, page: str) -> None:
        self.query_one(TabbedContent).active = f"page-{page}"

    def action_rivals(self) -> None:
        self._note_rivals()

    def action_export(self) -> None:
        """Write what is shown to a JSON file in the current folder."""
        if self._snapshot is None:
            self.notify(self._absent, severity="warning", markup=False)
            return
        path = Path(f"inspector-{time.strftime('%Y%m%d-%H%M%S')}.json").absolute()
        data = snapshot_data(self._snapshot) | {"costs": self._laboratory.costs.as_data() if self._laboratory else None}
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(data, file)
        except OSError as error:
            self.notify(f"{path}: cannot be written: {error.strerror}.", severity="error", markup=False)
            return
        self.notify(f"Written to {path}", markup=False)

    def action_change(self, how: str) -> None:
        assert self._laboratory is not None
        self._laboratory.change(how)
        self._draw()

    @property
    def _page(self) -> str:
        return self.query_one(TabbedContent).active

    def _arrange(self) -> None:
        """Lay out two columns if they fit; the rows fill the page, or it scrolls."""
        pane = self.query_one(f"#{self._page}", TabPane)
        pictures = [box for box in pane.query(".picture") if box.display]
        beside = self.size.width >= WIDE and self._page != "page-timeline"  # time runs horizontally
        columns = 2 if beside and len(pictures) > 1 else 1
        scroll = pane.query_one(VerticalScroll)
        scroll.focus()
        space = scroll.size.height
        lines = -(-len(pictures) // columns)
        grid = pane.query_one(Grid)
        grid.styles.grid_size_columns = columns
        grid.styles.height = max(space, lines * LEAST_ROWS.get(self._page, USUAL_ROWS))
        # With three charts, the first gets its own column.
        tall = columns == 2 and len(pictures) == 3
        pictures[0].styles.row_span = 2 if tall else 1
        self.refresh_bindings()
        self.call_after_refresh(self._draw)

    async def _learn(self) -> None:
        try:
            self._laboratory = await in_thread(self._backend.laboratory)
        except LocalLLMError as error:
            self._absent = str(error)
        self.refresh_bindings()

    async def _watch(self) -> None:
        while self.is_current:
            asked = self._backend.inspect()
            if asked is None:
                self._snapshot = None
            else:
                try:
                    self._snapshot = await asyncio.wrap_future(asked)
                except LocalLLMError as error:  # the server lacks the route or is gone
                    self._snapshot, self._absent = None, str(error)
                except asyncio.CancelledError:
                    if not asked.cancelled():  # this worker, not the engine, is ending
                        raise
            if (self._snapshot is not None) != self._looks:
                self._looks = not self._looks
                self._show_boxes()
            self._draw()
            await asyncio.sleep(REFRESH_S)

    def _show_boxes(self) -> None:
        """Without an engine, show only the first box of each page, which says so; the Answers page needs no engine."""
        for page, names in PAGES.items():
            for name in list(names)[1:]:
                if (box := self._pictures[name].parent) is not None:
                    box.display = self._looks or page == "Answers"
        self._arrange()

    def _draw(self) -> None:
        """Redraw the charts of the visible page: a chart's method draws it in a number of columns and rows."""
        for page, names in PAGES.items():
            for place, name in enumerate(names):
                picture = self._pictures[name]
                width, box = picture.size.width, picture.parent
                if not width or not isinstance(box, Vertical):
                    continue
                if self._snapshot is None and page != "Answers":
                    picture.update(Content() if place else wrapped(self._absent, width))
                else:
                    picture.update(getattr(self, f"_{name}")(self._snapshot, width, max(box.size.height, 2)))

    def _schedule(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        last = snapshot.steps[-1] if snapshot.steps else None
        rate = None
        if self._laboratory is not None and last is not None and last.seconds and not last.prefill:
            rate = self._laboratory.read_rate(last)
        return drawings.schedule(snapshot.steps, width, max(height - 2, 2), rate)

    def _pages(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        costs = self._laboratory.costs if self._laboratory else None
        token_bytes = costs.token_bytes(costs.kv_type) if costs else 0.0
        return drawings.pages(snapshot, width, max(height - 3, 2), token_bytes)

    def _tree(self, snapshot: EngineSnapshot, _width: int, height: int) -> Content:
        return drawings.tree(snapshot.prefixes, max(height - 1, 3))

    def _requests(self, snapshot: EngineSnapshot, _width: int, height: int) -> Content:
        return drawings.requests(snapshot, height)

    def _timeline(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        return timeline(snapshot, width, height)

    def _last_request(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        return last_request(snapshot, width, height)

    def _roofline(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        return self._laboratory.roofline(snapshot, width, height) if self._laboratory else wrapped(NO_COSTS, width)

    def _what_if(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        return self._laboratory.what_if(snapshot, width, height) if self._laboratory else Content()

    def _parts(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        return self._laboratory.parts(snapshot, width, height) if self._laboratory else Content()

    def _latency(self, _snapshot: EngineSnapshot | None, width: int, _height: int) -> Content:
        times = self._times
        return Content("\n").join(
            [
                drawings.histogram("TTFT, to the first token", times.ttft, width),
                drawings.histogram("ITL, between tokens", times.itl, width),
                drawings.speculation(times.drafted, times.accepted),
            ]
        )

    def _choices(self, _snapshot: EngineSnapshot | None, _width: int, height: int) -> Content:
        return drawings.choices(tuple(self._times.choices), max(height, 3))
