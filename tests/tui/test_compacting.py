"""/compact: the model's own summary replaces the oldest turns, is shown, and can be undone."""

import asyncio

from textual.pilot import Pilot

from localllm.answer.request import AnswerRequest
from localllm.chats.conversation import SUMMARY_HEADING, SUMMARY_PROMPT
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp


def backend_with(*answers: str) -> FakeBackend:
    """Answers in order; a title comes after the first."""
    first, *others = ([said(answer), ended()] for answer in answers)
    return FakeBackend(first, [said("A title"), ended()], *others, converses=True)


def asked(backend: FakeBackend) -> list[AnswerRequest]:
    return [request for request in backend.requests if not request.background]


async def talk(pilot: Pilot[None], turns: int) -> None:
    await loaded(pilot)
    await ask(pilot, "question 1")
    # The next question would cancel the request for a title, which is then sent again.
    await until(pilot, lambda: chat_of(pilot).conversation.title == "A title")
    for number in range(2, turns + 1):
        await ask(pilot, f"question {number}")


def test_the_summary_replaces_the_oldest_turns(make_app: MakeApp) -> None:
    backend = backend_with("one", "two", "three", "They spoke of one.", "four", "five")

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = chat_of(pilot)
            await talk(pilot, 3)
            await say(pilot, "/compact")
            await until(pilot, chat.conversation.summed)
            await until(pilot, lambda: not chat.busy)
            assert "a summary of 4 words" in chat.transcript.views[1]._summary.title  # type: ignore[attr-defined]
            await ask(pilot, "question 4")
            await say(pilot, "/compact undo")
            await until(pilot, lambda: chat.conversation.summed() is None)
            await ask(pilot, "question 5")

    asyncio.run(flow())
    _, _, third, summary, fourth, fifth = asked(backend)
    # It begins like the request before it, whose KV is cached.
    assert [message["content"] for message in summary.messages] == ["question 1", "one", SUMMARY_PROMPT]
    assert list(third.messages[:2]) == list(summary.messages[:2])
    assert fourth.messages[0] == {"role": "system", "content": f"{SUMMARY_HEADING}\nThey spoke of one."}
    contents = [message["content"] for message in fourth.messages[1:]]
    assert contents == ["question 2", "two", "question 3", "three", "question 4"]
    assert [message["content"] for message in fifth.messages] == [
        *("question 1", "one", "question 2", "two", "question 3", "three", "question 4", "four", "question 5"),
    ]


def test_a_second_summary_replaces_the_first(make_app: MakeApp) -> None:
    backend = backend_with("one", "two", "three", "First notes.", "four", "Second notes.", "five")

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = chat_of(pilot)
            await talk(pilot, 3)
            await say(pilot, "/compact")
            await until(pilot, lambda: chat.conversation.summed() and not chat.busy)
            await ask(pilot, "question 4")
            await say(pilot, "/compact")
            await until(pilot, lambda: chat.conversation.messages[3].summary and not chat.busy)
            await ask(pilot, "question 5")

    asyncio.run(flow())
    second, last = asked(backend)[-2:]
    assert second.messages[0]["content"].endswith("First notes.")
    assert [message["content"] for message in second.messages[1:3]] == ["question 2", "two"]
    assert last.messages[0]["content"].endswith("Second notes.")
    assert last.messages[1]["content"] == "question 3"


def test_too_little_an_empty_summary_and_a_stop_change_nothing(make_app: MakeApp) -> None:
    backend = backend_with("one", "two", "three", " ")

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = chat_of(pilot)
            await talk(pilot, 2)
            await say(pilot, "/compact")
            await until(
                pilot, lambda: "nothing to summarise" in str([note.render() for note in chat.query(".failure")])
            )
            await ask(pilot, "question 3")
            await say(pilot, "/compact")
            await until(pilot, lambda: "wrote nothing" in str([note.render() for note in chat.query(".failure")]))
            await say(pilot, "/compact")  # this one never ends by itself
            await until(pilot, lambda: len(asked(backend)) == 5)
            await pilot.press("escape")
            await until(pilot, lambda: not chat.busy)
            assert backend.answers[-1].cancelled
            assert chat.conversation.summed() is None

    asyncio.run(flow())
