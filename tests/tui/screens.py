"""Every screen of the chat: how to reach it with scripted answers, and a program that draws all of them.

`TEXTUAL_ANIMATIONS=none python -m tests.tui.screens FOLDER [NAME ...]` writes each screen in every size and all colours
as SVG, for review.
"""

import asyncio
import math
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, TabbedContent, TextArea

from localllm.answer.event import AnswerEvent, AnswerPart, PartKind
from localllm.answer.tool_calls import ToolCall
from localllm.chats import SessionStore
from tests.fakes.fake_backend import ended, said
from tests.systems import own_places
from tests.tui.chatting import answered, ask, chat_of, loaded, say, until
from tests.tui.machine import ANSWER, NEW, NOTES, OLD, QUESTION, QUOTING, RIVALS, WIDE, Machine, machine_of
from tui.app import ChatApp
from tui.screens.approval import ApprovalScreen
from tui.screens.inspector import InspectorScreen
from tui.screens.models import PickerScreen
from tui.screens.parameters import ParametersScreen
from tui.screens.question import QuestionScreen
from tui.screens.sessions import SessionsScreen
from tui.widgets.frame import KeyBar, Note

Flow = Callable[[Pilot[None]], Awaitable[None]]

SIZES = {"60x20": (60, 20), "80x24": (80, 24), "120x40": (120, 40), "200x50": (200, 50)}
COLOURS = ("dark", "light", "16 colours")


async def welcome(pilot: Pilot[None]) -> None:
    await loaded(pilot)


async def loading(pilot: Pilot[None]) -> None:
    """A model being loaded: the gate was closed before the app started."""
    chat = chat_of(pilot)
    await until(pilot, lambda: chat.loader.busy and chat.status_line.facts.activity)


