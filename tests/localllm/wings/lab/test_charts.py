"""Charts: SVG is well formed, points are in the right place, and ticks are round."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.wings.lab.charts import Chart, Series, in_terminal, svg, ticks

CHART = Chart(
    "a < b", "requests/s", "TTFT ms", (Series("p50", ((0, 0), (5, 50), (10, 100))), Series("p95", ((10, 25),)))
)
SVG = "{http://www.w3.org/2000/svg}"


def test_points_lie_on_their_scale() -> None:
    drawing = ElementTree.fromstring(svg([CHART]))
    line = drawing.findall(f".//{SVG}polyline")[0]
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert (x1, y1) == pytest.approx(((x0 + x2) / 2, (y0 + y2) / 2))
    assert x2 > x0
    assert y2 < y0  # the y axis points down in SVG
    texts = {element.text for element in drawing.iter(f"{SVG}text")}
    assert texts >= {"a < b", "requests/s", "TTFT ms", "p50", "p95", "10", "100"}


def test_charts_stand_below_each_other() -> None:
    drawing = ElementTree.fromstring(svg([CHART, CHART]))
    assert drawing.attrib["viewBox"] == "0 0 720 640"
    assert [group.attrib["transform"] for group in drawing.findall(f"{SVG}g")] == ["translate(0 0)", "translate(0 320)"]


def test_in_a_terminal() -> None:
    text = in_terminal(CHART)
    assert text.startswith("a < b\n")
    assert "\x1b" not in text
    for part in ("(TTFT ms)", "(requests/s)", "p50", "p95", "x", "o"):
        assert part in text


@pytest.mark.parametrize("points", [(), ((0.0, 0.0),)])
def test_charts_of_nothing(points: tuple[tuple[float, float], ...]) -> None:
    chart = Chart("t", "x", "y", (Series("s", points),))
    ElementTree.fromstring(svg([chart]))
    assert in_terminal(chart)


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_and_reach_the_end(end: float) -> None:
    found = ticks(end)
    assert found[0] == 0
    assert found[-1] >= end * (1 - 1e-9)
    assert found[-2] < end
    assert 4 <= len(found) <= 10
    steps = [later - earlier for earlier, later in pairwise(found)]
    assert steps == pytest.approx([steps[0]] * len(steps))
