"""Steps shared by the chat's tests."""

import asyncio
import time
from collections.abc import Callable

from textual._xterm_parser import XTermParser
from textual.app import App
from textual.events import Event
from textual.pilot import Pilot
from textual.strip import Strip

from localllm.answer.event import AnswerEvent, AnswerStream
from localllm.chats import Message
from tui.app import ChatApp
from tui.screens.chat import ChatScreen


def screen_lines(app: App[None]) -> list[Strip]:
    """What the screen shows, line by line."""
    return app.screen._compositor.render_strips()


def typed(text: str) -> list[Event]:
    """The events of a text that comes from a terminal."""
    return [event for event in XTermParser().feed(text) if isinstance(event, Event)]


def chat_of(pilot: Pilot[None]) -> ChatScreen:
    app = pilot.app
    assert isinstance(app, ChatApp)
    screen = app.screen_stack[0]
    assert isinstance(screen, ChatScreen)
    return screen


async def until(pilot: Pilot[None], condition: Callable[[], object], seconds: float = 60) -> None:
    """Let the app run until the condition holds; the time limit is so large that only a bug reaches it."""
    async with asyncio.timeout(seconds):
        while not condition():
            await pilot.pause(0.02)
    await pilot.pause()


async def loaded(pilot: Pilot[None]) -> ChatScreen:
    chat = chat_of(pilot)
    await until(pilot, lambda: chat.info, 300)  # a real model may first need its kernels compiled
    return chat


async def say(pilot: Pilot[None], text: str) -> None:
    """Type a prompt and send it."""
    chat_of(pilot).prompt.insert(text)
    await pilot.press("enter")


async def answered(pilot: Pilot[None]) -> Message:
    """Wait for the last answer's end."""
    chat = chat_of(pilot)
    await until(pilot, lambda: chat.conversation.messages and chat.conversation.messages[-1].finish_reason)
    await until(pilot, lambda: not chat.busy)
    return chat.conversation.messages[-1]


async def ask(pilot: Pilot[None], text: str) -> Message:
    """Send a prompt and wait for the whole answer."""
    chat = chat_of(pilot)
    before = len(chat.conversation.messages)
    await say(pilot, text)
    await until(pilot, lambda: len(chat.conversation.messages) >= before + 2)
    return await answered(pilot)


def read(answer: AnswerStream) -> list[AnswerEvent]:
    """Every update up to the last."""
    updates: list[AnswerEvent] = []
    end = time.monotonic() + 20
    while not updates or updates[-1].finish_reason is None:
        assert time.monotonic() < end
        time.sleep(0.005)
        updates += answer.poll()
    return updates
