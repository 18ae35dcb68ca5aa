"""Prompts that are sent while an answer runs wait for its end: seen, taken back, sent in order, never lost."""

import asyncio

import pytest
from textual.pilot import Pilot

from localllm.engine.request import FinishReason
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import loaded, say, until
from tests.tui.conftest import MakeApp
from tui.screens.chat import ChatScreen


async def answering(pilot: Pilot[None], *queued: str) -> ChatScreen:
    """A chat whose first answer runs, with these prompts behind it."""
    chat = await loaded(pilot)
    await say(pilot, "First")
    await until(pilot, lambda: chat.status_line.facts.answering)
    for text in queued:
        await say(pilot, text)
        await until(pilot, lambda text=text: chat.prompt.queued[-1:] == [text])
    return chat


def shown(chat: ChatScreen) -> str:
    return str(chat.queue.render()) if chat.queue.display else ""


def asked(chat: ChatScreen) -> list[str]:
    return [message.content for message in chat.conversation.messages if message.role == "user"]


def test_queued_prompts_are_seen_and_sent_in_order(make_app: MakeApp) -> None:
    backend = FakeBackend([], [said("Two."), ended()], [said("Three."), ended(FinishReason.LENGTH)])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(80, 24)) as pilot:
            chat = await answering(pilot, "Second", "Third [b]\nin two lines")
            assert "1  Second" in shown(chat) and "2  Third [b] in two lines" in shown(chat)
            assert chat.prompt.text == "" and asked(chat) == ["First"]
            backend.answers[0].push(said("One."), ended())
            await until(pilot, lambda: len(chat.conversation.messages) == 6 and not chat.busy)
            assert asked(chat) == ["First", "Second", "Third [b]\nin two lines"]
            assert shown(chat) == ""
            assert chat.prompt.sent[-2:] == ["Second", "Third [b]\nin two lines"]

    asyncio.run(flow())


@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_a_stopped_or_failed_answer_gives_them_back(make_app: MakeApp, end: str) -> None:
    backend = FakeBackend([])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(80, 24)) as pilot:
            chat = await answering(pilot, "Second", "Third")
            chat.prompt.insert("draft")
            if end == "stopped":
                await pilot.press("escape")
            else:
                backend.answers[0].push(ended(FinishReason.ERROR, "The engine failed."))
            await until(pilot, lambda: not chat.busy and not chat.prompt.queued)
            assert chat.prompt.text == "Second\nThird\ndraft"
            assert asked(chat) == ["First"] and shown(chat) == ""

    asyncio.run(flow())


def test_a_prompt_is_taken_back_to_edit_or_remove_it(make_app: MakeApp) -> None:
    backend = FakeBackend([], [said("Two."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(80, 24)) as pilot:
            chat = await answering(pilot, "Second", "Third", "Fourth")
            await pilot.press("up")
            assert chat.prompt.text == "Fourth" and chat.prompt.queued == ["Second", "Third"]
            chat.prompt.text = ""  # removes it
            await say(pilot, "/queue 1")
            await until(pilot, lambda: chat.prompt.text == "Second")
            assert chat.prompt.queued == ["Third"] and "1  Third" in shown(chat)
            chat.prompt.text = "Second, better"
            await pilot.press("enter")
            await until(pilot, lambda: chat.prompt.queued == ["Third", "Second, better"])
            await say(pilot, "/queue 7")
            await until(pilot, lambda: "numbered from 1 to 2" in str(chat.transcript.children[-1].render()))
            await say(pilot, "/queue")
            await until(pilot, lambda: chat.prompt.text == "Third\nSecond, better")
            assert shown(chat) == ""
            await pilot.press("escape")
            await until(pilot, lambda: not chat.busy)

    asyncio.run(flow())


def test_queued_prompts_are_kept_as_drafts_are(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend([])).run_test() as pilot:
            chat = await answering(pilot, "Second", "Third")
            chat.prompt.insert("draft")
            assert chat.prompt.unsent == ["Second", "Third", "draft"]

    asyncio.run(flow())


def test_a_queued_prompt_whose_file_is_missing_comes_back_with_the_rest(make_app: MakeApp) -> None:
    backend = FakeBackend([])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(80, 24)) as pilot:
            chat = await answering(pilot, "Read @nothing-here.txt", "Third")
            backend.answers[0].push(said("One."), ended())
            await until(pilot, lambda: not chat.busy and not chat.prompt.queued)
            assert chat.prompt.text == "Read @nothing-here.txt\nThird"
            assert asked(chat) == ["First"]

    asyncio.run(flow())
