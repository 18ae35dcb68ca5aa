"""The inspector's pictures, from figures counted by hand, and the screen that shows them."""

import asyncio
import math
from dataclasses import replace

import numpy as np
from textual.widgets import Static

from localllm.answer.event import AnswerEvent, Logprob
from localllm.engine.inspection import EngineSnapshot, PrefixView, RequestView, StepRecord
from localllm.engine.request import Counts, Timings
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, loaded, until
from tests.tui.conftest import MakeApp
from tui import drawings
from tui.screens.inspector import InspectorScreen
from tui.status import Latency

SNAPSHOT = EngineSnapshot(
    steps=(StepRecord(31, 0, 0, 0.05), StepRecord(0, 1, 0, 0.01)),
    requests=(RequestView(40, 39, 16, 3, waiting=False, background=False),),
    prefixes=(PrefixView(0, 32, 2, 5, (PrefixView(32, 48, 1, 4), PrefixView(32, 40, 1, 5))),),
    page_size=16,
    pages_total=100,
    page_holders=np.array([3, 2, 2, 0, 1, 1, 1, 1, 0], np.int32),
)


def test_the_schedule_has_a_column_a_step() -> None:
    lines = str(drawings.schedule(SNAPSHOT.steps, 10, 2)).splitlines()
    assert lines[0].rstrip() == "█"  # 31 rows fill both lines, log2(32) = 5
    assert lines[1] == "█▃"  # log2(2) / 5 of two lines is 0.4 of a cell
    assert "last: 0 prefill, 1 decode, 0 drafted in 10 ms" in lines[3]


def test_the_page_map_shows_where_pages_lie_and_how_many_hold_them() -> None:
    text = str(drawings.pages(SNAPSHOT, 20, 2))
    assert "· 93 free ░ 4 once ▒ 2 twice █ 1 more" in text
    assert text.splitlines()[:2] == ["█▒▒·░░░░············", "·" * 20]


def test_a_cell_of_the_page_map_stands_for_neighbours() -> None:
    text = str(drawings.pages(SNAPSHOT, 2, 2))
    assert text.splitlines()[:2] == ["█▒", "░░"]  # two pages a cell
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
    assert "p50 3.0 ms  p95 12 ms  of 4" in text
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
            assert "TTFT  p50 500 ms" in str(screen.query_one("#latency", Static).content)
            await pilot.press("p", "escape")
            await until(pilot, lambda: pilot.app.screen is chat)
            await ask(pilot, "Again")
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
            tokens = pilot.app.screen.query_one("#choices", Static)
            await until(pilot, lambda: "␣cat" in str(tokens.content))

    asyncio.run(flow())
    assert [request.sampling.get("logprobs") for request in backend.requests] == [None, 5]


def test_without_an_engine_the_screen_says_so(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            await loaded(pilot)
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
            picture = pilot.app.screen.query_one("#schedule", Static)
            await until(pilot, lambda: "No engine runs in this process" in str(picture.content))

    asyncio.run(flow())
