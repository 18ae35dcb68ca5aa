"""The inspector's drawings, from figures computed by hand, and the screen that shows them."""

import asyncio
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from textual.widgets import Static

from localllm.answer.event import AnswerEvent, Logprob
from localllm.engine.inspection import EngineSnapshot, PrefixView, RequestView, StepRecord
from localllm.engine.inspection_data import snapshot_data, snapshot_of
from localllm.engine.request import Counts, Timings
from localllm.wings.lab.laboratory import MachineCosts, Reached, Setting, forecast, points
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, loaded, until
from tests.tui.conftest import MakeApp
from tests.tui.machine import COSTS, SHAPE, TIMELINES
from tui import drawings, laboratory
from tui.screens.inspector import InspectorScreen
from tui.status import Latency

SNAPSHOT = EngineSnapshot(
    steps=(StepRecord(31, 0, 0, 0.05), StepRecord(0, 1, 0, 0.01)),
    requests=(RequestView(40, 39, 16, 3, waiting=False, background=False),),
    prefixes=(PrefixView(0, 32, 2, 5, (PrefixView(32, 48, 1, 4), PrefixView(32, 40, 1, 5))),),
    page_size=16,
    pages_total=100,
    page_holders=np.array([3, 2, 2, 0, 1, 1, 1, 1, 0], np.int32),
    timelines=TIMELINES,
    now=10.0,
)


@pytest.mark.parametrize(
    ("request_", "state"),
    [
        (RequestView(40, 39, 16, 3, waiting=False, background=False), "decodes"),
        (RequestView(40, 16, 16, 0, waiting=False, background=False), "prefills"),
        (RequestView(40, 16, 16, 3, waiting=False, background=False), "prefills"),  # again, after a preemption
        (RequestView(40, 0, 0, 3, waiting=True, background=False), "waits"),
    ],
)
def test_the_state_of_a_request(request_: RequestView, state: str) -> None:
    assert str(drawings.requests(replace(SNAPSHOT, requests=(request_,)))).startswith(f"{state:<9}")


def test_without_requests_the_engine_is_idle() -> None:
    assert str(drawings.requests(replace(SNAPSHOT, requests=()))).startswith("Idle\n")


def test_the_schedule_has_a_column_a_step() -> None:
    lines = str(drawings.schedule(SNAPSHOT.steps, 10, 2)).splitlines()
    assert lines[0].rstrip() == "█"  # 31 rows fill both lines, log2(32) = 5
    assert lines[1] == "█▃"  # log2(2) / 5 of two lines is 0.4 of a cell
    assert "last: 1 decode in 10 ms" in lines[3]
    assert str(drawings.schedule(SNAPSHOT.steps, 10, 2, 12.5e9)).endswith("in 10 ms, 12.5 GB/s")


def test_the_page_map_shows_where_pages_lie_and_how_many_hold_them() -> None:
    text = str(drawings.pages(SNAPSHOT, 20, 2))
    assert "· 93 free ░ 4 once ▒ 2 twice █ 1 more" in text
    assert "16 tokens a page" in text
    assert "16 tokens, 36 KiB a page" in str(drawings.pages(SNAPSHOT, 20, 2, 2304.0))


def test_pages_of_window_layers_are_shown_as_taken() -> None:
    plain = str(drawings.pages(SNAPSHOT, 20, 2))
    text = str(drawings.pages(replace(SNAPSHOT, window_pages=30, kept_window_pages=5), 20, 2))
    assert "windows take 30 pages more, and 5 for branches" in text
    assert "93 free" in plain and "63 free" in text
    assert text.splitlines()[:2] == ["█▒▒·░░░░············", "·" * 20]


def test_a_cell_of_the_page_map_groups_neighbours() -> None:
    text = str(drawings.pages(SNAPSHOT, 2, 2))
    assert text.splitlines()[:2] == ["█▒", "░░"]  # two pages per cell
    assert "2 pages a cell" in text
    assert drawings.pages(replace(SNAPSHOT, page_holders=np.zeros(0, np.int32)), 2, 2).plain.startswith("··\n··\n")


