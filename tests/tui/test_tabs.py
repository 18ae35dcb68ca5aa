"""Several chats at once: each continues in its tab, and the title bar shows their state."""

import asyncio

from textual.pilot import Pilot

from localllm.answer.event import AnswerEvent, AnswerPart, PartKind
from localllm.answer.tool_calls import ToolCall
from localllm.chats import SessionStore
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import answered, ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.app import ChatApp
from tui.screens.approval import ApprovalScreen
from tui.screens.chat import ChatScreen
from tui.screens.question import QuestionScreen
from tui.screens.sessions import SessionsScreen


def tabs(pilot: Pilot[None]) -> list[ChatScreen]:
    assert isinstance(pilot.app, ChatApp)
    return pilot.app.tabs.all


def row(pilot: Pilot[None]) -> str:
    """What the title bar shows for the current tab."""
    return str(chat_of(pilot).title_bar.label.content)


async def listed(pilot: Pilot[None]) -> None:
    """Open the list of chats, which has one."""
    await pilot.press("f3")
    await until(
        pilot, lambda: isinstance(pilot.app.screen, SessionsScreen) and pilot.app.screen.entries.highlighted == 0
    )


async def open_tab(pilot: Pilot[None]) -> ChatScreen:
    count = len(tabs(pilot))
    await pilot.press("f8")
    await until(pilot, lambda: len(tabs(pilot)) == count + 1 and chat_of(pilot) is tabs(pilot)[-1])
    return await loaded(pilot)


