"""Vim keys."""

import asyncio

from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import answered, ask, loaded, say, until
from tests.tui.conftest import MakeApp

LONG = "\n\n".join(f"Paragraph {number}." for number in range(60))


def test_typing_types_until_escape_and_then_keys_move(make_app: MakeApp) -> None:
    backend = FakeBackend([said(LONG), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            assert chat.prompt.border_title is None
            await say(pilot, "/vim on")
            await until(pilot, lambda: chat.prompt.border_title == "INSERT")
            await ask(pilot, "Tell me")
            await pilot.press(*"jkGgg/dd")
            await until(pilot, lambda: chat.prompt.text == "jkGgg/dd")
            await pilot.press("escape")
            await until(pilot, lambda: chat.prompt.border_title == "NORMAL")
            transcript = chat.transcript
            await pilot.press(*"gg")
            await until(pilot, lambda: transcript.scroll_y == 0)
            await pilot.press(*"jjk")
            await until(pilot, lambda: transcript.scroll_y == 1)
            half = transcript.size.height // 2
            await pilot.press("ctrl+d")
            await until(pilot, lambda: transcript.scroll_y == 1 + half)
            await pilot.press("ctrl+u")
            await until(pilot, lambda: transcript.scroll_y == 1)
            await pilot.press("G")
            await until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y > 1)
            assert chat.prompt.text == "jkGgg/dd"
            await pilot.press(*"0xxlxA", *"!j")
            await until(pilot, lambda: chat.prompt.text == "Gg/dd!j")
            await pilot.press("escape", "d", "d")
            await until(pilot, lambda: chat.prompt.text == "")
            await pilot.press("u", "z", "Z", ":")
            await until(pilot, lambda: chat.prompt.text)
            await pilot.press("/")
            await until(pilot, lambda: chat.find.display)
            await pilot.press(*"Paragraph 5", "enter")
            await until(pilot, lambda: chat.focused is chat.prompt)
            assert str(chat.find.count.content) == "11 of 11"
            await pilot.press("N")
            await until(pilot, lambda: str(chat.find.count.content) == "10 of 11")
            await pilot.press("escape")
            await until(pilot, lambda: not chat.find.display)

    asyncio.run(flow())


def test_the_first_escape_leaves_insert_mode_and_the_second_stops(make_app: MakeApp) -> None:
    backend = FakeBackend()

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "/vim on")
            await say(pilot, "Tell me")
            await until(pilot, lambda: len(backend.answers) == 1)
            await pilot.press("escape")
            await until(pilot, lambda: chat.prompt.border_title == "NORMAL")
            assert not backend.answers[0].cancelled
            await pilot.press("escape")
            await until(pilot, lambda: backend.answers[0].cancelled)
            await answered(pilot)
            await pilot.press("ctrl+up", "i", "x")
            await until(pilot, lambda: chat.prompt.text == "x" and chat.prompt.border_title == "INSERT")
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            assert chat.prompt.border_title == "INSERT"
            await say(pilot, "/vim off")
            await until(pilot, lambda: chat.prompt.border_title is None)

    asyncio.run(flow())