def test_the_tree_shows_depth_sharing_and_use() -> None:
    lines = str(drawings.tree(SNAPSHOT.prefixes)).splitlines()
    assert [line.split("━")[-1].strip() for line in lines] == [
        "32 tokens · 2 share",
        "16 tokens",
        "8 tokens  ← used last",
    ]
    assert lines[1].startswith("  └ ")


def test_a_histogram_counts_by_powers_of_two() -> None:
    text = str(drawings.histogram("ITL", [0.003, 0.003, 0.003, 0.012], 40))
    assert "p50 3.0 ms  p95 12 ms  n=4" in text
    rows = text.splitlines()[1:]
    assert [row.split()[-1] for row in rows] == ["3", "ms", "1"]  # 2-4 ms, nothing at 4-8 ms, 8-16 ms


def test_latency_comes_from_the_events() -> None:
    latency = Latency()
    for generated, decode_s in ((1, 0.0), (3, 0.2), (4, 0.5)):
        latency.observe(AnswerEvent(counts=Counts(generated=generated), timings=Timings(0, 0, decode_s, 0.75)))
    assert list(latency.ttft) == [0.75]
    assert [round(seconds, 6) for seconds in latency.itl] == [0.1, 0.1, 0.3]


def test_tokens_show_their_rivals() -> None:
    token = Logprob(b" cat", math.log(0.75), ((b" cat", math.log(0.75)), (b" dog", math.log(0.2))))
    assert str(drawings.choices([token])).split() == ["␣cat", "75.0%", "␣dog", "20%"]


def test_the_screen_draws_the_engine_and_returns(make_app: MakeApp) -> None:
    token = Logprob(b" cat", math.log(0.75), ((b" dog", math.log(0.2)),))
    backend = FakeBackend([said("One."), ended()], [replace(said("Two."), logprobs=(token,)), ended()])
    backend.snapshot = SNAPSHOT

    async def flow() -> None:
        async with make_app(backend).run_test(size=(120, 40)) as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "Go")
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
            screen = pilot.app.screen
            await until(pilot, lambda: "2 share" in str(screen.query_one("#tree", Static).content))
            await pilot.press("4")
            latency = screen.query_one("#latency", Static)
            await until(pilot, lambda: "TTFT, to the first token  p50 500 ms" in str(latency.content))
            await pilot.press("p", "escape")
            await until(pilot, lambda: pilot.app.screen is chat)
            await ask(pilot, "Again")
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
            await pilot.press("4")
            tokens = pilot.app.screen.query_one("#choices", Static)
            await until(pilot, lambda: "␣cat" in str(tokens.content))

    asyncio.run(flow())
    assert [request.sampling.get("logprobs") for request in backend.requests] == [None, 5]


