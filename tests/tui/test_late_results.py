"""Results that arrive after their widgets have left the screen, as happens during exit, cause no error."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from textual.pilot import Pilot

from localllm.answer.event import AnswerEvent, AnswerPart, PartKind
from localllm.answer.tool_calls import ToolCall
from localllm.chats import SessionStore
from localllm.engine.inspection import EngineSnapshot
from localllm.errors import LocalLLMError
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import loaded, say, until
from tests.tui.conftest import MakeApp
from tui.backend import PickerRow
from tui.screens.inspector import InspectorScreen
from tui.screens.models import PickerScreen

LOOK = EngineSnapshot(
    steps=(), requests=(), prefixes=(), page_size=16, pages_total=8, page_holders=np.zeros(0, np.int32)
)


class Slow(FakeBackend):
    """Inspection and model lists arrive when the test lets them."""

    def __init__(self, *scripts: Sequence[AnswerEvent], fails: bool = False) -> None:
        super().__init__(*scripts)
        self.look: Future[EngineSnapshot] = Future()
        self.listed = threading.Event()
        self._fails = fails

    def inspect(self) -> "Future[EngineSnapshot]":
        return self.look

    def models(self, near: str | None) -> Sequence[PickerRow]:
        self.listed.wait(60)
        if self._fails:
            raise LocalLLMError("The disk is gone.")
        return super().models(near)


async def widgets_leave(pilot: Pilot[None]) -> None:
    """As during the removal of a screen: its widgets are gone, its workers not yet."""
    with pilot.app.batch_update():  # a text area that is being removed cannot be drawn
        await pilot.app.screen.remove_children()


def test_a_look_into_the_engine_comes_late(make_app: MakeApp) -> None:
    backend = Slow()

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
            await widgets_leave(pilot)
            backend.look.set_result(LOOK)
            await pilot.pause(0.05)

    asyncio.run(flow())


def test_models_are_found_or_not_late(make_app: MakeApp) -> None:
    async def flow(backend: Slow) -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await pilot.press("f4")
            await until(pilot, lambda: isinstance(pilot.app.screen, PickerScreen))
            await widgets_leave(pilot)
            backend.listed.set()
            await pilot.pause(0.05)

    for fails in (False, True):
        asyncio.run(flow(Slow(fails=fails)))


def test_an_answer_comes_late(make_app: MakeApp, store: SessionStore) -> None:
    backend = Slow([said("Half ")])
    call = AnswerPart(PartKind.TOOL_CALLS, "", (ToolCall(name="look", arguments={}),))

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "Go")
            await until(pilot, lambda: chat.conversation.messages and chat.conversation.messages[-1].content)
            await widgets_leave(pilot)
            backend.answers[0].push(said("Hm.", PartKind.REASONING), said("an answer"), AnswerEvent((call,)), ended())
            await until(pilot, lambda: not chat.busy)

    asyncio.run(flow())
    answer = store.path(store.sessions()[0].id)[-1]
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("Half an answer", "Hm.", "stop")
