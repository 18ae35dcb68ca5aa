"""The inspector: charts of the engine's own data, and forecasts of step costs under other settings."""

import asyncio
import json
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from localllm.errors import LocalLLMError
from localllm.measure.formulas.memory import F16_BYTES, KV_TYPES
from localllm.measure.inspection_data import snapshot_data
from localllm.measure.laboratory import Forecast, ModelCosts, Reached, Setting, forecast, points
from tui import drawings, laboratory_drawings
from tui.backend import Backend
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
NO_COSTS = "What a step of this model costs is not known: the CPU engine does not compute its architecture."
NO_LIMITS = "Ask something first, or run `localllm bench`: there are no rates to draw with yet."
WIDE = 100  # minimum columns for two charts side by side
# Minimum rows of a chart with its frame; a page with too little space scrolls.
LEAST_ROWS = {"page-laboratory": 13, "page-answers": 14}
USUAL_ROWS = 9
_BITS = (2.5, 3.5, 4.9, 5.7, 6.6, 8.5, 16.0)
_KV_TYPES = tuple(KV_TYPES)
# How the laboratory's keys change the what-if setting.
_CHANGES: Mapping[str, Callable[[Setting], Setting]] = {
    "b": lambda now: replace(now, batch=min(now.batch * 2, 256)),
    "B": lambda now: replace(now, batch=max(now.batch // 2, 1)),
    "c": lambda now: replace(now, context=min(now.context * 2, 1 << 20)),
    "C": lambda now: replace(now, context=max(now.context // 2, 1)),
    "k": lambda now: replace(now, kv_type=_KV_TYPES[(_KV_TYPES.index(now.kv_type) + 1) % len(_KV_TYPES)]),
    "w": lambda now: replace(now, bits=max((bits for bits in _BITS if bits < now.bits), default=now.bits)),
    "W": lambda now: replace(now, bits=min((bits for bits in _BITS if bits > now.bits), default=now.bits)),
    "d": lambda now: replace(now, draft=min(now.draft + 1, 16)),
    "D": lambda now: replace(now, draft=max(now.draft - 1, 0)),
}


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
        self._costs: ModelCosts | None = None
        self._other: Setting | None = None
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
            return self._page == "page-laboratory" and self._other is not None
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
        data = snapshot_data(self._snapshot) | {"costs": self._costs.as_data() if self._costs else None}
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(data, file)
        except OSError as error:
            self.notify(f"{path}: cannot be written: {error.strerror}.", severity="error", markup=False)
            return
        self.notify(f"Written to {path}", markup=False)

    def action_change(self, how: str) -> None:
        assert self._other is not None
        self._other = _CHANGES[how](self._other)
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
            self._costs = await in_thread(self._backend.costs)
        except LocalLLMError as error:
            self._absent = str(error)
        if self._costs is not None:
            self._other = Setting(4, 4096, self._costs.kv_type, self._costs.bits)
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
                    picture.update(Content() if place else _note(self._absent, width))
                else:
                    picture.update(getattr(self, f"_{name}")(self._snapshot, width, max(box.size.height, 2)))

    def _schedule(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        last = snapshot.steps[-1] if snapshot.steps else None
        rate = None
        if self._costs is not None and last is not None and last.seconds and not last.prefill:
            rate = self._costs.shape.read_bytes(last.decode + last.drafted) / last.seconds
        return drawings.schedule(snapshot.steps, width, max(height - 2, 2), rate)

    def _pages(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        costs = self._costs
        token_bytes = costs.shape.kv_bytes_per_token * KV_TYPES[costs.kv_type] / F16_BYTES if costs else 0.0
        return drawings.pages(snapshot, width, max(height - 3, 2), token_bytes)

    def _tree(self, snapshot: EngineSnapshot, _width: int, height: int) -> Content:
        return drawings.tree(snapshot.prefixes, max(height - 1, 3))

    def _requests(self, snapshot: EngineSnapshot, _width: int, height: int) -> Content:
        return drawings.requests(snapshot, height)

    def _timeline(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        return laboratory_drawings.timeline(snapshot, width, height)

    def _last_request(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        return laboratory_drawings.last_request(snapshot, width, height)

    def _roofline(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        costs = self._costs
        if costs is None:
            return _note(NO_COSTS, width)
        reached = Reached.by(costs, snapshot)
        bandwidth, peak = costs.bandwidth, costs.peak  # as measured by `bench`, else the best that steps reached
        if bandwidth is None or peak is None:
            bandwidth, peak = _reached_rates(costs, reached)
        if bandwidth is None or peak is None:
            return _note(NO_LIMITS, width)
        found = points(costs, reached, bandwidth, peak)
        return laboratory_drawings.roofline(found, bandwidth, peak, costs.bandwidth is not None, width, height)

    def _what_if(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        costs, forecasts = self._costs, self._forecasts(snapshot)
        if costs is None or forecasts is None:
            return Content()
        now, other, predict = forecasts
        table = laboratory_drawings.what_if(costs, now, other, Reached.by(costs, snapshot))
        left = height - len(table.plain.splitlines()) - 2
        batches = [1 << power for power in range(min(left, 9))]
        if len(batches) < 3:
            return table
        swept = [(batch, predict(replace(other[0], batch=batch))) for batch in batches]
        return Content("\n").join([table, laboratory_drawings.by_batch(swept, width)])

    def _parts(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        forecasts = self._forecasts(snapshot)
        return laboratory_drawings.parts(*forecasts[:2], width, height) if forecasts else Content()

    def _forecasts(
        self, snapshot: EngineSnapshot
    ) -> tuple[tuple[Setting, Forecast], tuple[Setting, Forecast], Callable[[Setting], Forecast]] | None:
        """Both settings with their forecasts, and a function that forecasts others; None if costs or rates are unknown.

        The current setting is the batch size of the last decoding steps, and the longest request's context.
        """
        costs, other = self._costs, self._other
        if costs is None or other is None:
            return None
        reached = Reached.by(costs, snapshot)
        bandwidth, peak = _reached_rates(costs, reached)
        if bandwidth is None or peak is None:
            return None

        def predict(setting: Setting) -> Forecast:
            return forecast(costs, setting, bandwidth, peak)

        longest = max((request.tokens for request in snapshot.requests), default=0)
        last = snapshot.timelines[-1:]
        rows = sum(span.rows for timeline in last for span in timeline.spans) + sum(each.cached for each in last)
        now = Setting(max(round(reached.rows), 1), max(longest, rows, 1), costs.kv_type, costs.bits)
        return (now, predict(now)), (other, predict(other)), predict

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


def _reached_rates(costs: ModelCosts, reached: Reached) -> tuple[float | None, float | None]:
    """Bytes and operations per second that steps reached, so that a forecast of the current load matches it."""
    return reached.decode or costs.bandwidth, reached.compute or costs.peak


def _note(text: str, width: int) -> Content:
    return Content(textwrap.fill(text, max(width, 1)))
