"""Line charts, in a terminal and as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_COLOURS = ("#1f77b4", "#ff7f0e", "#d62728", "#2ca02c", "#9467bd")
_MARKS = "xo+*#"
_MARGIN = 1.02  # a point on the edge of a terminal's chart is not drawn
_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 90, 40, 50


@dataclass(frozen=True, slots=True)
class Series:
    """A line through points (x, y), in ascending x."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Axes begin at 0. Labels name unit and quantity, such as "TTFT ms"."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]

    @property
    def ends(self) -> tuple[float, float]:
        """The largest x and y; 1 if none is above 0."""
        points = [point for series in self.series for point in series.points]
        return max((x for x, _ in points), default=0) or 1.0, max((y for _, y in points), default=0) or 1.0


def in_terminal(chart: Chart, width: int = 60, height: int = 15) -> str:
    """The chart as lines of text, without colours."""
    import plotille

    figure = plotille.Figure()
    figure.width, figure.height = width, height
    figure.with_colors = False
    figure.x_label, figure.y_label = chart.x_label, chart.y_label
    largest_x, largest_y = chart.ends
    figure.set_x_limits(min_=0, max_=largest_x * _MARGIN)
    figure.set_y_limits(min_=0, max_=largest_y * _MARGIN)
    for kind in (int, float):
        figure.register_label_formatter(kind, _label)
    for number, series in enumerate(chart.series):
        x, y = zip(*series.points, strict=True) if series.points else ((), ())
        marks = {"marker": _MARKS[number % len(_MARKS)]} if len(x) <= width // 4 else {}
        figure.plot(x, y, label=series.name, **marks)
    lines = (line.rstrip() for line in figure.show(legend=True).splitlines())
    return "\n".join([chart.title, *lines]) + "\n"


def _label(value: float, chars: int, delta: float, left: bool = False) -> str:
    """A tick's label, in the form that plotille's formatters return."""
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return text.ljust(chars) if left else text.rjust(chars)


def svg(charts: Sequence[Chart]) -> str:
    """The charts below each other, as one SVG document."""
    body = "".join(
        f'<g transform="translate(0 {number * _HEIGHT})">{_drawing(chart)}</g>\n' for number, chart in enumerate(charts)
    )
    height = _HEIGHT * len(charts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}</svg>\n'
    )


def _drawing(chart: Chart) -> str:
    x_ticks, y_ticks = (ticks(end) for end in chart.ends)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = x / x_ticks[-1], y / y_ticks[-1]
        return round(_LEFT + across * (right - _LEFT), 1), round(bottom - up * (bottom - _TOP), 1)

    parts = [_text(_WIDTH / 2, 22, chart.title, 'text-anchor="middle" font-weight="bold"')]
    for tick in x_ticks:
        x, _ = at(tick, 0)
        parts.append(f'<path d="M{x} {_TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(_text(x, bottom + 18, f"{tick:g}", 'text-anchor="middle"'))
    for tick in y_ticks:
        _, y = at(0, tick)
        parts.append(f'<path d="M{_LEFT} {y}H{right}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", 'text-anchor="end"'))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 12, chart.x_label, 'text-anchor="middle"'))
    middle = (_TOP + bottom) / 2
    parts.append(_text(16, middle, chart.y_label, f'text-anchor="middle" transform="rotate(-90 16 {middle})"'))
    for number, series in enumerate(chart.series):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x},{y}" for x, y in (at(*point) for point in series.points))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in (at(*p) for p in series.points)]
        parts.append(_text(right + 10, _TOP + 14 + 18 * number, series.name, f'fill="{colour}"'))
    return "\n".join(parts)


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def ticks(end: float) -> list[float]:
    """Four to nine round numbers from 0 to at least `end`."""
    step = 10 ** math.floor(math.log10(end / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if end / (step * factor) <= 8)
    return [float(f"{number * step:.10g}") for number in range(math.ceil(end / step - 1e-9) + 1)]
