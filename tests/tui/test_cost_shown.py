"""Before an edit, another answer or a message is sent, the prompt's border says what it costs."""

import asyncio
from collections.abc import Callable

from textual.pilot import Pilot

from localllm.answer.event import AnswerEvent
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.screens.chat import ChatScreen

LONG = "word " * 100


def answers(count: int) -> list[list[AnswerEvent]]:
    return [[said("one two three"), ended()] for _ in range(count)]


def border(chat: ChatScreen) -> str:
    return str(chat.prompt.border_subtitle or "")


async def shows(pilot: Pilot[None], text: str) -> None:
    chat = chat_of(pilot)
    try:
        await until(pilot, lambda: border(chat) == text, 10)
    except TimeoutError:
        raise AssertionError(border(chat)) from None


def running(make_app: MakeApp, backend: FakeBackend, flow: Callable[[Pilot[None], ChatScreen], object]) -> None:
    async def whole() -> None:
        async with make_app(backend).run_test(size=(100, 30)) as pilot:
            await flow(pilot, await loaded(pilot))  # type: ignore[misc]

    asyncio.run(whole())


def test_an_edit_and_another_answer_say_what_they_compute(make_app: MakeApp) -> None:
    backend = FakeBackend(*answers(3))

    async def flow(pilot: Pilot[None], chat: ChatScreen) -> None:
        chat.prompt.insert("Hello there")
        await shows(pilot, "2 tokens")  # nothing is known of an empty chat
        await pilot.press("enter")
        await until(pilot, lambda: len(chat.conversation.messages) == 2 and not chat.busy, 10)
        await ask(pilot, LONG)
        backend.known = 30
        await pilot.press("ctrl+up")
        await shows(pilot, "regenerating computes 75 of 105 tokens")
        await pilot.press("ctrl+up")
        await shows(pilot, "an edit computes 75 of 105 tokens")
        await pilot.press("ctrl+e")
        await shows(pilot, "100 tokens · computes 75 of 105")
        chat.prompt.text = "four words in all"
        await shows(pilot, "4 tokens · computes 0 of 9")
        sent = backend.priced[-1]
        await pilot.press("enter")
        await until(pilot, lambda: len(backend.requests) == 3 and not chat.busy, 10)
        assert [*backend.requests[-1].messages] == [*sent.messages]
        assert not border(chat)

    running(make_app, backend, flow)


def test_the_cost_of_the_next_message_is_shown_if_unusual(make_app: MakeApp) -> None:
    """After another system text, after a switch to another branch, and not while an answer is running."""
    backend = FakeBackend(*answers(3))

    async def flow(pilot: Pilot[None], chat: ChatScreen) -> None:
        await ask(pilot, LONG)
        backend.known = 90
        await say(pilot, "/set system Be brief.")
        await pilot.pause(0.5)
        assert chat.conversation.parameters.system == "Be brief." and not border(chat)
        backend.known = 2
        await say(pilot, "/set system Be very brief.")
        await shows(pilot, "the next message computes 104 of 106 tokens")
        assert backend.priced[-1].messages[0] == {"role": "system", "content": "Be very brief."}
        backend.known = 110
        chat.prompt.insert("Why?")
        await shows(pilot, "1 token · computes 0 of 107")
        chat.prompt.text = ""
        await pilot.pause(0.5)
        assert not border(chat)
        backend.known = 1
        await pilot.press("ctrl+r")
        await until(pilot, lambda: len(backend.requests) == 2 and not chat.busy, 10)
        await shows(pilot, "the next message computes 105 of 106 tokens")
        await pilot.press("ctrl+up", "left")
        await shows(pilot, "regenerating computes 102 of 103 tokens")
        await pilot.press("escape")
        await shows(pilot, "the next message computes 105 of 106 tokens")

    running(make_app, backend, flow)


def test_an_unknown_cost_is_not_shown(make_app: MakeApp) -> None:
    backend = FakeBackend(*answers(2))

    async def flow(pilot: Pilot[None], chat: ChatScreen) -> None:
        await ask(pilot, LONG)
        chat.prompt.insert("Why?")
        await shows(pilot, "1 token")
        backend.known = 3
        chat.prompt.insert(" And how?")
        await shows(pilot, "3 tokens · computes 103 of 106")
        await say(pilot, "")  # sends it
        await until(pilot, lambda: len(backend.requests) == 2 and not chat.busy, 10)
        await say(pilot, "/set tools on")  # which are opened by the next message
        chat.prompt.insert("Read it")
        await shows(pilot, "2 tokens")

    running(make_app, backend, flow)
