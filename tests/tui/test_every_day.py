"""Small features: search snippets, token counts before sending, notifications in the background."""

import asyncio

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import OptionList

from localllm.chats import SessionStore
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import answered, ask, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.app import ChatApp
from tui.screens.sessions import AROUND, SessionsScreen, snippet


@pytest.mark.parametrize(
    ("text", "search", "shown"),
    [
        ("The harbour was built", "HARBOUR", ("The ", "harbour", " was built")),
        ("one\n  two   three", "two three", ("one ", "two three", "")),
        ("nothing of it", "harbour", ("nothing of it", "", "")),
    ],
)
def test_a_snippet_is_one_line_around_what_was_found(text: str, search: str, shown: tuple[str, str, str]) -> None:
    assert snippet(text, search) == shown


def test_a_snippet_of_a_long_text_is_short() -> None:
    before, itself, behind = snippet("a" * 1000 + "needle" + "b" * 1000, "needle")
    assert (before, itself, behind) == ("…" + "a" * AROUND, "needle", "b" * 2 * AROUND)


def test_the_list_of_chats_shows_what_was_found(make_app: MakeApp) -> None:
    backend = FakeBackend([said("The lighthouse [bold]is[/] red."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "First question")
            await pilot.press("f3")
            await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
            entries = pilot.app.screen.query_one(OptionList)
            await pilot.press(*"LIGHT")
            await until(pilot, lambda: "The lighthouse [bold]is[/] red." in str(entries.get_option_at_index(0).prompt))
            await pilot.press(*"zz")
            await until(pilot, lambda: str(entries.get_option_at_index(0).prompt) == "Nothing found.")
            await pilot.press("down", "enter", "escape")
            await until(pilot, lambda: not isinstance(pilot.app.screen, SessionsScreen))

    asyncio.run(flow())


def test_tokens_of_a_long_text_are_shown_before_it_is_sent(make_app: MakeApp) -> None:
    backend = FakeBackend([said("Yes."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            chat.prompt.insert("word " * 100)
            await until(pilot, lambda: chat.prompt.border_subtitle == "100 tokens")
            await pilot.press("enter")
            await until(pilot, lambda: chat.prompt.border_subtitle is None)

    asyncio.run(flow())


async def ask_and_leave(pilot: Pilot[None], backend: FakeBackend, text: str) -> None:
    """Send a prompt, and move the focus away while it is answered."""
    before = len(backend.answers)
    await say(pilot, text)
    await until(pilot, lambda: len(backend.answers) > before)
    pilot.app.post_message(events.AppBlur())
    await until(pilot, lambda: not pilot.app.app_focus)
    backend.answers[-1].push(said("Yes."), ended())
    await answered(pilot)


def test_a_user_in_another_window_is_notified(
    make_app: MakeApp, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend([said("Yes."), ended()])
    sent: list[str] = []
    monkeypatch.setattr(ChatApp, "_tell_terminal", lambda _app, sequence: sent.append(sequence))

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "First\x1b]0;evil\x07 question")
            assert sent == []
            await ask_and_leave(pilot, backend, "Second question")
            await until(pilot, lambda: len(sent) == 2)
            assert sent[0] == "\x1b]9;localllm has answered: First\ufffd]0;evil\ufffd question\a"
            assert sent[1] == "\x1b[22;2t\x1b]2;\u2714 First\ufffd]0;evil\ufffd question\a"
            pilot.app.post_message(events.AppFocus())
            await until(pilot, lambda: sent[2:] == ["\x1b[23;2t"])
            await say(pilot, "/notify off")
            await until(pilot, lambda: store.remembered("notify") == "off")
            await ask_and_leave(pilot, backend, "Third question")
        assert len(sent) == 3

    asyncio.run(flow())
