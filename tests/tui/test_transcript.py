"""A long chat: a window of it is mounted, earlier messages are mounted on scrolling, and the scroll
position is kept.
"""

import asyncio

from localllm.chats import Message, Role, SessionStore
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.widgets.transcript import WINDOW

LONG = 200


def fill(store: SessionStore) -> int:
    session, parent = store.create("m", {}), None
    for number in range(LONG):
        role = Role.ASSISTANT if number % 2 else Role.USER
        parent = store.add(Message(0, session, parent, role, f"Message {number}", finish_reason="stop")).id
    return session


def test_a_window_is_mounted_and_grows_upwards(make_app: MakeApp, store: SessionStore) -> None:
    session = fill(store)

    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            chat.conversation.open(session)
            await chat.show_conversation()
            await pilot.pause()
            assert [view.message.content for view in chat.transcript.views][-1] == f"Message {LONG - 1}"
            assert len(chat.transcript.views) == WINDOW
            pages = 0
            while len(chat.transcript.views) == WINDOW and pages < WINDOW:
                await pilot.press("pageup")
                await pilot.pause(0.05)
                pages += 1
            await until(pilot, lambda: len(chat.transcript.views) == 2 * WINDOW)
            await until(pilot, lambda: chat.transcript.scroll_y > 0)  # the visible part stays in place
            assert chat.transcript.views[0].message.content == f"Message {LONG - 2 * WINDOW}"

    asyncio.run(flow())


def test_what_streams_follows_only_while_the_end_is_in_view(make_app: MakeApp) -> None:
    lines = said("".join(f"Line {number}\n\n" for number in range(40)))
    backend = FakeBackend([lines, ended()], [lines])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(80, 24)) as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            transcript = chat.transcript
            await until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y > 0)
            await say(pilot, "Second")
            await until(pilot, lambda: backend.answers[1:] and not backend.answers[1].waiting)
            await until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y)
            await pilot.press("pageup", "pageup")
            await pilot.pause()
            place, height = transcript.scroll_y, transcript.max_scroll_y
            backend.answers[1].push(lines, ended())
            await until(pilot, lambda: transcript.max_scroll_y > height and not chat.busy)
            assert transcript.scroll_y == place

    asyncio.run(flow())
