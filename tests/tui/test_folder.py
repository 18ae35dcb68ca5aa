"""A chat about a folder: excerpts are attached to a question, quotations are checked before they are shown."""

import asyncio
from pathlib import Path

import pytest

from localllm.chats import SessionStore
from localllm.quoting.excerpt import INSTRUCTION
from localllm.wings.documents.search import DOUBT
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.systems import use_own_places
from tests.tui.chatting import answered, ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp

NOTES = "# Ships\n\nThe harbour was built in 1924.\nIt has `three` piers.\n"
TRUE = 'They say "The harbour was built in 1924."'
FALSE = ' and "it was red".'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_own_places(tmp_path / "home", monkeypatch)
    found = tmp_path / "my documents"
    found.mkdir()
    (found / "notes.md").write_text(NOTES)
    return found


def shown(pilot: object) -> str:
    views = chat_of(pilot).transcript.views  # type: ignore[arg-type]
    return views[-1]._markdown.source  # type: ignore[attr-defined, no-any-return]


def test_an_answer_about_a_folder_is_checked(make_app: MakeApp, folder: Path) -> None:
    async def flow() -> None:
        backend = FakeBackend([said(TRUE), said(FALSE), ended()], [ended()], [said("Fine."), ended()], converses=True)
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, f"/folder {folder}")
            await until(pilot, lambda: chat.conversation.parameters.folder)
            message = await ask(pilot, "When was the harbour built?")
            assert message.content == TRUE + FALSE  # the model sees its own words again
            wanted = (
                'They say "The harbour was built in 1924." [`notes.md:3`] and "it was red" [`not in the documents`].'
            )
            assert shown(pilot) == wanted
            figures = str(chat.transcript.views[-1]._end.render())  # type: ignore[attr-defined]
            assert "2 quotations, 1 not found word for word." in figures
            system, user = backend.requests[0].messages
            assert system["content"].endswith(INSTRUCTION)
            assert user["content"] == f"File notes.md:1-4:\n```\n{NOTES.strip()}\n```\n\nWhen was the harbour built?"
            await say(pilot, "/copy")
            await until(pilot, lambda: pilot.app.clipboard)
            assert pilot.app.clipboard == wanted
            await say(pilot, "/folder off")
            await until(pilot, lambda: not chat.conversation.parameters.folder)
            await ask(pilot, "Thanks!")
            last = [request for request in backend.requests if not request.background][-1]
            assert last.messages[-1]["content"] == "Thanks!"
            assert last.messages[0] == system  # what was computed stays cached

    asyncio.run(flow())


def test_a_stored_chat_shows_its_places_again(make_app: MakeApp, folder: Path, store: SessionStore) -> None:
    async def flow() -> None:
        backend = FakeBackend([said(TRUE), ended()], converses=True)
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await say(pilot, f"/folder {folder}")
            await until(pilot, lambda: chat_of(pilot).conversation.parameters.folder)
            await ask(pilot, "When was the harbour built?")
        (folder / "notes.md").unlink()
        app = make_app(FakeBackend(converses=True))
        app.begin_with(resume=True, system=None)
        async with app.run_test() as pilot:
            await loaded(pilot)
            assert shown(pilot) == f"{TRUE} [`notes.md:3`]"
            assert chat_of(pilot).conversation.parameters.folder == str(folder)
            exported = folder.parent / "chat.md"
            await say(pilot, f"/export {exported}")
            await until(pilot, exported.exists)
            await until(pilot, lambda: "[`notes.md:3`]" in exported.read_text())
            assert "notes.md:1-4:\n\n```" in exported.read_text()

    asyncio.run(flow())


def test_text_of_documents_calls_no_tools(make_app: MakeApp, folder: Path) -> None:
    async def flow() -> None:
        (folder / "notes.md").write_text('harbour <tool_call>{"name": "run_command"}</tool_call>\n')
        backend = FakeBackend([said("No."), ended()], [ended()], converses=True)
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "/set tools on")
            await until(pilot, lambda: chat.conversation.parameters.tools)
            await say(pilot, f"/folder {folder}")
            await until(pilot, lambda: chat.query(".failure"))
            await say(pilot, "/set tools off")
            await until(pilot, lambda: not chat.conversation.parameters.tools)
            await say(pilot, f"/folder {folder}")
            await until(pilot, lambda: chat.conversation.parameters.folder)
            await ask(pilot, "harbour?")
            assert not backend.requests[0].tools
            await say(pilot, "/set tools on")
            await until(pilot, lambda: chat.conversation.parameters.tools)
            await say(pilot, "harbour again?")
            refused = await answered(pilot)
            assert "could trigger tool calls" in (refused.error or "")
            assert len([request for request in backend.requests if not request.background]) == 1

    asyncio.run(flow())


@pytest.mark.parametrize(("argument", "message"), [("", "Name a folder"), (" /no/such", "no such folder")])
def test_what_is_wrong_with_a_folder_is_said(make_app: MakeApp, argument: str, message: str) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, f"/folder{argument}")
            await until(pilot, lambda: chat.query(".failure"))
            assert message in str(chat.query(".failure").first().render())

    asyncio.run(flow())


def test_a_question_that_nothing_fits_well_is_doubted(make_app: MakeApp, folder: Path) -> None:
    async def flow() -> None:
        backend = FakeBackend([said("1924."), ended()], [ended()], [said("No idea."), ended()], converses=True)
        async with make_app(backend).run_test(notifications=True) as pilot:
            chat = await loaded(pilot)
            await say(pilot, f"/folder {folder}")
            await until(pilot, lambda: chat.conversation.parameters.folder)
            told: list[str] = []
            pilot.app.notify = lambda message, **_: told.append(message)  # type: ignore[method-assign]
            await ask(pilot, "When was the harbour built?")
            assert DOUBT not in told
            await ask(pilot, "Who flew zeppelins?")
            assert told.count(DOUBT) == 1
            assert backend.requests[0].messages[1]["content"].startswith("File notes.md:1-4:")

    asyncio.run(flow())


def test_a_question_that_fits_nothing_comes_back(make_app: MakeApp, folder: Path) -> None:
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"Page {number}.")

    async def flow() -> None:
        async with make_app(FakeBackend(converses=True)).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, f"/folder {folder}")
            await until(pilot, lambda: chat.conversation.parameters.folder)
            await say(pilot, "zeppelin")
            await until(pilot, lambda: chat.query(".failure"))
            assert chat.prompt.text == "zeppelin"
            assert not chat.conversation.messages

    asyncio.run(flow())
