"""The inspector's laboratory: forecasts of step costs, timeline, roofline and what-if as text."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from textual.content import Content

from localllm.engine.inspection import EngineSnapshot, StepRecord, Timeline
from localllm.text import counted, human_bytes, human_seconds, human_speed
from localllm.wings.lab.laboratory import (
    KV_TYPES,
    PREFILL_ROWS,
    Forecast,
    MachineCosts,
    Point,
    Reached,
    Setting,
    costs_of,
    forecast,
    points,
)
from tui.drawings import DECODE, DRAFTED, GIGA, PREFILL, Piece
from tui.status import MUTED

if TYPE_CHECKING:
    from gguf_io import ModelFile
    from localllm.settings import KVType

_QUEUED, _CHUNKS, _FIRST, _DECODING, _ENDED = "·", "█▓", "┃", "━", "╸"
_LEGEND = ((_QUEUED, " queue ", MUTED), (_CHUNKS, " prompt's chunks ", PREFILL), (_FIRST, " first token ", DRAFTED))
_MARK = 8  # minimum columns between marks of the time axis
_LABEL = 7  # columns of a request's label or of an axis label

NO_COSTS = "What a step of this model costs is not known: the CPU engine does not compute its architecture."
NO_LIMITS = "Ask something first, or run `localllm bench`: there are no rates to draw with yet."
_BITS = (2.5, 3.5, 4.9, 5.7, 6.6, 8.5, 16.0)
# How keys change the what-if setting.
_CHANGES: Mapping[str, Callable[[Setting], Setting]] = {
    "b": lambda now: replace(now, batch=min(now.batch * 2, 256)),
    "B": lambda now: replace(now, batch=max(now.batch // 2, 1)),
    "c": lambda now: replace(now, context=min(now.context * 2, 1 << 20)),
    "C": lambda now: replace(now, context=max(now.context // 2, 1)),
    "k": lambda now: replace(now, kv_type=KV_TYPES[(KV_TYPES.index(now.kv_type) + 1) % len(KV_TYPES)]),
    "w": lambda now: replace(now, bits=max((bits for bits in _BITS if bits < now.bits), default=now.bits)),
    "W": lambda now: replace(now, bits=min((bits for bits in _BITS if bits > now.bits), default=now.bits)),
    "d": lambda now: replace(now, draft=min(now.draft + 1, 16)),
    "D": lambda now: replace(now, draft=max(now.draft - 1, 0)),
}


class Laboratory:
    """What steps of the current model cost, and the what-if setting, with their charts."""

    def __init__(self, costs: MachineCosts) -> None:
        self.costs = costs
        self._other = Setting(4, 4096, costs.kv_type, costs.bits)

    @classmethod
    def of_file(
        cls, file: "ModelFile", kv_types: "tuple[KVType | None, KVType | None]", threads: int | None
    ) -> Self | None:
        """For a model loaded with these settings; None for architectures that only llama.cpp supports."""
        costs = costs_of(file, kv_types, threads)
        return cls(costs) if costs else None

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Self:
        """From a server's costs. Raises TypeError or KeyError for anything else."""
        return cls(MachineCosts.from_data(data))

    def change(self, key: str) -> None:
        """Change the what-if setting as a key does."""
        self._other = _CHANGES[key](self._other)

    def read_rate(self, step: StepRecord) -> float:
        """Bytes per second that a decoding step read."""
        return self.costs.shape.read_bytes(step.decode + step.drafted) / step.seconds

    def roofline(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        costs = self.costs
        reached = Reached.by(costs, snapshot)
        bandwidth, peak = costs.bandwidth, costs.peak  # as measured by `bench`, else the best that steps reached
        if bandwidth is None or peak is None:
            bandwidth, peak = self._reached_rates(reached)
        if bandwidth is None or peak is None:
            return wrapped(NO_LIMITS, width)
        found = points(costs, reached, bandwidth, peak)
        return roofline(found, bandwidth, peak, costs.bandwidth is not None, width, height)

    def what_if(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        forecasts = self._forecasts(snapshot)
        if forecasts is None:
            return Content()
        now, other, predict = forecasts
        table = what_if(self.costs, now, other, Reached.by(self.costs, snapshot))
        left = height - len(table.plain.splitlines()) - 2
        batches = [1 << power for power in range(min(left, 9))]
        if len(batches) < 3:
            return table
        swept = [(batch, predict(replace(other[0], batch=batch))) for batch in batches]
        return Content("\n").join([table, by_batch(swept, width)])

    def parts(self, snapshot: EngineSnapshot, width: int, height: int) -> Content:
        forecasts = self._forecasts(snapshot)
        return parts(*forecasts[:2], width, height) if forecasts else Content()

    def _forecasts(
        self, snapshot: EngineSnapshot
    ) -> tuple[tuple[Setting, Forecast], tuple[Setting, Forecast], Callable[[Setting], Forecast]] | None:
        """Both settings with their forecasts, and a function that forecasts others; None if rates are unknown.

        The current setting is the batch size of the last decoding steps, and the longest request's context.
        """
        costs = self.costs
        reached = Reached.by(costs, snapshot)
        bandwidth, peak = self._reached_rates(reached)
        if bandwidth is None or peak is None:
            return None

        def predict(setting: Setting) -> Forecast:
            return forecast(costs, setting, bandwidth, peak)

        longest = max((request.tokens for request in snapshot.requests), default=0)
        last = snapshot.timelines[-1:]
        rows = sum(span.rows for timeline in last for span in timeline.spans) + sum(each.cached for each in last)
        now = Setting(max(round(reached.rows), 1), max(longest, rows, 1), costs.kv_type, costs.bits)
        return (now, predict(now)), (self._other, predict(self._other)), predict

    def _reached_rates(self, reached: Reached) -> tuple[float | None, float | None]:
        """Bytes and operations per second that steps reached, so that a forecast of the current load matches it."""
        return reached.decode or self.costs.bandwidth, reached.compute or self.costs.peak


def wrapped(text: str, width: int) -> Content:
    return Content(textwrap.fill(text, max(width, 1)))


def timeline(snapshot: EngineSnapshot, width: int, height: int) -> Content:
    """One line per recent request: queueing, prompt chunks, first token, decoding, end."""
    shown = snapshot.timelines[-max(height - 3, 1) :]
    if not shown:
        return Content.styled("No request has come yet.", MUTED)
    began = min(each.came for each in shown)
    seconds = max(max(snapshot.now if each.ended is None else each.ended for each in shown) - began, 1e-3)
    below = height - 2 >= 2 * len(shown)  # there is room for a line of figures for each
    figures = 36 if width >= 90 and not below else 0
    room = max(width - _LABEL - figures, 8)
    lines: list[Piece] = []
    first = len(snapshot.timelines) - len(shown) + 1
    for number, each in enumerate(shown, first):
        lines.append((f"{f'#{number}':<{_LABEL}}"[:_LABEL], MUTED))
        lines += _bar(each, snapshot.now, began, seconds / room, room)
        if below:
            details = list(_details(each))
            while len(details) > 1 and _LABEL + len(" · ".join(details)) > width:
                details.pop()  # avoids cutting a figure in half
            lines.append((f"\n{'':<{_LABEL}}{' · '.join(details)}"[: width + 1], MUTED))
        lines.append((f" {_figures(each)}"[:figures], MUTED))
        lines.append(("\n", ""))
    lines += [*_time_axis(seconds, room), *_legend()]
    return Content.assemble(*lines)


def last_request(snapshot: EngineSnapshot, width: int, height: int) -> Content:
    """The phases of the last request, one per line, each with its time and its work."""
    if not snapshot.timelines:
        return Content.styled("No request has come yet.", MUTED)
    each = snapshot.timelines[-1]
    ended = snapshot.now if each.ended is None else each.ended
    begun = each.spans[0].began if each.spans else ended
    phases: list[tuple[str, float, float, str, str]] = [("queue", each.came, begun, MUTED, "")]
    if each.cached:
        phases.append(("cache", begun, begun, DRAFTED, f"{counted(each.cached, 'token')} not computed again"))
    for span in each.spans:
        rate = span.rows / max(span.ended - span.began, 1e-6)
        what = f"{counted(span.rows, 'row')} at {human_speed(rate)}/s"
        phases.append(("decode" if span.decodes else "prefill", span.began, span.ended, "", what))
    end = ("now", "at work") if each.ended is None else ("finish", counted(each.generated, "token"))
    phases.append((end[0], ended, ended, DECODE, end[1]))
    room_for = max(height - 2, 3)
    if len(phases) > room_for:
        left = len(phases) - room_for
        gap = ("...", phases[2][1], phases[1 + left][2], MUTED, f"{left} more")
        phases = [*phases[:2], gap, *phases[2 + left + 1 :]]
    words = 30 if width >= 70 else 0
    room = max(width - 20 - words, 8)
    per_cell = max(ended - each.came, 1e-3) / room
    lines: list[Piece] = []
    for name, start, stop, style, what in phases:
        low = min(int((start - each.came) / per_cell), room - 1)
        length = min(max(math.ceil((stop - each.came) / per_cell) - low, 1), room - low)
        colour = style or (DECODE if name == "decode" else PREFILL)
        sign = _FIRST if start == stop else "█" if name == "prefill" else "━"
        took = human_seconds(stop - start) if stop > start else f"at {human_seconds(start - each.came)}"
        lines += [(f"{name:<8}", ""), (f"{took:>11} ", MUTED), (" " * low + sign * length, colour)]
        lines += [(" " * (room - low - length) + f" {what}"[:words], MUTED), ("\n", "")]
    return Content.assemble(*lines, (" " * 13, ""), *_time_axis(max(ended - each.came, 1e-3), room))


def _legend() -> list[Piece]:
    pieces = [piece for sign, what, style in _LEGEND for piece in ((sign, style), (what, MUTED))]
    return [*pieces, (_DECODING, DECODE), (" decoding", MUTED)]


def _bar(each: Timeline, now: float, began: float, per_cell: float, room: int) -> list[Piece]:
    cells: list[Piece] = [(" ", "")] * room

    def put(start: float, stop: float, sign: str, style: str) -> None:
        low = min(int((start - began) / per_cell), room - 1)
        for place in range(low, min(max(math.ceil((stop - began) / per_cell), low + 1), room)):
            cells[place] = (sign, style)

    put(each.came, each.spans[0].began if each.spans else now if each.ended is None else each.ended, _QUEUED, MUTED)
    first: float | None = None
    for number, span in enumerate(each.spans):
        if span.decodes:
            first = span.began if first is None else first
            put(span.began, span.ended, _DECODING, DECODE)
        else:
            put(span.began, span.ended, _CHUNKS[number % 2], PREFILL)
    if each.ended is not None and first is not None:
        put(each.ended, each.ended, _ENDED, DECODE)
    if first is not None:
        put(first, first, _FIRST, DRAFTED)
    return cells


def _figures(each: Timeline) -> str:
    """Time to the first token and decoding speed, or the request's state before that."""
    first = next((span.began for span in each.spans if span.decodes), None)
    if first is None:
        return "waits" if not each.spans else "reads its prompt" if each.ended is None else "no token"
    decoded = [span for span in each.spans if span.decodes]
    rate = sum(span.rows for span in decoded) / max(sum(span.ended - span.began for span in decoded), 1e-6)
    return f"first token {human_seconds(first - each.came)}, {human_speed(rate)} rows/s"


def _details(each: Timeline) -> Sequence[str]:
    """The figures of `_figures`, plus queue time, prompt time, cached and generated tokens."""
    chunks = [span for span in each.spans if not span.decodes]
    if not chunks:
        return (_figures(each),)
    took = sum(span.ended - span.began for span in chunks)
    read = f"{counted(sum(span.rows for span in chunks), 'row')} in {counted(len(chunks), 'chunk')}"
    return (
        _figures(each),
        f"queue {human_seconds(chunks[0].began - each.came)}",
        f"prompt {human_seconds(took)}, {read}",
        f"{each.cached} cached",
        "at work" if each.ended is None else f"{each.generated} new",
    )


def _time_axis(seconds: float, room: int) -> list[Piece]:
    """A time axis with as many marks at round times as fit."""
    least = seconds * _MARK / room
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    line = ""
    for mark in range(math.floor(seconds / step) + 1):
        text = "└" + (human_seconds(step * mark) if mark else "0")
        place = round(step * mark / seconds * room)
        if place + len(text) <= room:
            line = line.ljust(place) + text
    return [(" " * _LABEL + line + "\n", MUTED)]


def roofline(
    points: Iterable[Point], bandwidth: float, peak: float, benchmarked: bool, width: int, height: int
) -> Content:
    """A roofline plot: operations per second over operations per byte, log-log, with the model's points.

    benchmarked: True if the roof comes from a benchmark, False if it is the best of the last steps.
    """
    known = list(points)
    columns, rows = max(width - _LABEL - 2, 12), max(height - 3, 4)
    ridge = peak / bandwidth
    lowest = min([point.intensity for point in known] + [ridge / 16]) / 2
    highest = max([point.intensity for point in known] + [ridge * 4])
    top = max([peak, *(point.rate for point in known)]) * 1.6
    floor = min([lowest * bandwidth, *(point.rate / 2 for point in known)])

    def across(intensity: float) -> int:
        return round(math.log(intensity / lowest) / math.log(highest / lowest) * (columns - 1))

    def down(rate: float) -> int:
        return rows - 1 - round(math.log(rate / floor) / math.log(top / floor) * (rows - 1))

    canvas: list[list[Piece]] = [[(" ", "")] * columns for _ in range(rows)]
    before = None
    for column in range(columns):
        intensity = lowest * (highest / lowest) ** (column / (columns - 1))
        row = min(max(down(min(peak, intensity * bandwidth)), 0), rows - 1)
        sign = "─" if before == row or intensity > ridge else "/"
        canvas[row][column], before = (sign, MUTED), row
    for point in known:
        row, column = min(max(down(point.rate), 0), rows - 1), across(point.intensity)
        style = ("$success" if point.name == "D" else "$primary") if point.measured else "$secondary"
        column = min(column, columns - len(point.name))
        for at, letter in enumerate(point.name, column):
            canvas[row][at] = (letter, f"bold {style}" if point.measured else style)
    labels = {0: top, rows // 2: math.sqrt(top * floor), rows - 1: floor}
    what = "as benchmarked" if benchmarked else "best of last steps"
    lines: list[Piece] = [(f"GOP/s by operations/byte · roof: {what}\n", MUTED)]
    for number, row_of in enumerate(canvas):
        label = f"{_short(labels[number] / GIGA):>{_LABEL - 1}}" if number in labels else ""
        lines += [(f"{label:>{_LABEL - 1}} │", MUTED), *row_of, ("\n", "")]
    ticks = [(0, lowest), (columns // 2, math.sqrt(lowest * highest)), (columns - 6, highest)]
    axis = " " * columns
    for column, value in ticks:
        text = _short(value)
        axis = axis[:column] + text + axis[column + len(text) :]
    lines.append((f"{'':>{_LABEL}} {axis.rstrip()}\n", MUTED))
    lines += [("D", "bold $success"), (" decode ", MUTED), ("P", "bold $primary"), (" prefill as run · ", MUTED)]
    lines += [("1 4 16 64", "$secondary"), (" rows at best", MUTED)]
    return Content.assemble(*lines)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def parts(now: tuple[Setting, Forecast], other: tuple[Setting, Forecast], width: int, height: int) -> Content:
    """The time of each part of a step: now, and below it for the what-if setting."""
    name_room = max(len(name) for name, _ in other[1].parts) + 1
    room = max(width - name_room - 16, 4)
    most = max(seconds for _, found in (now, other) for _, seconds in found.parts)
    both = height >= 2 * len(other[1].parts) + 3
    lines: list[Piece] = []
    for what, (setting, found) in (("now", now), ("what if", other)) if both else (("what if", other),):
        rows = setting.batch * (setting.draft + 1)
        lines.append((f"{what}: {counted(rows, 'row')} in {human_seconds(found.seconds)}\n", MUTED))
        for name, seconds in found.parts:
            filled = math.ceil(seconds / most * room) if seconds else 0
            lines += [
                (f"{name:<{name_room}}", ""),
                ("█" * filled, PREFILL if name in found.limited else DECODE),
                (f" {human_seconds(seconds)} {seconds / found.seconds:.0%}\n", MUTED),
            ]
    lines += [("█", DECODE), (" memory limits ", MUTED), ("█", PREFILL), (" arithmetic limits", MUTED)]
    return Content.assemble(*lines)


def by_batch(forecasts: Sequence[tuple[int, Forecast]], width: int) -> Content:
    """Total tokens per second for several batch sizes of the what-if setting."""
    room = max(width - 26, 4)
    most = max(found.all for _, found in forecasts)
    lines: list[Piece] = [("\nbatch  tok/s of all (of each)\n", MUTED)]
    for batch, found in forecasts:
        bar = "█" * max(round(found.all / most * room), 1)
        lines += [(f"{batch:>5}  ", ""), (bar, "$secondary")]
        lines.append((f" {human_speed(found.all)} ({human_speed(found.each)})\n", MUTED))
    return Content.assemble(*lines)


def what_if(
    costs: MachineCosts, now: tuple[Setting, Forecast], other: tuple[Setting, Forecast], reached: Reached
) -> Content:
    """Both settings and their forecasts side by side, above the speed of the last steps."""
    (first, one), (second, two) = now, other
    rows: Sequence[tuple[str, str, str, str]] = (
        ("b B", "sequences at once", str(first.batch), str(second.batch)),
        ("c C", "tokens of context", f"{first.context:,}", f"{second.context:,}"),
        ("k", "keys and values", first.kv_type, second.kv_type),
        ("w W", "bits of a weight", f"{first.bits:.2f}", f"{second.bits:.2f}"),
        ("d D", "drafted, 70% right", str(first.draft), str(second.draft)),
        ("", "tok/s of each", human_speed(one.each), human_speed(two.each)),
        ("", "tok/s of all", human_speed(one.all), human_speed(two.all)),
        ("", "weights", human_bytes(round(one.weights)), human_bytes(round(two.weights))),
        ("", "KV cache", human_bytes(round(one.kv)), human_bytes(round(two.kv))),
    )
    lines: list[Piece] = [(f"{'keys':<5}{'':<20}{'now':>10}{'what if':>11}\n", MUTED)]
    for keys, name, left, right in rows:
        changed = "bold $accent" if left != right else ""
        lines += [(f"{keys:<5}", "$accent"), (f"{name:<20}{left:>10}", ""), (f"{right:>11}\n", changed)]
    if reached.seconds is not None:
        live = human_speed(reached.rows / reached.seconds)
        lines.append((f"live: {live} tok/s in steps of {counted(round(reached.rows), 'row')}", ""))
    if reached.decode is not None and costs.bandwidth is not None:
        share = reached.decode / costs.bandwidth
        lines.append((f", {share:.0%} of what reading allows", MUTED))
    if costs.peak is None and reached.prefill_rows < PREFILL_ROWS:
        lines.append(("\nno prompt yet tells what arithmetic allows", "$warning"))
    return Content.assemble(*lines)