def test_what_is_shown_is_exported(make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = FakeBackend([])
    backend.snapshot = SNAPSHOT

    async def flow() -> None:
        async with make_app(backend).run_test(size=(120, 40)) as pilot:
            await loaded(pilot)
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
            tree = pilot.app.screen.query_one("#tree", Static)
            await until(pilot, lambda: "2 share" in str(tree.content))
            await pilot.press("e")

    asyncio.run(flow())
    (file,) = tmp_path.glob("inspector-*.json")
    data = json.loads(file.read_text("utf-8"))
    assert snapshot_of(data).steps == SNAPSHOT.steps and data["costs"] is None


def test_the_timeline_shows_phases_to_scale() -> None:
    """Ten seconds on forty cells: four cells per second."""
    lines = str(laboratory.timeline(SNAPSHOT, 47, 5)).splitlines()
    assert lines[0].rstrip() == "#1     ····████▓▓▓▓┃━━━━━━━━━━━━━━━━━━━╸"
    assert lines[1].rstrip() == f"#2     {' ' * 16}{'·' * 16}████"
    assert lines[2].split() == ["└0", "└2.00", "s", "└4.00", "s", "└6.00", "s", "└8.00", "s"]
    detailed = str(laboratory.timeline(SNAPSHOT, 120, 9))
    assert "first token 3.00 s, 2.0 rows/s · queue 1.00 s · prompt 2.00 s, 96 rows in 2 chunks · 16 cached" in detailed
    assert "reads its prompt" in detailed


def test_the_last_requests_phases_are_listed() -> None:
    done = replace(SNAPSHOT, timelines=SNAPSHOT.timelines[:1])
    text = str(laboratory.last_request(done, 100, 12))
    rows = [line.split()[0] for line in text.splitlines()[:6]]
    assert rows == ["queue", "cache", "prefill", "prefill", "decode", "finish"]
    assert "16 tokens not computed again" in text and "10 rows at 2.0/s" in text and "10 tokens" in text
    assert "more" in str(laboratory.last_request(done, 100, 6))


def test_a_forecast_is_the_roofline_of_each_part() -> None:
    now = forecast(COSTS, Setting(1, 1000, "f16", 8.0), 90e9, 1800e9)
    # 8 GB and 1 GB at 90 GB/s, 1 KiB for each of 1000 tokens; 18 GOP take no time at 1800 GOP/s
    layers, logits, looked = (seconds for _, seconds in now.parts)
    assert (layers, logits) == (8 / 90, 1 / 90) and looked == max(
        1024e3 / 90e9, 1000 * SHAPE.lookup_operations / 1.8e12
    )
    assert now.each == now.all == 1 / (layers + logits + looked) and not now.limited - {"attention over the context"}
    assert (now.weights, now.kv) == (9e9, 1024e3)
    # 20 rows compute 320 GOP in 178 ms, longer than 89 ms of reading; half the bits halve what is read
    many = forecast(COSTS, Setting(20, 1000, "q8_0", 4.0), 90e9, 1800e9)
    assert many.parts[0] == ("layers", 20 * 16 / 1800) and "layers" in many.limited
    assert (many.weights, many.kv) == (4.5e9, 20 * 1000 * 1024 * 34 / 64)
    # two drafted tokens, half of them right: three rows give 1 + 1/2 + 1/4 tokens
    drafted = forecast(COSTS, Setting(1, 1, "f16", 8.0, draft=2, acceptance=0.5), 90e9, 1800e9)
    assert drafted.each == pytest.approx(1.75 / drafted.seconds)


def test_what_steps_reached() -> None:
    steps = (
        *[StepRecord(0, 1, 0, 0.1)] * 3,
        StepRecord(0, 2, 0, 0.1),
        StepRecord(0, 1, 4, 0.5),
        StepRecord(9, 1, 0, 1),
    )
    reached = Reached.by(COSTS, replace(SNAPSHOT, steps=steps))
    assert (reached.rows, reached.seconds) == (1, 0.1)
    assert reached.decode == 9e9 / 0.1
    assert reached.prefill == 40 * 16e9  # the median of chunks of 32, 64 and 40 rows, a second each
    assert reached.compute == reached.prefill
    alone = Reached.by(COSTS, replace(SNAPSHOT, timelines=(), steps=steps))
    assert alone.prefill is None and alone.compute == 18e9 / 0.1
    found = {point.name: point for point in points(COSTS, reached, 90e9, 1800e9)}
    assert found["1"].intensity == 2 and found["1"].rate == 180e9
    assert found["64"].rate == 1800e9
    assert (found["D"].intensity, found["D"].rate) == (2, 180e9)
    assert (found["P"].intensity, found["P"].rate) == (40 * 2, 640e9)


def test_the_roofline_has_a_slope_a_roof_and_points() -> None:
    found = points(COSTS, Reached.by(COSTS, SNAPSHOT), 90e9, 1800e9)
    lines = str(laboratory.roofline(found, 90e9, 1800e9, True, 70, 20)).splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 70
    assert lines[0] == "GOP/s by operations/byte · roof: as benchmarked"
    roof = next(number for number, line in enumerate(lines) if "───" in line)
    assert "64" in lines[roof] and sum("/" in line for line in lines[roof + 1 : -2]) >= 5
    assert any("P" in line for line in lines[1:-1]) and any("1" in line for line in lines[roof + 1 : -2])


def test_costs_and_snapshots_travel_as_json() -> None:
    there = json.loads(json.dumps({"costs": COSTS.as_data(), "snapshot": snapshot_data(SNAPSHOT)}))
    assert MachineCosts.from_data(there["costs"]) == COSTS
    back = snapshot_of(there["snapshot"])
    assert back.page_holders.tolist() == SNAPSHOT.page_holders.tolist()
    names = {field.name for field in fields(EngineSnapshot)} - {"page_holders"}  # arrays have no truth value
    assert {name: getattr(back, name) for name in names} == {name: getattr(SNAPSHOT, name) for name in names}
    empty = replace(SNAPSHOT, page_holders=np.zeros(0, np.int32))
    assert snapshot_of(json.loads(json.dumps(snapshot_data(empty)))).pages_total == 100


def is_within_its_width(drawn: Static) -> bool:
    return all(cell_len(line) <= drawn.size.width for line in str(drawn.content).splitlines()[:-1])


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 40), (200, 50)])
def test_every_page_fills_the_screen(make_app: MakeApp, size: tuple[int, int]) -> None:
    backend = FakeBackend([said("One."), ended()])
    backend.snapshot, backend.model_costs = SNAPSHOT, COSTS
    first = {"engine": "schedule", "timeline": "timeline", "laboratory": "roofline", "answers": "latency"}

    async def flow() -> None:
        async with make_app(backend).run_test(size=size) as pilot:
            await loaded(pilot)
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
            screen = pilot.app.screen
            for number, (page, picture) in enumerate(first.items(), 1):
                await pilot.press(str(number))
                drawn = screen.query_one(f"#{picture}", Static)
                await until(pilot, lambda drawn=drawn: str(drawn.content))
                await pilot.pause()
                boxes = screen.query_one(f"#page-{page}").query(".picture")
                assert max(box.region.bottom for box in boxes) >= size[1] - 1  # all except the footer
                assert max(box.region.right for box in boxes) >= size[0] - 1
                await until(pilot, lambda drawn=drawn: is_within_its_width(drawn))  # drawn again after a new layout

    asyncio.run(flow())