def test_two_chats_answer_at_once_and_each_tab_shows_its_state(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend()

    async def flow() -> None:
        async with make_app(backend).run_test(size=(100, 24)) as pilot:
            first = await loaded(pilot)
            assert row(pilot) == "New chat"
            await say(pilot, "Alpha")
            await until(pilot, lambda: len(backend.answers) == 1)
            second = await open_tab(pilot)
            assert second is not first
            await until(pilot, lambda: "1 ● Alpha" in row(pilot) and "2 New chat" in row(pilot))
            await say(pilot, "Beta")
            await until(pilot, lambda: len(backend.answers) == 2 and "2 ● Beta" in row(pilot))
            backend.answers[0].push(said("One."), ended())
            await until(pilot, lambda: "1 ✔ Alpha" in row(pilot))
            assert first.conversation.messages[-1].content == "One."
            await pilot.press(*"draft", "f6")
            await until(pilot, lambda: chat_of(pilot) is first and "1 Alpha" in row(pilot))
            assert first.prompt.text == ""
            assert "One." in str(first.transcript.views[-1].message.content)
            backend.answers[1].push(said("Two."), ended())
            await until(pilot, lambda: "2 ✔ Beta" in row(pilot))
            await pilot.press("ctrl+pagedown")
            await until(pilot, lambda: chat_of(pilot) is second and "2 ✎ Beta" in row(pilot))
            assert second.prompt.text == "draft"

    asyncio.run(flow())
    assert [session.title for session in store.sessions()] == ["Beta", "Alpha"]
    assert backend.requests[1].messages == [{"role": "user", "content": "Beta"}]


def test_a_tab_is_closed_and_its_chat_stays(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(100, 24)) as pilot:
            first = await loaded(pilot)
            await ask(pilot, "Alpha")
            await say(pilot, "/close")
            await until(pilot, lambda: first.query(".failure"))
            await open_tab(pilot)
            await say(pilot, "Beta")
            await until(pilot, lambda: len(backend.answers) == 2)
            backend.answers[1].push(said("Half"))
            await until(pilot, lambda: chat_of(pilot).conversation.messages[-1].content)
            await say(pilot, "/close")
            await until(pilot, lambda: tabs(pilot) == [first] and chat_of(pilot) is first)
            await until(pilot, lambda: row(pilot) == "Alpha")
            assert backend.answers[1].cancelled
            await pilot.press("f6", "f7")
            assert chat_of(pilot) is first

    asyncio.run(flow())
    beta = next(session for session in store.sessions() if session.title == "Beta")
    assert store.path(beta.id)[-1].content == "Half"


def test_leaving_asks_once_while_an_answer_is_on_its_way(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend()

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await say(pilot, "Alpha")
            await until(pilot, lambda: len(backend.answers) == 1)
            backend.answers[0].push(said("Half"))
            await until(pilot, lambda: [view.message.content for view in chat_of(pilot).transcript.views][-1] == "Half")
            await open_tab(pilot)
            await pilot.press("ctrl+d")
            await until(pilot, lambda: chat_of(pilot).notice.display)
            assert "Leave again" in str(chat_of(pilot).notice.content)
            assert pilot.app.return_code is None
            await pilot.press("ctrl+d")
            await until(pilot, lambda: pilot.app.return_code == 0)

    asyncio.run(flow())
    assert store.path(store.sessions()[0].id)[-1].content == "Half"


def test_a_question_of_a_tool_waits_in_its_tab(make_app: MakeApp) -> None:
    backend = FakeBackend(converses=True)

    async def flow() -> None:
        async with make_app(backend).run_test(size=(100, 24)) as pilot:
            first = await loaded(pilot)
            await say(pilot, "/tools on")
            await say(pilot, "Alpha")
            await until(pilot, lambda: len(backend.answers) == 1)
            await open_tab(pilot)
            call = ToolCall("run_command", {"command": "true"})
            backend.answers[0].push(AnswerEvent((AnswerPart(PartKind.TOOL_CALLS, "", (call,)),)), ended())
            await until(pilot, lambda: "1 ? Alpha" in row(pilot))
            assert isinstance(pilot.app.screen, ChatScreen)
            await pilot.press("f6")
            await until(pilot, lambda: isinstance(pilot.app.screen, ApprovalScreen))
            await pilot.press("f7")
            await until(pilot, lambda: pilot.app.screen is tabs(pilot)[1])
            await pilot.press("f6")
            await until(pilot, lambda: isinstance(pilot.app.screen, ApprovalScreen))
            await pilot.press("escape")
            await until(pilot, lambda: len(backend.answers) == 2)
            assert "refused" in first.conversation.messages[-2].content
            backend.answers[1].push(said("Well."), ended())
            await answered(pilot)

    asyncio.run(flow())


def test_a_chat_is_open_in_one_tab_only_and_a_deleted_one_in_none(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(100, 24)) as pilot:
            first = await loaded(pilot)
            await ask(pilot, "Alpha")
            await open_tab(pilot)
            await listed(pilot)
            await pilot.press("enter")
            await until(pilot, lambda: chat_of(pilot) is first and pilot.app.screen is first)
            await say(pilot, "/next 2")
            await until(pilot, lambda: chat_of(pilot) is not first)
            await listed(pilot)
            await pilot.press("ctrl+d", "escape")
            await until(pilot, lambda: first.conversation.session_id is None)
            assert store.sessions() == []

    asyncio.run(flow())


def test_a_chat_that_is_deleted_while_its_tool_asks_in_a_hidden_tab(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend(converses=True)

    async def flow() -> None:
        async with make_app(backend).run_test(size=(100, 24)) as pilot:
            first = await loaded(pilot)
            await say(pilot, "/tools on")
            await say(pilot, "Alpha")
            await until(pilot, lambda: len(backend.answers) == 1)
            second = await open_tab(pilot)
            call = ToolCall("run_command", {"command": "true"})
            backend.answers[0].push(AnswerEvent((AnswerPart(PartKind.TOOL_CALLS, "", (call,)),)), ended())
            await until(pilot, lambda: "1 ? Alpha" in row(pilot))
            await listed(pilot)
            await pilot.press("ctrl+d", "escape")
            await until(pilot, lambda: first.conversation.session_id is None and not first.busy)
            await until(pilot, lambda: pilot.app.screen is second)
            await say(pilot, "Beta")
            await until(pilot, lambda: len(backend.answers) == 2)
            await pilot.press("f6")
            await until(pilot, lambda: pilot.app.screen is first and not first.transcript.views)

    asyncio.run(flow())
    assert [session.title for session in store.sessions()] == ["Beta"]


def test_a_model_is_loaded_for_all_tabs(make_app: MakeApp) -> None:
    backend = FakeBackend()

    async def flow() -> None:
        async with make_app(backend).run_test(size=(100, 24)) as pilot:
            first = await loaded(pilot)
            await say(pilot, "Alpha")
            await until(pilot, lambda: len(backend.answers) == 1)
            second = await open_tab(pilot)
            assert backend.loaded == ["tiny"]
            await say(pilot, "/load other")
            await until(pilot, lambda: isinstance(pilot.app.screen, QuestionScreen))
            await pilot.press("down", "enter")
            await until(pilot, lambda: backend.loaded == ["tiny", "other"] and second.info)
            await until(pilot, lambda: not first.busy)
            assert backend.answers[0].cancelled
            assert (first.conversation.model, second.conversation.model) == ("other", "other")
            assert first.title_bar.model == second.title_bar.model == "other"

    asyncio.run(flow())


def test_tabs_open_in_a_chat_that_runs_as_the_program_runs_it(make_app: MakeApp) -> None:
    """Unlike run_test, run has Textual begin tasks at once from Python 3.12 on."""
    asked: list[str] = []

    async def flow(pilot: Pilot[None]) -> None:
        await loaded(pilot)
        await open_tab(pilot)
        await say(pilot, "Alpha")
        await until(pilot, lambda: len(backend.answers) == 1)
        asked.append(row(pilot))
        pilot.app.exit()

    backend = FakeBackend()
    app = make_app(backend)
    app.run(headless=True, size=(100, 24), auto_pilot=flow)
    assert app.return_code == 0
    assert len(asked) == 1 and "2 \u25cf Alpha" in asked[0]
