"""A new user's experience: typing errors, ways to leave, consistent figures."""

import asyncio
from pathlib import Path

import pytest
from textual.widget import Widget
from textual.widgets import Input, Static

from localllm.engine.request import FinishReason
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import answered, ask, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.screens.chat import ChatScreen
from tui.screens.parameters import ParametersScreen


def figures(view: Widget) -> str:
    return str(view.query_one(".figures", Static).content)


def failure(chat: ChatScreen) -> str:
    """The error shown, if any."""
    return " ".join(str(note.content) for note in chat.query(".failure").results(Static))


def test_a_mistyped_file_is_refused_once(make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            cases = ("@nosuch.txt hello", "nosuch.txt does not exist"), (f"@{tmp_path} hello", "is a folder")
            for text, reason in cases:
                await say(pilot, text)
                await until(pilot, lambda reason=reason: reason in failure(chat))
                assert chat.prompt.text == text
                assert backend.requests == []
                chat.prompt.text = ""
            await say(pilot, "@nosuch.txt hello")
            await until(pilot, lambda: "nosuch.txt" in failure(chat))
            await pilot.press("enter")
            await answered(pilot)
            assert backend.requests[0].messages[0]["content"] == "@nosuch.txt hello"

    asyncio.run(flow())


@pytest.mark.parametrize("way", [("ctrl+c", "ctrl+c"), ("ctrl+d",), (*"exit", "enter"), (*"/quit", "enter")])
def test_ways_out(way: tuple[str, ...], make_app: MakeApp) -> None:
    backend = FakeBackend()

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            assert "Leave" in str([binding.binding.description for binding in chat.active_bindings.values()])
            await pilot.press(*way)
            await until(pilot, lambda: pilot.app.return_code == 0)

    asyncio.run(flow())
    assert backend.requests == []


def test_an_edit_shows_itself_and_its_variants(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            await pilot.press("ctrl+up", "ctrl+up", "ctrl+e")
            await until(pilot, lambda: "Editing an earlier message" in str(chat.prompt.border_title))
            await pilot.press("escape")
            await until(pilot, lambda: chat.prompt.border_title is None and chat.prompt.text == "")
            await pilot.press("ctrl+up", "ctrl+up", "ctrl+e")
            await until(pilot, lambda: chat.prompt.text == "First")
            await pilot.press("!", "enter")
            await until(pilot, lambda: len(backend.requests) == 2)
            await answered(pilot)
            assert figures(chat.transcript.views[0]) == "◂ 2/2 ▸"

    asyncio.run(flow())


def test_figures_of_one_answer_agree(make_app: MakeApp) -> None:
    broken = ended(FinishReason.ERROR, "The server has gone.")
    backend = FakeBackend([said("One two three."), ended()], [said("four five"), broken])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(120, 30)) as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            assert "41 tokens · 20 tok/s" in figures(chat.transcript.views[-1])
            assert "20 tok/s" in str(chat.status_line.content)
            await ask(pilot, "Second")
            assert "0 tokens" not in figures(chat.transcript.views[-1])
            assert "The server has gone." in str(chat.transcript.views[-1].query_one(".error", Static).content)

    asyncio.run(flow())


def test_parameters_are_not_dropped_unasked(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            await pilot.press("f5")
            await until(pilot, lambda: isinstance(pilot.app.screen, ParametersScreen))
            panel = pilot.app.screen
            await pilot.press("down", "down", "down", "enter")
            await until(pilot, lambda: panel.query_one("#temperature", Input).value == "0.0")
            await pilot.press("escape")
            await until(pilot, lambda: "Ctrl+S saves" in str(panel.query_one(".error", Static).content))
            await pilot.press("escape")
            await until(pilot, lambda: pilot.app.screen is chat)
            assert chat.conversation.parameters.temperature == 0.8
            await pilot.press("f5", "escape")
            await until(pilot, lambda: pilot.app.screen is chat)

    asyncio.run(flow())
