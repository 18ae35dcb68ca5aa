"""Copying through the terminal: an answer, a selected message, a code block."""

import asyncio
import base64

import pytest
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot

from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, loaded
from tests.tui.conftest import MakeApp

ANSWER = "First:\n\n```python\na = 1\n```\n\nthen:\n\n```\nb = 2\n```\n"


@pytest.mark.parametrize(
    ("keys", "copied"),
    [
        pytest.param(["ctrl+y"], ANSWER, id="the answer, from the prompt"),
        pytest.param(["ctrl+up", "ctrl+y"], ANSWER, id="the selected answer"),
        pytest.param(["ctrl+up", "ctrl+up", "ctrl+y"], "Show me", id="the selected question"),
        pytest.param(["ctrl+up", "ctrl+b"], "b = 2\n", id="its last code block"),
        pytest.param([*"/code", "enter"], "b = 2\n", id="by command"),
    ],
)
def test_a_copy_goes_through_the_terminal(
    keys: list[str], copied: str, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    async def flow() -> None:
        app = make_app(FakeBackend([said(ANSWER), ended()]))
        async with app.run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "Show me")
            monkeypatch.setattr(HeadlessDriver, "write", lambda _, text: written.append(text))
            await pilot.press(*keys)
            await settled(pilot)
            assert app.clipboard == copied

    asyncio.run(flow())
    assert f"\x1b]52;c;{base64.b64encode(copied.encode()).decode()}\a" in written


async def settled(pilot: Pilot[None]) -> None:
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


def test_copying_code_from_an_answer_without_code_warns(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend([said("No code."), ended()])).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "Show me")
            await pilot.press("ctrl+up", "ctrl+b")
            await settled(pilot)
            (note,) = pilot.app.screen.query(".failure")
            assert "no code block" in str(note.render())

    asyncio.run(flow())
