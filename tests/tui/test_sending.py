"""From the prompt to the conversation: one message at a time, and no text is lost."""

import asyncio
from pathlib import Path

import pytest
from textual.widgets import Static

from localllm.chats import SessionStore
from localllm.chats.parameters import Parameters
from localllm.errors import RequestError
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import answered, ask, loaded, say, typed, until
from tests.tui.conftest import MakeApp
from tui.commands.table import find_command, unknown_command
from tui.start import run_chat
from tui.widgets.frame import Note
from tui.widgets.messages import AnswerView


def test_lines_that_come_faster_than_they_are_taken_become_one_message(make_app: MakeApp) -> None:
    """A paste into a terminal without bracketed paste: each line ends with the Enter key."""
    backend = FakeBackend([])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await pilot.press(*"one", "enter", *"two", "enter", *"three")
            await until(pilot, lambda: backend.answers)
            await until(pilot, lambda: chat.prompt.queued == ["two"] and chat.prompt.text == "three")
            backend.answers[0].push(said("Done."), ended())
            await until(pilot, lambda: len(backend.answers) == 2)
            assert [message.content for message in chat.conversation.messages][:3] == ["one", "Done.", "two"]
            assert chat.prompt.text == "three"

    asyncio.run(flow())
    assert len(backend.requests) == 2


def test_regenerating_twice_at_once_answers_once(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()], [])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "Go")
            await pilot.press("ctrl+r", "ctrl+r")
            await until(pilot, lambda: len(backend.answers) == 2)
            await until(pilot, lambda: chat.query(".failure"))
            backend.answers[1].push(said("Two."), ended())
            await answered(pilot)
            assert len(chat.conversation.messages) == 2

    asyncio.run(flow())
    assert len(backend.requests) == 2


def test_an_edit_that_cannot_be_sent_stays_an_edit(make_app: MakeApp, tmp_path: Path) -> None:
    (tmp_path / "film.bin").write_bytes(b"\xff\xfe\xfd")
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "Go")
            await say(pilot, "/edit")
            await until(pilot, lambda: chat.prompt.text == "Go")
            await say(pilot, f" @{tmp_path}/film.bin")
            await until(pilot, lambda: chat.query(".failure"))
            await until(pilot, lambda: not chat.busy)
            chat.prompt.put("Go on")
            await pilot.press("enter")
            await until(pilot, lambda: len(backend.requests) == 2)
            await answered(pilot)
            assert [message.content for message in chat.conversation.messages] == ["Go on", "Two."]

    asyncio.run(flow())


def test_an_unknown_command_is_not_sent(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "/exprot chat.md")
            await until(pilot, lambda: chat.query(".failure"))
            assert "Did you mean /export?" in str(chat.query_one(".failure", Static).content)
            assert chat.prompt.text == "/exprot chat.md"
            chat.prompt.put(" /exprot chat.md")
            await pilot.press("enter")
            await until(pilot, lambda: chat.conversation.messages)
            await answered(pilot)

    asyncio.run(flow())
    assert backend.requests[0].messages[0]["content"] == "/exprot chat.md"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/?", ("help", "")),
        ("/exit", ("quit", "")),
        ("/bye", ("quit", "")),
        ("exit", ("quit", "")),
        ("exit the room", None),
        ("/Set system You are\nterse", ("set", "system You are\nterse")),
        ("/usr/bin is where it lies", None),
        ("/ is a slash", None),
        ("/exprot", None),
    ],
)
def test_commands_and_their_other_names(text: str, command: tuple[str, str] | None) -> None:
    assert find_command(text) == command


def test_only_what_could_be_a_command_is_an_unknown_one() -> None:
    assert unknown_command("/qqqq") == (
        "Unknown command /qqqq. /help lists them. Put a space before the slash to send it as a message."
    )
    assert unknown_command("/usr/bin is where it lies") is unknown_command(" /exprot") is None


def test_thinking_is_switched_as_ollama_does_it(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            for text, value in (("/set think", True), ("/set nothink", False), ("/set think default", None)):
                await say(pilot, text)
                await until(pilot, lambda value=value: chat.conversation.parameters.think is value)

    asyncio.run(flow())


def test_the_default_of_a_parameter_is_the_models() -> None:
    models = Parameters(temperature=0.3)
    assert models.with_text("temperature", "0.9", models).with_text("temperature", "default", models) == models
    with pytest.raises(RequestError, match="Did you mean temperature"):
        models.with_text("temp", "1", models)


def test_an_answer_without_an_end_reads_as_stopped(make_app: MakeApp, store: SessionStore) -> None:
    """The program was killed while the answer was written, perhaps before its first word."""

    async def flow() -> None:
        async with make_app(FakeBackend([])).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "Go")
            await until(pilot, lambda: chat.query(AnswerView))
            session = chat.conversation.session_id
            stored = store.path(session)  # type: ignore[arg-type]
            assert stored[-1].finish_reason is None
            chat.conversation.open(session)  # type: ignore[arg-type]
            await chat.show_conversation()
            end = chat.query(AnswerView).last().query_one(".figures", Static)
            await until(pilot, lambda: str(end.content) == "stopped")

    asyncio.run(flow())


def test_names_with_blanks_complete_in_quotes(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my notes").mkdir()
    (tmp_path / "my notes" / "on foxes.txt").write_text("red", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await pilot.press(*"sum @my", "tab")
            await until(pilot, lambda: chat.prompt.text == 'sum @"my notes/')
            await until(pilot, lambda: chat.prompt.completion.display)
            await pilot.press("tab")
            await until(pilot, lambda: chat.prompt.text == 'sum @"my notes/on foxes.txt"')
            await ask(pilot, "")

    asyncio.run(flow())
    assert backend.requests[0].messages[0]["content"].startswith("File my notes/on foxes.txt:\n```\nred\n```\n")


def test_joiners_are_letters(make_app: MakeApp) -> None:
    family = "\N{MAN}\u200d\N{WOMAN}"

    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            for event in typed(family):
                chat.prompt.post_message(event)
            await until(pilot, lambda: chat.prompt.text == family)

    asyncio.run(flow())


def test_a_terminal_that_draws_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(RequestError, match="localllm run"):
        run_chat(None, {})


def test_what_a_model_says_of_itself_covers_nothing(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            chat.transcript.tell("It tells stories.")
            welcome = chat.query_one("Welcome .notice", Static)
            assert welcome.display and str(welcome.content) == "It tells stories."
            await ask(pilot, "Go")
            chat.transcript.tell("It tells stories.")
            await until(pilot, lambda: chat.query(Note))
            assert str(chat.query_one(Note).content) == "It tells stories."
            assert not chat.notice.display

    asyncio.run(flow())
