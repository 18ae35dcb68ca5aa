"""No draft is lost: by an edit, the history, a command, another tab, or the end of the program."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from textual.events import Paste
from textual.pilot import Pilot

from localllm.chats import SessionStore
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, chat_of, loaded, say, screen_lines, typed, until
from tests.tui.conftest import MakeApp
from tui.app import ChatApp
from tui.drafts import Drafts
from tui.widgets.prompt import Prompt

DRAFT = "a long thought, not yet sent"


async def edit_first(pilot: Pilot[None]) -> Prompt:
    """Begin to edit the chat's first question."""
    prompt = chat_of(pilot).prompt
    await pilot.press("ctrl+up", "ctrl+up", "ctrl+e")
    await until(pilot, lambda: prompt.editing)
    return prompt


def test_an_edit_gives_the_draft_back(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            chat.prompt.insert(DRAFT)
            prompt = await edit_first(pilot)
            assert prompt.text == "First"
            await pilot.press("escape")
            await until(pilot, lambda: prompt.text == DRAFT and not prompt.editing)
            await edit_first(pilot)
            prompt.put("First, changed")
            await pilot.press("escape")
            await until(pilot, lambda: prompt.text == DRAFT)
            assert prompt.sent[-1] == "First, changed"
            await edit_first(pilot)
            prompt.put("First again")
            await pilot.press("enter")
            await until(pilot, lambda: len(backend.requests) == 2)
            await until(pilot, lambda: prompt.text == DRAFT)
            assert chat.conversation.messages[0].content == "First again"

    asyncio.run(flow())


def test_a_second_edit_keeps_the_first_one_and_the_draft(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            chat.prompt.insert(DRAFT)
            prompt = await edit_first(pilot)
            prompt.put("First, half changed")
            await pilot.press("ctrl+up", "ctrl+up", "ctrl+e")
            await until(pilot, lambda: prompt.text == "First")
            assert prompt.sent[-1] == "First, half changed"
            await pilot.press("ctrl+n")  # its message is no longer shown
            await until(pilot, lambda: prompt.text == DRAFT and not prompt.editing)

    asyncio.run(flow())


def test_the_history_gives_the_draft_back_and_keeps_changed_entries(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()], [said("Three."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            await ask(pilot, "Second")
            prompt = chat.prompt
            prompt.insert(DRAFT)
            await pilot.press("up")
            await until(pilot, lambda: prompt.text == "Second")
            prompt.put("Second, changed")
            await pilot.press("home", "up")
            await until(pilot, lambda: prompt.text == "First")
            await pilot.press("down")
            await until(pilot, lambda: prompt.text == "Second, changed")
            await pilot.press("home", "up", "enter")  # sends the first one again
            await until(pilot, lambda: len(backend.requests) == 3 and prompt.text == DRAFT)
            assert "Second, changed" in prompt.sent and prompt.sent[-1] == "First"

    asyncio.run(flow())


def test_what_cannot_be_sent_does_not_mix_with_the_draft(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            chat.prompt.sent.append("See @nosuch.md")
            chat.prompt.insert(DRAFT)
            await pilot.press("up", "enter")
            await until(pilot, lambda: chat.query(".failure") and not chat.busy)
            assert chat.prompt.text.startswith("See @nosuch.md")
            assert DRAFT in " ".join([chat.prompt.text, *chat.prompt.unsent])

    asyncio.run(flow())


def test_a_command_that_fills_the_prompt_keeps_the_draft(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()])).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            chat.prompt.insert(DRAFT)
            app = pilot.app
            assert isinstance(app, ChatApp)
            await app.action_command("rename")
            await until(pilot, lambda: chat.prompt.text == "/rename First")
            assert chat.prompt.sent[-1] == DRAFT

    asyncio.run(flow())


def test_a_closed_tab_leaves_its_draft_in_the_history(make_app: MakeApp, store: SessionStore) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            await loaded(pilot)
            app = pilot.app
            assert isinstance(app, ChatApp)
            await pilot.press("f8")
            await until(pilot, lambda: len(app.tabs.all) == 2 and app.chat is app.tabs.all[1])
            app.chat.prompt.insert(DRAFT)
            await app.action_command("close")
            await until(pilot, lambda: len(app.tabs.all) == 1)
            assert app.chat.prompt.sent[-1] == DRAFT

    asyncio.run(flow())
    assert store.prompts()[-1] == DRAFT


def test_a_draft_outlives_the_program(make_app: MakeApp, store: SessionStore) -> None:
    pasted = "\n".join(f"line {number}" for number in range(5000))

    async def first() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            chat.prompt.post_message(Paste(pasted))
            await until(pilot, lambda: chat.prompt.pasted)
            chat.prompt.insert("summarise this")
            await pilot.press("f8")
            app = pilot.app
            assert isinstance(app, ChatApp)
            await until(pilot, lambda: len(app.tabs.all) == 2)
            await until(pilot, lambda: pilot.app.focused is app.tabs.all[1].prompt)
            app.tabs.all[1].prompt.insert(DRAFT)
            await app.action_quit()

    async def second() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            await until(pilot, lambda: "summarise this" in chat.prompt.text)
            assert DRAFT in chat.prompt.sent
            assert [file.text for file in chat.pasted()] == [pasted]
            chat.prompt.text = ""
            await until(pilot, lambda: not store.remembered_with("drafts of "))

    asyncio.run(first())
    (kept,) = store.remembered_with("drafts of ").items()
    drafts = json.loads(kept[1])
    assert [draft["text"] for draft in drafts] == [DRAFT, "@pasted-5000-lines-" + drafts[1]["text"][19:]]
    store.forget(kept[0])  # as if by a program that has ended: its number is another program's now
    store.remember(f"drafts of {os.getpid()} 1.0", kept[1])
    asyncio.run(second())


def test_drafts_of_a_running_chat_are_not_shared(store: SessionStore) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        began = psutil.Process(other.pid).create_time()
        value = json.dumps([{"text": DRAFT, "pasted": []}])
        store.remember(f"drafts of {other.pid} {began}", value)
        assert Drafts(store).take_over() == []
        other.communicate(b"\n")
    assert [draft.text for draft in Drafts(store).take_over()] == [DRAFT]
    assert Drafts(store).take_over() == []


@pytest.mark.parametrize("value", ["", "{", "[1]", '[{"text": 1}]', '[{"text": "a", "pasted": [{"name": 1}]}]'])
def test_damaged_drafts_are_dropped(value: str, store: SessionStore) -> None:
    store.remember("drafts of 1 x", value)
    assert Drafts(store).take_over() == []


@pytest.mark.parametrize("keys", ["\x1b\r", "\x1b\n", "\n", "\x1b[13;2u", "\x1b[13;3u", "\\\r"])
def test_keys_for_a_new_line(keys: str, make_app: MakeApp) -> None:
    """As terminals send them: Alt+Enter, Ctrl+J, Shift+Enter and Alt+Enter in kitty's protocol, backslash and Enter."""
    backend = FakeBackend()

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await pilot.press(*"ab")
            for event in typed(keys):
                event.set_sender(pilot.app)
                pilot.app.post_message(event)
                await pilot.pause()
            await pilot.press(*"cd")
            await until(pilot, lambda: chat.prompt.text == "ab\ncd")

    asyncio.run(flow())
    assert backend.requests == []


def test_two_backslashes_before_enter_are_text(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "C:\\\\")

    asyncio.run(flow())
    assert backend.requests[0].messages[0]["content"] == "C:\\\\"


def test_the_screen_names_the_key_for_a_new_line(make_app: MakeApp) -> None:
    async def flow(keys: dict[str, str], name: str) -> None:
        async with make_app(FakeBackend(), keys=keys).run_test(size=(60, 20)) as pilot:
            chat = await loaded(pilot)
            shown = "\n".join(strip.text for strip in screen_lines(pilot.app))
            assert f"{name} new line" in str(chat.prompt.placeholder) and f"{name} new line" in shown

    asyncio.run(flow({}, "Ctrl+J"))
    asyncio.run(flow({"prompt.newline": "ctrl+k"}, "Ctrl+K"))


def test_the_border_weighs_what_is_attached(make_app: MakeApp, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("word " * 300)
    backend = FakeBackend([said("Yes."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            prompt = chat.prompt
            prompt.post_message(Paste("\n".join(["four words on it"] * 100)))
            await until(pilot, lambda: "with pasted 100 lines" in str(prompt.border_subtitle))
            assert not prompt.has_class("too-much")
            prompt.insert(f"and @{tmp_path}/notes.txt")
            await until(pilot, lambda: "2 attachments" in str(prompt.border_subtitle))
            prompt.text = ""
            await say(pilot, "/set ctx 200")
            await until(pilot, lambda: chat.conversation.parameters.ctx == 200)
            prompt.post_message(Paste("\n".join(["four words on it"] * 100)))
            await until(pilot, lambda: "more than the context of 200" in str(prompt.border_subtitle))
            assert prompt.has_class("too-much")

    asyncio.run(flow())


def test_a_pasted_text_is_called_by_its_size(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("Yes."), ended()], [said("Yes."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            for text, title in (("summarise this", "summarise this"), ("", "Pasted 1,200 lines")):
                chat.prompt.post_message(Paste("\n".join(map(str, range(1200)))))
                await until(pilot, lambda: "@pasted-1200-lines" in chat.prompt.text)
                await ask(pilot, text)
                assert store.sessions(limit=1)[0].title == title
                shown = str(chat.transcript.views[0].query_one(".attachment").render())
                assert shown.startswith("▤ pasted 1,200 lines")
                await pilot.press("ctrl+n")
                await until(pilot, lambda: not chat.conversation.messages)

    asyncio.run(flow())


def test_a_pasted_text_of_another_chat_is_not_sent_as_its_name(make_app: MakeApp) -> None:
    async def flow() -> None:
        backend = FakeBackend()
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "@pasted-12-lines-0123ab explain")
            await until(pilot, lambda: chat.query(".failure"))
            assert "Paste it again" in str(chat.query_one(".failure").render())
            assert backend.requests == []

    asyncio.run(flow())
