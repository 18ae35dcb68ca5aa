"""The inspector: charts of the engine's own data, and forecasts of step costs under other settings."""

import asyncio
import json
import textwrap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static, TabbedContent, TabPane

from localllm.engine.inspection import EngineSnapshot
from localllm.errors import LocalLLMError
from localllm.measure.formulas.memory import F16_BYTES, KV_TYPES
from localllm.measure.inspection_data import snapshot_data
from localllm.measure.laboratory import Forecast, ModelCosts, Reached, Setting, forecast, points
from tui import drawings, laboratory_drawings
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
_MOST_BATCH, _MOST_CONTEXT, _MOST_DRAFT = 256, 1 << 20, 16


class InspectorScreen(Screen[None]):
    """Redraws until it is closed.

    ask: returns a future of a snapshot, or None if no engine can be inspected. costs: returns the costs of the model's
    steps; may block.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f2,q", "app.pop_screen", "Back", id="inspector.back"),
        Binding("1", "page('engine')", "Page", key_display="1-4", id="inspector.page"),
        Binding("2", "page('timeline')", show=False, id="inspector.timeline"),
        Binding("3", "page('laboratory')", show=False, id="inspector.laboratory"),
        Binding("4", "page('answers')", show=False, id="inspector.answers"),
        Binding("p", "rivals", "Probabilities", id="inspector.rivals"),
        Binding("e", "export", "Export", id="inspector.export"),
        Binding("b", "change('batch', 2)", "Batch", id="inspector.batch"),
        Binding("B", "change('batch', 0.5)", show=False, id="inspector.batch_less"),
        Binding("c", "change('context', 2)", "Context", id="inspector.context"),
        Binding("C", "change('context', 0.5)", show=False, id="inspector.context_less"),
        Binding("k", "kv_type", "KV type", id="inspector.kv_type"),
        Binding("w", "bits(-1)", "Weights", id="inspector.bits"),
        Binding("W", "bits(1)", show=False, id="inspector.bits_more"),
        Binding("d", "draft(1)", "Draft", id="inspector.draft"),
        Binding("D", "draft(-1)", show=False, id="inspector.draft_less"),
    ]

    def __init__(
        self,
        ask: Callable[[], "Future[EngineSnapshot] | None"],
        costs: Callable[[], ModelCosts | None],
        latency: Latency,
        note_rivals: Callable[[], None],
    ) -> None:
        super().__init__()
        self._ask = ask
        self._costs_of = costs
        self._latency_of = latency
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
        yield KeyBar(show_command_palette=False)

    def on_mount(self) -> None:
        self.run_worker(self._learn())
        self.run_worker(self._watch())

    def on_resize(self) -> None:
        self.call_after_refresh(self._arrange)

    def on_tabbed_content_tab_activated(self) -> None:
        self.call_after_refresh(self._arrange)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable the laboratory's keys only on its page."""
        if action in ("change", "kv_type", "bits", "draft"):
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

    def action_change(self, field: str, factor: float) -> None:
        if self._other is not None:
            most = _MOST_BATCH if field == "batch" else _MOST_CONTEXT
            value = min(max(int(getattr(self._other, field) * factor), 1), most)
            changed = {"batch": self._other.batch, "context": self._other.context} | {field: value}
            self._change(replace(self._other, batch=changed["batch"], context=changed["context"]))

    def action_kv_type(self) -> None:
        if self._other is not None:
            types = list(KV_TYPES)
            following = types[(types.index(self._other.kv_type) + 1) % len(types)]
            self._change(replace(self._other, kv_type=following))

    def action_bits(self, step: int) -> None:
        if self._other is not None:
            now = self._other.bits
            beyond = [bits for bits in _BITS if (bits < now if step < 0 else bits > now)]
            if beyond:
                self._change(replace(self._other, bits=beyond[-1] if step < 0 else beyond[0]))

    def action_draft(self, step: int) -> None:
        if self._other is not None:
            self._change(replace(self._other, draft=min(max(self._other.draft + step, 0), _MOST_DRAFT)))

    @property
    def _page(self) -> str:
        return self.query_one(TabbedContent).active

    def _change(self, setting: Setting) -> None:
        self._other = setting
        self._draw()

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
            self._costs = await asyncio.to_thread(self._costs_of)
        except LocalLLMError as error:
            self._absent = str(error)
        if self._costs is not None:
            self._other = Setting(4, 4096, self._costs.kv_type, self._costs.bits)
        self.refresh_bindings()

    async def _watch(self) -> None:
        while self.is_current:
            asked = self._ask()
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
        """Redraw the charts of the visible page."""
        for name, picture in self._pictures.items():
            box = picture.parent
            if picture.size.width and isinstance(box, Vertical):
                picture.update(getattr(self, f"_{name}")(picture.size.width, max(box.size.height, 2)))

    def _schedule(self, width: int, height: int) -> Content:
        if self._snapshot is None:
            return _note(self._absent, width)
        last = self._snapshot.steps[-1] if self._snapshot.steps else None
        rate = None
        if self._costs is not None and last is not None and last.seconds and not last.prefill:
            rate = self._costs.shape.read_bytes(last.decode + last.drafted) / last.seconds
        return drawings.schedule(self._snapshot.steps, width, max(height - 2, 2), rate)

    def _pages(self, width: int, height: int) -> Content:
        if self._snapshot is None:
            return Content()
        costs = self._costs
        token_bytes = costs.shape.kv_bytes_per_token * KV_TYPES[costs.kv_type] / F16_BYTES if costs else 0.0
        return drawings.pages(self._snapshot, width, max(height - 3, 2), token_bytes)

    def _tree(self, _width: int, height: int) -> Content:
        return Content() if self._snapshot is None else drawings.tree(self._snapshot.prefixes, max(height - 1, 3))

    def _requests(self, _width: int, height: int) -> Content:
        return Content() if self._snapshot is None else drawings.requests(self._snapshot, height)

    def _timeline(self, width: int, height: int) -> Content:
        if self._snapshot is None:
            return _note(self._absent, width)
        return laboratory_drawings.timeline(self._snapshot, width, height)

    def _last_request(self, width: int, height: int) -> Content:
        if self._snapshot is None:
            return Content()
        return laboratory_drawings.last_request(self._snapshot, width, height)

    def _roofline(self, width: int, height: int) -> Content:
        if self._snapshot is None or self._costs is None:
            return _note(self._absent if self._snapshot is None else NO_COSTS, width)
        rates = self._rates()
        if rates is None:
            return _note(NO_LIMITS, width)
        found = points(self._costs, self._reached(), *rates)
        benchmarked = self._costs.bandwidth is not None
        return laboratory_drawings.roofline(found, *rates, benchmarked, width, height)

    def _what_if(self, width: int, height: int) -> Content:
        if (both := self._forecasts()) is None:
            return Content()
        costs, rates, now, other = both
        table = laboratory_drawings.what_if(costs, now, other, self._reached())
        left = height - len(table.plain.splitlines()) - 2
        batches = [1 << power for power in range(min(left, 9))]
        if len(batches) < 3:
            return table
        swept = [(batch, forecast(costs, replace(other[0], batch=batch), *rates)) for batch in batches]
        return Content("\n").join([table, laboratory_drawings.by_batch(swept, width)])

    def _parts(self, width: int, height: int) -> Content:
        if (both := self._forecasts()) is None:
            return Content()
        _, _, now, other = both
        return laboratory_drawings.parts(now, other, width, height)

    def _forecasts(
        self,
    ) -> tuple[ModelCosts, tuple[float, float], tuple[Setting, Forecast], tuple[Setting, Forecast]] | None:
        """Costs, rates, and both settings with their forecasts; None if costs or rates are unknown."""
        rates = self._forecast_rates()
        if self._costs is None or self._other is None or rates is None:
            return None
        now, other = ((each, forecast(self._costs, each, *rates)) for each in (self._now(), self._other))
        return self._costs, rates, now, other

    def _latency(self, width: int, _height: int) -> Content:
        latency = self._latency_of
        return Content("\n").join(
            [
                drawings.histogram("TTFT, to the first token", latency.ttft, width),
                drawings.histogram("ITL, between tokens", latency.itl, width),
                drawings.speculation(latency.drafted, latency.accepted),
            ]
        )

    def _choices(self, _width: int, height: int) -> Content:
        return drawings.choices(tuple(self._latency_of.choices), max(height, 3))

    def _reached(self) -> Reached:
        assert self._costs is not None
        return Reached.by(self._costs, self._snapshot) if self._snapshot else Reached(None, None)

    def _now(self) -> Setting:
        """The current setting: the batch size of the last decoding steps, and the longest request's context."""
        assert self._costs is not None
        requests = self._snapshot.requests if self._snapshot else ()
        longest = max((request.tokens for request in requests), default=0)
        last = self._snapshot.timelines[-1:] if self._snapshot else ()
        rows = sum(span.rows for timeline in last for span in timeline.spans) + sum(each.cached for each in last)
        return Setting(
            max(round(self._reached().rows), 1), max(longest, rows, 1), self._costs.kv_type, self._costs.bits
        )

    def _rates(self) -> tuple[float, float] | None:
        """Peak bytes and operations per second: as measured by `bench`, else the best that steps reached."""
        assert self._costs is not None
        if self._costs.bandwidth is not None and self._costs.peak is not None:
            return self._costs.bandwidth, self._costs.peak
        return self._forecast_rates()

    def _forecast_rates(self) -> tuple[float, float] | None:
        """Bytes and operations per second that steps reached, so that a forecast of the current load matches it."""
        if self._costs is None:
            return None
        reached = self._reached()
        bandwidth, peak = reached.decode or self._costs.bandwidth, reached.compute or self._costs.peak
        return None if bandwidth is None or peak is None else (bandwidth, peak)


def _note(text: str, width: int) -> Content:
    return Content(textwrap.fill(text, max(width, 1)))