def test_the_other_setting_changes_by_keys(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()])
    backend.snapshot, backend.model_costs = SNAPSHOT, COSTS

    async def flow() -> None:
        async with make_app(backend).run_test(size=(120, 40)) as pilot:
            await loaded(pilot)
            await pilot.press("f2", "3")
            screen = pilot.app.screen
            table = screen.query_one("#what_if", Static)
            await until(pilot, lambda: "what if" in str(table.content))

            def column() -> list[str]:
                return [line.split()[-1] for line in str(table.content).splitlines()[1:6]]

            assert column() == ["4", "4,096", "f16", "8.00", "0"]
            await pilot.press("b", "C", "k", "w", "d", "d")
            await until(pilot, lambda: column() == ["8", "2,048", "q8_0", "6.60", "2"])
            await pilot.press("B", "c", "k", "W", "D")
            await until(pilot, lambda: column() == ["4", "4,096", "q4_0", "8.50", "1"])
            assert "what if: 8 rows in" in str(screen.query_one("#parts", Static).content)  # 4 with a draft of one

    asyncio.run(flow())


def test_without_an_engine_the_screen_shows_a_notice(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            await loaded(pilot)
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
            picture = pilot.app.screen.query_one("#schedule", Static)
            await until(pilot, lambda: "No engine to look into" in str(picture.content))
            boxes = pilot.app.screen.query("#page-engine .picture")
            await until(pilot, lambda: [box.display for box in boxes] == [True, False, False, False])
            await until(pilot, lambda: boxes.first().size.width > 70)
            await pilot.press("4")
            latency = pilot.app.screen.query_one("#latency", Static)
            await until(pilot, lambda: "nothing measured yet" in str(latency.content))

    asyncio.run(flow())
