"""Asking, streaming, stopping, and what is stored of it."""

import asyncio

from textual.widgets import Collapsible, Static

from localllm.answer.event import AnswerEvent, AnswerPart, PartKind
from localllm.answer.tool_calls import ToolCall
from localllm.chats import SessionStore
from localllm.engine.request import FinishReason
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import answered, ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.widgets.markdown import AnswerMarkdown
from tui.widgets.messages import AnswerView


def shown(answer: AnswerView) -> str:
    return answer.query_one(AnswerMarkdown).source


def test_an_answer_streams_and_is_kept(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("Hello **wor"), said("ld**"), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            message = await ask(pilot, "Hi there")
            view = chat_of(pilot).transcript.views[-1]
            assert isinstance(view, AnswerView)
            assert shown(view) == message.content == "Hello **world**"
            assert "41 tokens" in str(view.query_one(".figures", Static).content)
            assert chat_of(pilot).prompt.text == ""

    asyncio.run(flow())
    (session,) = store.sessions()
    assert session.title == "Hi there"
    question, answer = store.path(session.id)
    assert (question.content, answer.content) == ("Hi there", "Hello **world**")
    assert answer.finish_reason == "stop"
    assert answer.stats["speed"] == 20.0  # 40 tokens after the first in 2 s
    assert backend.requests[0].messages == [{"role": "user", "content": "Hi there"}]


def test_escape_stops_and_the_partial_answer_stays(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("Half an ans")])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await say(pilot, "Go")
            await until(pilot, lambda: backend.answers and not backend.answers[0].waiting)
            await pilot.press("escape")
            message = await answered(pilot)
            assert backend.answers[0].cancelled
            assert (message.content, message.finish_reason) == ("Half an ans", FinishReason.CANCELLED)

    asyncio.run(flow())
    assert store.path(store.sessions()[0].id)[-1].content == "Half an ans"


def test_typing_works_while_an_answer_streams(make_app: MakeApp) -> None:
    backend = FakeBackend([said("...")])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "Go")
            await until(pilot, lambda: backend.answers)
            await pilot.press("n", "e", "x", "t")
            await until(pilot, lambda: chat.prompt.text == "next")
            await pilot.press("enter")
            await until(pilot, lambda: chat.prompt.queued == ["next"])
            assert len(backend.requests) == 1

    asyncio.run(flow())


def test_an_error_while_answering_is_shown_in_place(make_app: MakeApp) -> None:
    backend = FakeBackend([said("So far"), ended(FinishReason.ERROR, "The disk is full.")])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "Go")
            view = chat.transcript.views[-1]
            assert isinstance(view, AnswerView)
            assert str(view.query_one(".error", Static).content) == "The disk is full."
            assert shown(view) == "So far"

    asyncio.run(flow())


def test_a_refused_request_is_shown_in_place(make_app: MakeApp) -> None:
    backend = FakeBackend(submit_error="The prompt has 9 tokens and the context holds 4.")

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            message = await ask(pilot, "Go")
            assert message.error == "The prompt has 9 tokens and the context holds 4."
            assert not chat.busy

    asyncio.run(flow())


def test_thinking_is_folded_and_kept_apart(make_app: MakeApp) -> None:
    backend = FakeBackend([said("Let me see", PartKind.REASONING), said("Four."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            message = await ask(pilot, "2+2?")
            assert (message.reasoning, message.content) == ("Let me see", "Four.")
            view = chat.transcript.views[-1]
            assert view.query_one(Collapsible).collapsed
            await pilot.press("ctrl+t")
            await until(pilot, lambda: not view.query_one(Collapsible).collapsed)
            await until(pilot, lambda: str(view.query_one(".reasoning", Static).content) == "Let me see")

    asyncio.run(flow())


def test_tools_that_are_asked_for_stand_apart_and_go_back_as_calls(make_app: MakeApp, store: SessionStore) -> None:
    call = ToolCall("weather", {"city": "Köln"})
    asks = AnswerEvent((AnswerPart(PartKind.TOOL_CALLS, "<tool_call>...", (call,)),))
    backend = FakeBackend([said("I look."), asks, ended()], [said("Rain."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            message = await ask(pilot, "Does it rain?")
            assert message.content == "I look."
            calls = chat.transcript.views[-1].query_one(".calls", Static)
            assert str(calls.content) == '⚙ weather {"city": "Köln"}'
            await ask(pilot, "It does.")

    asyncio.run(flow())
    assert store.path(store.sessions()[0].id)[1].calls == (call,)
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    calls = [{"type": "function", "function": function}]
    assert backend.requests[1].messages[1] == {"role": "assistant", "content": "I look.", "tool_calls": calls}


def test_control_characters_of_a_model_do_not_reach_the_terminal(make_app: MakeApp) -> None:
    backend = FakeBackend([said("a\x1b[2Jb\x9bc"), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "Go")
            view = chat.transcript.views[-1]
            assert isinstance(view, AnswerView)
            assert shown(view) == "a\ufffd[2Jb\ufffdc"

    asyncio.run(flow())


def test_a_model_that_cannot_be_loaded_leaves_the_chat_open(make_app: MakeApp) -> None:
    backend = FakeBackend(load_error="tiny: is not a GGUF file.")

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = chat_of(pilot)
            await until(pilot, lambda: chat.query(".failure"))
            assert str(chat.query_one(".failure", Static).content) == "tiny: is not a GGUF file."
            backend.load_error = None
            await say(pilot, "/load other")
            await loaded(pilot)
            assert backend.loaded == ["other"]

    asyncio.run(flow())


def test_keys_that_come_in_one_burst_are_all_sent(make_app: MakeApp) -> None:
    backend = FakeBackend([said("ok"), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await pilot.press(*"burst", "enter")
            await answered(pilot)
            assert backend.requests[0].messages[-1]["content"] == "burst"

    asyncio.run(flow())