async def answer(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await ask(pilot, QUESTION)


async def wide(pilot: Pilot[None]) -> None:
    machine_of(pilot).scripts[0] = [said(WIDE), ended()]
    await loaded(pilot)
    await ask(pilot, "Compare three trees")


async def thoughts(pilot: Pilot[None]) -> None:
    await answer(pilot)
    await pilot.press("ctrl+t", "ctrl+up")


async def writing(pilot: Pilot[None]) -> None:
    machine_of(pilot).scripts[0] = [said("The user asks about trees. They lose water.", PartKind.REASONING)]
    chat = await loaded(pilot)
    await say(pilot, QUESTION)
    await until(pilot, lambda: chat.transcript.views and "water" in chat.transcript.views[-1].message.reasoning)


async def editing(pilot: Pilot[None]) -> None:
    await answer(pilot)
    await pilot.press("ctrl+up", "ctrl+up", "ctrl+e")
    await until(pilot, lambda: chat_of(pilot).prompt.editing)


async def commands(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await pilot.press("/")


async def palette(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await pilot.press("ctrl+p")
    await until(pilot, lambda: isinstance(pilot.app.screen, CommandPalette))
    await pilot.press(*"chat")
    await until(pilot, lambda: pilot.app.screen.query_one(OptionList).option_count > 5)


async def help_note(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await pilot.press("f1")
    await until(pilot, lambda: chat_of(pilot).query(".note"))


async def wrong(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await say(pilot, "/set temprature 1")
    await until(pilot, lambda: chat_of(pilot).query(".failure"))


async def first_model(pilot: Pilot[None]) -> None:
    await until(pilot, lambda: "F1" in str(chat_of(pilot).query_one(KeyBar).content))
    machine_of(pilot).painted.set()
    await until(pilot, lambda: isinstance(pilot.app.screen, PickerScreen) and pilot.app.screen.choices)
    entries = pilot.app.screen.query_one(OptionList)
    await until(pilot, lambda: fits(entries))


def fits(entries: OptionList) -> bool:
    """Whether the rows have the list's width: they are made before its first layout and again after it."""
    if not entries.option_count or entries.outer_size.width < 40:
        return False
    row = str(entries.get_option("builtin").prompt).splitlines()[0]
    return len(row) == entries.outer_size.width - 5 and entries.highlighted == 0


async def models(pilot: Pilot[None]) -> None:
    await answer(pilot)
    machine_of(pilot).painted.set()
    await pilot.press("f4")
    await until(pilot, lambda: isinstance(pilot.app.screen, PickerScreen) and pilot.app.screen.choices)
    await until(pilot, lambda: fits(pilot.app.screen.query_one(OptionList)))


async def parameters(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await pilot.press("f5")
    await until(pilot, lambda: isinstance(pilot.app.screen, ParametersScreen))


async def _chats(pilot: Pilot[None]) -> SessionsScreen:
    await answer(pilot)
    chat = chat_of(pilot)
    await say(pilot, "/tag biology garden")
    await until(pilot, lambda: chat.conversation.tags)
    for title in ("Which ports does the firewall open, and for whom?", "日本語の質問"):
        machine_of(pilot).scripts.append([said("Leaves fall."), ended()])
        await pilot.press("ctrl+n")
        await until(pilot, lambda: not chat.conversation.messages)
        await ask(pilot, title)
    await pilot.press("f3")
    await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
    screen = pilot.app.screen
    assert isinstance(screen, SessionsScreen)
    await until(pilot, lambda: len(screen.sessions) == 3)
    return screen


async def chats(pilot: Pilot[None]) -> None:
    await _chats(pilot)


async def chats_found(pilot: Pilot[None]) -> None:
    screen = await _chats(pilot)
    await pilot.press(*"leaves")
    entries = screen.entries
    await until(pilot, lambda: entries.option_count == 3 and "Leaves" in str(entries.get_option_at_index(0).prompt))


async def find(pilot: Pilot[None]) -> None:
    await answer(pilot)
    await pilot.press("ctrl+f", *"leaves")
    await until(pilot, lambda: "of" in str(chat_of(pilot).find.count.content))


async def tabs(pilot: Pilot[None]) -> None:
    """Five chats: one with an answer, one that is answering, one with a draft."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    await answer(pilot)
    for number, title in enumerate(("How do ships keep their course?", "A rhyme", "Recipe for bread", "Shell"), 2):
        await pilot.press("f8")
        await until(pilot, lambda number=number: len(app.tabs.all) == number and chat_of(pilot) is app.tabs.all[-1])
        await loaded(pilot)
        await until(pilot, lambda: pilot.app.focused is chat_of(pilot).prompt)
        if number < 5:
            await say(pilot, title)
            await until(pilot, lambda: chat_of(pilot).busy and len(chat_of(pilot).transcript.views) == 2)
    machine_of(pilot).answers[-2].push(said("Bread."), ended())
    await until(pilot, lambda: "✔" in str(chat_of(pilot).title_bar.label.content))
    await pilot.press(*"draft")


async def leaving(pilot: Pilot[None]) -> None:
    await tabs(pilot)
    await pilot.press("ctrl+c")
    await until(pilot, lambda: chat_of(pilot).notice.display)


async def question(pilot: Pilot[None]) -> None:
    """Whether a running answer may be stopped."""
    await writing(pilot)
    await pilot.press("ctrl+n")
    await until(pilot, lambda: isinstance(pilot.app.screen, QuestionScreen))


async def picker(pilot: Pilot[None]) -> None:
    chat = chat_of(pilot)
    for name in (
        "src/engine/page_cache.py",
        "src/engine/" + "very_" * 9 + "long_page_cache_name.py",
        "docs/page cache.md",
    ):
        path = chat.tools.folder.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one two three", encoding="utf-8")
    await loaded(pilot)
    await pilot.press(*"see @cache")
    await until(pilot, lambda: chat.prompt.completion.option_count == 3)
    rows = chat.prompt.completion
    await until(pilot, lambda: all("tokens" in str(rows.get_option_at_index(place).prompt) for place in range(3)))


async def _inspector(pilot: Pilot[None], page: str, picture: str) -> None:
    machine_of(pilot).scripts[0] = [replace(said(ANSWER), logprobs=(RIVALS,) * 40), ended()]
    await answer(pilot)
    await pilot.press("f2", page)
    await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
    drawn = pilot.app.screen.query_one(f"#{picture}")
    await until(pilot, lambda: str(drawn.render()).strip())
    assert pilot.app.screen.query_one(TabbedContent).active


async def inspector(pilot: Pilot[None]) -> None:
    await _inspector(pilot, "1", "tree")


async def timeline(pilot: Pilot[None]) -> None:
    await _inspector(pilot, "2", "timeline")


async def laboratory(pilot: Pilot[None]) -> None:
    await _inspector(pilot, "3", "what_if")


async def answers(pilot: Pilot[None]) -> None:
    await _inspector(pilot, "4", "latency")


async def approval(pilot: Pilot[None]) -> None:
    """The question whether a file may be changed."""
    chat = chat_of(pilot)
    (chat.tools.folder.root / "leaves.py").write_text(OLD, encoding="utf-8")
    edit = {"path": "leaves.py", "old_text": "    return month in (12, 1, 2)\n", "new_text": NEW}
    await _asks(pilot, ToolCall("edit_file", edit))


async def approval_to_run(pilot: Pilot[None]) -> None:
    """The question whether a command may run."""
    await _asks(pilot, ToolCall("run_command", {"command": "git log --oneline --since=2026-01-01 --author=me -- src"}))


async def _asks(pilot: Pilot[None], call: ToolCall) -> None:
    chat, machine = chat_of(pilot), machine_of(pilot)
    machine.scripts[0] = [AnswerEvent((AnswerPart(PartKind.TOOL_CALLS, "", (call,)),)), ended()]
    await loaded(pilot)
    await say(pilot, "/set tools on")
    await say(pilot, "Say it for the south too.")
    await until(pilot, lambda: isinstance(pilot.app.screen, ApprovalScreen) and pilot.app.screen.focused)
    chat.notice.display = False


async def tool_result(pilot: Pilot[None]) -> None:
    """The change and its result, after approval."""
    await approval(pilot)
    machine_of(pilot).scripts.append([said("It asks for the hemisphere now."), ended()])
    await pilot.press("down", "enter")
    await until(pilot, lambda: len(chat_of(pilot).conversation.messages) == 4)
    await answered(pilot)


async def tools(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await say(pilot, "/tools on")
    await until(pilot, lambda: chat_of(pilot).query(".note"))
    chat_of(pilot).notice.display = False


async def personas(pilot: Pilot[None]) -> None:
    await answer(pilot)
    await say(pilot, "/set system You are a gardener.")
    await until(pilot, lambda: chat_of(pilot).conversation.parameters.system)
    chat_of(pilot).notice.display = False
    review = "Look at what follows as a strict reviewer would, and say what is wrong with it"
    for command, shown in (
        ("/persona save gardener", "gardener.toml"),
        ("/prompt save leaves", "leaves.md"),
        (f"/prompt save review {review}", "review.md"),
        ("/prompt", "They are files"),
    ):
        await say(pilot, command)
        await until(pilot, lambda shown=shown: any(shown in str(note.render()) for note in chat_of(pilot).query(Note)))


async def folder(pilot: Pilot[None]) -> None:
    machine, chat = machine_of(pilot), chat_of(pilot)
    machine.scripts.clear()
    machine.scripts += [[said(QUOTING), ended()], [said("Harbour"), ended()]]
    documents = chat.tools.folder.root / "documents"
    documents.mkdir()
    (documents / "notes.md").write_text(NOTES)
    (documents / "tides.py").write_text("def harbour(hour):\n    return hour % 12 == 3\n")
    await loaded(pilot)
    await say(pilot, f"/folder {documents}")
    await until(pilot, lambda: chat.conversation.parameters.folder)
    await ask(pilot, "How old is the harbour, and what does it have?")
    await until(pilot, lambda: chat.title_bar.title == "Harbour")
    chat.notice.display = False


async def summary(pilot: Pilot[None]) -> None:
    machine, chat = machine_of(pilot), chat_of(pilot)
    machine.scripts.clear()
    answers = [said("It is so."), ended()]
    notes = [said("The user asks about the harbour, built in 1924."), ended()]
    machine.scripts += [answers, [said("Harbour"), ended()], answers, answers, notes]
    await loaded(pilot)
    for number in range(3):
        await ask(pilot, f"Question {number}?")
        await until(pilot, lambda: chat.title_bar.title == "Harbour")
    await say(pilot, "/compact")
    await until(pilot, lambda: chat.conversation.summed() and not chat.busy)
    chat.notice.display = False
    chat.transcript.views[1]._summary.collapsed = False  # type: ignore[attr-defined]
    await pilot.press("pageup", "pageup", "pageup")


SCREENS: dict[str, Flow] = {
    flow.__name__.replace("_", "-"): flow
    for flow in (
        *(welcome, loading, answer, wide, thoughts, writing, question, editing, commands, palette, help_note, wrong),
        *(first_model, models, parameters, chats, chats_found, find, tabs, leaving, picker),
        *(inspector, timeline, laboratory, answers),
        *(approval, approval_to_run, tool_result, tools, personas, folder, summary),
    )
}


@contextmanager
def app_at(screen: str, colours: str, root: Path) -> Iterator[ChatApp]:
    """An app that will show a screen, with all of its files below a folder."""
    project = root / "project"
    project.mkdir()
    before = Path.cwd()
    environment = own_places(root / "home")
    few = colours not in ("dark", "light")
    machine = Machine()
    machine.converses = screen in ("approval", "approval-to-run", "tool-result", "folder", "summary")
    if screen == "loading":
        machine.gate.clear()
    with (
        patch.dict(os.environ, environment),
        patch("tui.screens.models.available_memory", lambda: 4 * 2**30),
        patch("tui.screens.sessions.age", lambda _seconds: "just now"),
        patch("tui.status.STALL_S", math.inf),  # the time since the last text would change every picture
        patch.object(Input, "cursor_blink", False),
        patch.object(TextArea, "cursor_blink", False),
    ):
        os.environ.pop("NO_COLOR", None)
        if colours == "no colour":
            os.environ["NO_COLOR"] = "1"
        os.chdir(project)
        store = SessionStore(root / "sessions.db")
        try:
            model = "" if screen == "first-model" else "qwen3:0.6b"
            yield ChatApp(machine, store, model, light=colours == "light", plain_colours=few)
        finally:
            machine.gate.set()
            store.close()
            os.chdir(before)


async def draw(screen: str, size: tuple[int, int], app: ChatApp) -> str:
    """A picture of the screen, once it has not changed for a while."""
    async with app.run_test(size=size) as pilot:
        await SCREENS[screen](pilot)
        picture, since = "", time.monotonic()
        while time.monotonic() - since < 0.3:
            last, picture = picture, app.export_screenshot(simplify=True)
            if picture != last:
                since = time.monotonic()
            await pilot.pause(0.05)
        return picture


def main(target: Path, names: list[str]) -> None:
    """Draw the named screens, or all."""
    target.mkdir(parents=True, exist_ok=True)
    for screen in names or SCREENS:
        for size_name, size in SIZES.items():
            for colours in COLOURS:
                with tempfile.TemporaryDirectory() as root, app_at(screen, colours, Path(root)) as app:
                    picture = asyncio.run(draw(screen, size, app))
                name = f"{screen}_{size_name}_{colours.replace(' ', '-')}.svg"
                (target / name).write_text(picture, encoding="utf-8")
                sys.stdout.write(f"{name}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
