"""Model picker, parameters, completions, history, attachments, palette, themes, keys."""

import asyncio
from pathlib import Path

import pytest
from textual.command import CommandList, CommandPalette
from textual.widgets import Input, Static

from localllm.chats import SessionStore
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.screens.models import PickerScreen
from tui.screens.parameters import ParametersScreen
from tui.widgets.frame import KeyBar


def test_another_model_answers_the_same_conversation(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            await pilot.press("f4")
            await until(pilot, lambda: isinstance(pilot.app.screen, PickerScreen) and pilot.app.screen.choices)
            await pilot.press(*"beta", "enter")
            await until(pilot, lambda: chat.info and chat.info.name == "beta.gguf")
            answer = await ask(pilot, "Second")
            assert answer.model == "beta.gguf"

    asyncio.run(flow())
    assert [message["content"] for message in backend.requests[1].messages] == ["First", "One.", "Second"]


def test_parameters_are_edited_checked_and_sent(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await pilot.press("f5")
            await until(pilot, lambda: isinstance(pilot.app.screen, ParametersScreen))
            panel = pilot.app.screen
            await pilot.press("down", "enter")  # precise
            await until(pilot, lambda: panel.query_one("#temperature", Input).value == "0.2")
            panel.query_one("#top_p", Input).value = "2"
            await pilot.press("ctrl+s")
            await until(
                pilot, lambda: "top_p must be between 0 and 1" in str(panel.query_one(".error", Static).content)
            )
            panel.query_one("#top_p", Input).value = "0.5"
            await pilot.press("ctrl+s")
            await until(pilot, lambda: pilot.app.screen is chat_of(pilot))
            await say(pilot, "/set system Be brief.")
            await ask(pilot, "Go")

    asyncio.run(flow())
    request = backend.requests[0]
    assert request.sampling.items() >= {"temperature": 0.2, "top_k": 20, "top_p": 0.5}.items()
    assert [(message["role"], message["content"]) for message in request.messages] == [
        ("system", "Be brief."),
        ("user", "Go"),
    ]


def test_set_refuses_what_does_not_exist(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "/set temprature 1")
            await until(pilot, lambda: chat.query(".failure"))
            assert "no parameter 'temprature'" in str(chat.query_one(".failure", Static).content)

    asyncio.run(flow())


def test_a_session_remembers_its_parameters(make_app: MakeApp, store: SessionStore) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()])).run_test() as pilot:
            await loaded(pilot)
            await say(pilot, "/set temperature 0.25")
            await ask(pilot, "Go")
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            assert chat.conversation.parameters.temperature == 0.8
            await pilot.press("f3", "enter")
            await until(pilot, lambda: chat.conversation.messages)
            assert chat.conversation.parameters.temperature == 0.25

    asyncio.run(flow())


def test_slash_commands_complete(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            await pilot.press("/", "e", "x")
            await until(pilot, lambda: chat.prompt.completion.display)
            await pilot.press("tab")
            await until(pilot, lambda: chat.prompt.text == "/export ")
            await until(pilot, lambda: not chat.prompt.completion.display)

    asyncio.run(flow())


def test_files_complete_and_go_with_the_message(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("three short words", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await pilot.press(*"sum @no", "tab")
            await until(pilot, lambda: chat.prompt.text == "sum @notes.txt")
            await ask(pilot, "")
            assert "notes.txt · 3 tokens" in str(chat.query_one(".attachment", Static).content)

    asyncio.run(flow())
    assert (
        backend.requests[0].messages[0]["content"] == "File notes.txt:\n```\nthree short words\n```\n\nsum @notes.txt"
    )


def test_the_history_comes_back_also_after_a_restart(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()])).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "First")
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            await pilot.press(*"dra", "up")
            await until(pilot, lambda: chat.prompt.text == "First")
            await pilot.press("down")
            await until(pilot, lambda: chat.prompt.text == "dra")

    asyncio.run(flow())


def test_a_new_line_grows_the_prompt(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            before = chat.prompt.size.height
            await pilot.press("a", "ctrl+j", "b")
            await pilot.pause()
            await until(pilot, lambda: chat.prompt.text == "a\nb")
            await until(pilot, lambda: chat.prompt.size.height == before + 1)

    asyncio.run(flow())


def test_the_palette_offers_every_command(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()])).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            await pilot.press("ctrl+p")
            await until(pilot, lambda: isinstance(pilot.app.screen, CommandPalette))
            await pilot.press(*"/new")
            hits = pilot.app.screen.query_one(CommandList)
            searches = pilot.app.screen.workers
            await until(pilot, lambda: hits.option_count and all(search.is_finished for search in searches))
            await pilot.press("enter", "enter")
            await until(pilot, lambda: chat.conversation.messages == [])

    asyncio.run(flow())


def test_the_theme_is_remembered(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            await loaded(pilot)
            await say(pilot, "/theme localllm-light")
            await until(pilot, lambda: pilot.app.theme == "localllm-light")
        assert make_app(FakeBackend()).theme == "localllm-light"

    asyncio.run(flow())


def test_keys_can_be_changed(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()]), keys={"new": "f9"}).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            await pilot.press("ctrl+n")
            assert chat.conversation.messages
            await pilot.press("f9")
            await until(pilot, lambda: chat.conversation.messages == [])

    asyncio.run(flow())


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_footer_shows_whole_keys_and_keeps_them_below_a_panel(columns: int, make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend([])).run_test(size=(columns, 24)) as pilot:
            chat = await loaded(pilot)
            bar = chat.query_one(KeyBar)

            def shown() -> str:
                return str(bar.content)

            await until(pilot, lambda: "F1 Help" in shown() and "Esc Stop" not in shown())
            assert len(shown()) == columns and shown().rstrip().endswith("▏ ^P Commands")
            keys = ("F1 Help", "^N New", "F3 Chats", "F4 Model", "F5 Settings", "F2 Inspect")
            assert [key in shown() for key in keys] == sorted((key in shown() for key in keys), reverse=True)
            assert ("F5 Settings" in shown()) == (columns >= 80) and ("F2 Inspect" in shown()) == (columns >= 120)
            before = shown()
            await pilot.press("f5")
            await until(pilot, lambda: pilot.app.screen is not chat)
            await pilot.pause()
            assert shown() == before
            await pilot.press("escape")
            await until(pilot, lambda: pilot.app.screen is chat)
            await pilot.click(bar, offset=(shown().index("F1"), 0))
            await until(pilot, lambda: chat.query(".note"))

    asyncio.run(flow())
