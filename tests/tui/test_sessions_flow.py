"""Sessions on the screen: new, list, search, rename, fork, delete and undo, variants, edit, export."""

import asyncio
import io
import json
import threading
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from localllm.answer.request import AnswerRequest
from localllm.chats import SessionStore
from localllm.chats.conversation import Conversation
from localllm.chats.database import SessionError
from localllm.chats.parameters import Parameters
from localllm.engine.request import Counts, FinishReason
from tests.fakes.fake_backend import FakeAnswer, FakeBackend, ended, said
from tests.tui.chatting import answered, ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tests.waiting import eventually
from tui.answering import make_title, whole_answer
from tui.screens.question import QuestionScreen
from tui.screens.sessions import SessionsScreen
from tui.widgets.frame import Note, Notice
from tui.widgets.markdown import AnswerMarkdown


def contents(pilot: Pilot[None]) -> list[str]:
    return [message.content for message in chat_of(pilot).conversation.messages]


def on_screen(pilot: Pilot[None]) -> list[str]:
    return [view.message.content for view in chat_of(pilot).transcript.views]


def test_a_new_chat_leaves_the_old_one_in_the_list(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            facts = (await loaded(pilot)).status_line.facts
            await ask(pilot, "First question")
            assert facts.counts.prompt == 12
            await pilot.press("ctrl+n")
            await until(pilot, lambda: contents(pilot) == [] == on_screen(pilot))
            await until(pilot, lambda: facts.counts == Counts())
            await ask(pilot, "Second question")
            await pilot.press("f3")
            await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
            entries = pilot.app.screen.query_one(OptionList)
            assert entries.option_count == 2
            await pilot.press(*"One.")  # only the first chat's answer has it
            await until(pilot, lambda: entries.option_count == 1)
            await pilot.press("enter")
            await until(pilot, lambda: contents(pilot) == ["First question", "One."] == on_screen(pilot))
            assert facts.counts == Counts(prompt=12, generated=41)

    asyncio.run(flow())
    assert [session.title for session in store.sessions()] == ["Second question", "First question"]


def test_looking_at_the_list_does_not_disturb_an_answer(make_app: MakeApp) -> None:
    backend = FakeBackend([said("Half ")])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "Go")
            await until(pilot, lambda: chat.conversation.messages and chat.conversation.messages[-1].content)
            await pilot.press("f3")
            await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
            await pilot.press("ctrl+e")
            pilot.app.screen.query_one(Input).value = "Another title"
            await pilot.press("enter", "escape")
            await until(pilot, lambda: pilot.app.screen is chat)
            backend.answers[0].push(said("an answer"), ended())
            await answered(pilot)
            answer = chat.transcript.views[-1]
            await until(pilot, lambda: answer.query_one(AnswerMarkdown).source == "Half an answer")
            assert chat.title_bar.title == "Another title"

    asyncio.run(flow())


def test_rename_delete_and_undo_in_the_list(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "Question")
            await pilot.press("f3", "ctrl+e")
            pilot.app.screen.query_one(Input).value = "A better title"
            await pilot.press("enter")
            await until(pilot, lambda: [session.title for session in store.sessions()] == ["A better title"])
            await pilot.press("ctrl+d")
            await until(pilot, lambda: store.sessions() == [])
            await pilot.press("ctrl+z")
            await until(pilot, lambda: [session.title for session in store.sessions()] == ["A better title"])
            await pilot.press("ctrl+d", "escape")
            await until(pilot, lambda: on_screen(pilot) == [])  # what is shown is not what was deleted

    asyncio.run(flow())


def test_regenerate_keeps_both_answers_as_variants(make_app: MakeApp) -> None:
    backend = FakeBackend([said("Red."), ended()], [said("Blue."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "A colour?")
            await pilot.press("ctrl+r")
            await until(pilot, lambda: len(backend.requests) == 2)
            await answered(pilot)
            await until(pilot, lambda: on_screen(pilot) == ["A colour?", "Blue."])
            assert [message["content"] for message in backend.requests[1].messages] == ["A colour?"]
            assert "2/2" in str(chat.transcript.views[-1].query_one(".figures", Static).content)
            await pilot.press("ctrl+up", "left")
            await until(pilot, lambda: on_screen(pilot) == ["A colour?", "Red."])
            await pilot.press("right")
            await until(pilot, lambda: on_screen(pilot) == ["A colour?", "Blue."])

    asyncio.run(flow())


def test_editing_an_earlier_message_begins_another_path(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("Red."), ended()], [said("Oak."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "A colour?")
            await pilot.press("ctrl+up", "up", "ctrl+e")
            await until(pilot, lambda: chat.prompt.text == "A colour?")
            chat.prompt.put("A tree?")
            await pilot.press("enter")
            await until(pilot, lambda: on_screen(pilot) == ["A tree?", "Oak."])
            await answered(pilot)

    asyncio.run(flow())
    assert [message.content for message in store.path(store.sessions()[0].id)] == ["A tree?", "Oak."]


def test_an_edit_ends_with_the_chat_that_it_edits(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("Red."), ended()], [said("Blue."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "A colour?")
            await pilot.press("ctrl+up", "up", "ctrl+e")
            await until(pilot, lambda: "Editing" in str(chat.prompt.border_title))
            await pilot.press("ctrl+n")
            await until(pilot, lambda: contents(pilot) == [] == on_screen(pilot))
            assert (chat.prompt.border_title, chat.prompt.text) == (None, "A colour?")
            await pilot.press("enter")
            await until(pilot, lambda: on_screen(pilot) == ["A colour?", "Blue."])
            await answered(pilot)

    asyncio.run(flow())
    assert len(store.sessions()) == 2


def test_a_cut_answer_is_continued_in_the_same_message(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One, two,"), ended(FinishReason.LENGTH)], [said(" three."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "Count")
            await pilot.press("ctrl+g")
            await until(pilot, lambda: contents(pilot) == ["Count", "One, two, three."])
            assert backend.requests[1].goes_on
            assert backend.requests[1].messages[-1]["content"] == "One, two,"

    asyncio.run(flow())


def test_a_fork_continues_without_changing_the_original(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()], [said("Three."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "First")
            await ask(pilot, "Second")
            await pilot.press("ctrl+up", "up", "up", "ctrl+o")
            await until(pilot, lambda: contents(pilot) == ["First", "One."])
            await ask(pilot, "Other")

    asyncio.run(flow())
    paths = {session.title: [m.content for m in store.path(session.id)] for session in store.sessions()}
    assert paths == {"First": ["First", "One.", "Second", "Two."], "First (fork)": ["First", "One.", "Other", "Three."]}


def test_the_model_names_the_chat_in_the_background(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("Green."), ended()], [said('"Leaf colours"'), ended()], converses=True)

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "What colour are leaves?")
            await until(pilot, lambda: chat.title_bar.title == "Leaf colours")

    asyncio.run(flow())
    assert backend.requests[1].background
    assert store.sessions()[0].title == "Leaf colours"


def test_a_sentence_is_not_a_title(store: SessionStore) -> None:
    backend = FakeBackend([said("The subject of our conversation in five words was: leaves."), ended()])
    conversation = Conversation(store, "fake", Parameters())
    conversation.ask("What colour are leaves?")
    conversation.begin_answer().content = "Green."
    asyncio.run(make_title(conversation, backend))
    assert len(backend.requests) == 1
    assert store.sessions()[0].title == "What colour are leaves?"


def test_delete_and_undo_by_command(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "Question")
            await say(pilot, "/delete")
            await until(pilot, lambda: on_screen(pilot) == [])
            assert store.sessions() == []
            await say(pilot, "/undo")
            await until(pilot, lambda: on_screen(pilot) == ["Question", "One."])

    asyncio.run(flow())


def test_export_writes_and_never_replaces(make_app: MakeApp, tmp_path: Path) -> None:
    backend = FakeBackend([said("One."), ended()])
    markdown, as_json = tmp_path / "chat.md", tmp_path / "chat.json"

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "Question")
            await say(pilot, f"/export {markdown}")
            await say(pilot, f"/export {as_json}")
            await until(pilot, lambda: markdown.exists() and as_json.exists())
            await say(pilot, f"/export {markdown}")
            await until(pilot, lambda: chat.query(".failure"))
            assert "exists already" in str(chat.query_one(".failure", Static).content)

    asyncio.run(flow())
    assert markdown.read_text(encoding="utf-8") == "# Question\n\n## You\n\nQuestion\n\n## tiny\n\nOne.\n"
    assert [message["content"] for message in json.loads(as_json.read_text())["messages"]] == ["Question", "One."]


def test_an_export_never_makes_a_hidden_file(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()])).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "???")
            for number, name in enumerate(("", ".json", "sub/.md"), 1):
                (tmp_path / "sub").mkdir(exist_ok=True)
                await say(pilot, f"/export {name}".strip())
                await until(pilot, lambda number=number: len([*tmp_path.rglob("chat.*")]) == number)

    asyncio.run(flow())
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")} >= {
        "chat.md",
        "chat.json",
        "sub/chat.md",
    }
    assert json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert not [*tmp_path.rglob(".md"), *tmp_path.rglob(".json")]


def test_a_deletion_that_fails_is_not_called_one(
    make_app: MakeApp, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_store: SessionStore, _identity: int) -> None:
        raise SessionError("The disk is full.")

    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()])).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "Question")
            await pilot.press("f3")
            notice = pilot.app.screen.query_one(Notice)
            with monkeypatch.context() as patch:
                patch.setattr(SessionStore, "delete", refuse)
                await pilot.press("ctrl+d")
                await until(pilot, lambda: str(notice.content) == "The disk is full.")
            await pilot.press("ctrl+d")
            await until(pilot, lambda: str(notice.content).startswith("Deleted 'Question'"))
            assert store.sessions() == []
            with monkeypatch.context() as patch:
                patch.setattr(SessionStore, "restore", refuse)
                await pilot.press("ctrl+z")
                await until(pilot, lambda: str(notice.content) == "The disk is full.")
            await pilot.press("ctrl+z")
            await until(pilot, lambda: len(store.sessions()) == 1)

    asyncio.run(flow())


@pytest.mark.parametrize("command", ["/new", "/rename Mine", "/delete"])
def test_an_unneeded_title_is_cancelled(make_app: MakeApp, store: SessionStore, command: str) -> None:
    backend = FakeBackend([said("Green."), ended()], converses=True)  # the title is never complete

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "What colour are leaves?")
            await until(pilot, lambda: len(backend.answers) == 2)
            assert not backend.answers[1].cancelled
            await say(pilot, command)
            await until(pilot, lambda: backend.answers[1].cancelled)

    asyncio.run(flow())


def test_a_title_cancelled_while_it_is_submitted_is_not_generated() -> None:
    submitting, submitted = threading.Event(), threading.Event()

    class Slow(FakeBackend):
        def submit(self, request: AnswerRequest) -> FakeAnswer:
            submitting.set()
            submitted.wait()
            return super().submit(request)

    backend = Slow()

    async def flow() -> None:
        task = asyncio.create_task(whole_answer(backend, AnswerRequest(prompt="Title?")))
        await asyncio.to_thread(submitting.wait)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(flow())
    submitted.set()
    eventually(lambda: bool(backend.answers) and backend.answers[0].cancelled)


def test_a_name_given_while_the_model_looks_for_one_stays(store: SessionStore) -> None:
    backend, conversation = FakeBackend(), Conversation(store, "fake", Parameters())
    conversation.ask("What colour are leaves?")
    conversation.begin_answer().content = "Green."

    async def flow() -> None:
        task = asyncio.create_task(make_title(conversation, backend))
        while not backend.answers:
            await asyncio.sleep(0.01)
        store.rename(store.sessions()[0].id, "Mine")
        backend.answers[0].push(said("Leaf colours"), ended())
        await task

    asyncio.run(flow())
    assert store.sessions()[0].title == "Mine"


def test_the_last_chat_continues_with_another_system_prompt(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()])

    async def first() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "First")

    async def again() -> None:
        app = make_app(backend)
        app.begin_with(resume=True, system="Be brief.")
        async with app.run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "Second")

    asyncio.run(first())
    asyncio.run(again())
    said_before = [(one["role"], one["content"]) for one in backend.requests[1].messages]
    assert said_before == [("system", "Be brief."), ("user", "First"), ("assistant", "One."), ("user", "Second")]
    assert len(store.sessions()) == 1


def test_the_first_prompt_is_sent_at_once_but_not_again_by_a_reloaded_page(
    make_app: MakeApp, store: SessionStore
) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow(visits: int) -> None:
        app = make_app(backend)
        app.begin_with(False, None, visit="page", prompt="Say one.")
        async with app.run_test() as pilot:
            await loaded(pilot)
            await until(pilot, lambda: len(chat_of(pilot).conversation.messages) == 2)
            assert (await answered(pilot)).content == "One."
            await until(pilot, lambda: (store.remembered("browser visit") or "").startswith("page"))
        assert len(backend.requests) == 1, visits

    asyncio.run(flow(1))
    asyncio.run(flow(2))


def test_a_first_prompt_stays_in_the_field_until_there_is_a_model(make_app: MakeApp) -> None:
    async def flow() -> None:
        app = make_app(FakeBackend(), model="")
        app.begin_with(False, None, prompt="Say one.")
        async with app.run_test() as pilot:
            await until(pilot, lambda: len(app.screen_stack) == 2)  # the model picker
            chat = chat_of(pilot)
            assert chat.prompt.text == "Say one."
            assert not chat.transcript.query(Note)

    asyncio.run(flow())


def test_a_chat_takes_nothing_from_the_one_before_it(store: SessionStore) -> None:
    """Versions before tools and folders stored chats without them."""
    old = store.create("fake", {"temperature": 0.3})
    conversation = Conversation(store, "fake", Parameters(top_k=7))
    conversation.set_parameters(Parameters(tools=True, folder="/notes", system="Be brief."))
    conversation.open(old)
    assert conversation.parameters == Parameters(top_k=7, temperature=0.3)


def test_a_reloaded_page_continues_its_chat(make_app: MakeApp, store: SessionStore) -> None:
    async def first(visit: str) -> None:
        app = make_app(FakeBackend([said("One."), ended()]))
        app.begin_with(False, None, visit=visit)
        async with app.run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, f"Asked by {visit}")
            await until(pilot, lambda: (store.remembered("browser visit") or "").startswith(visit))

    asyncio.run(first("one"))
    store.rename(store.create("m", {}), "A later chat")
    again = make_app(FakeBackend())
    again.begin_with(False, None, visit="one")
    assert [message.content for message in again.chat.conversation.messages] == ["Asked by one", "One."]
    other = make_app(FakeBackend())
    other.begin_with(False, None, visit="two")
    assert other.chat.conversation.messages == []


def test_an_export_in_a_browser_is_a_download(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.commands.sessions.in_browser", lambda: True)
    delivered: list[tuple[str, str]] = []

    def deliver(_app: object, file: io.StringIO, save_filename: str) -> None:
        delivered.append((save_filename, file.read()))

    monkeypatch.setattr("tui.app.ChatApp.deliver_text", deliver)

    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()])).run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "Frage über alles")
            for command in ("/export .json", "/export notes.md", "/export"):
                before = len(delivered)
                await say(pilot, command)
                await until(pilot, lambda before=before: len(delivered) > before)

    asyncio.run(flow())
    assert [name for name, _ in delivered] == ["chat.json", "notes.md", "chat.md"]
    assert json.loads(delivered[0][1])["title"] == "Frage über alles" and "## You" in delivered[1][1]


def test_exported_chats_are_imported_after_asking(make_app: MakeApp, store: SessionStore, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    files = [{"name": "log.txt", "text": "wind 7"}]
    asked = {"id": 1, "parent_id": None, "role": "user", "content": "Storm?", "attachments": files}
    answers = [{"id": 2 + at, "parent_id": 1, "role": "assistant", "content": f"No {at}."} for at in range(2)]
    file.write_text(json.dumps({"title": "Weather", "messages": [asked, *answers]}), encoding="utf-8")
    backend = FakeBackend([said("Yes."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            for keys, count in ((["enter"], 0), (["down", "enter"], 1)):
                await say(pilot, f"/import {file}")
                await until(pilot, lambda: isinstance(pilot.app.screen, QuestionScreen))
                assert "localllm: 1 new chat.\nWeather" in str(pilot.app.screen.query_one(Static).content)
                await pilot.press(*keys)
                await until(pilot, lambda count=count: len(store.sessions()) == count)
            await until(pilot, lambda: contents(pilot) == ["Storm?", "No 1."] == on_screen(pilot))
            await say(pilot, f"/import {file}")
            await until(pilot, lambda: chat.query(Note))
            assert "0 new chats; 1 here already. There is nothing to import." in str(chat.query_one(Note).content)
            await say(pilot, "/import missing.json")
            await until(pilot, lambda: chat.query(".failure"))
            await pilot.press("escape", "ctrl+up", "ctrl+up", "ctrl+e")
            await say(pilot, " Today")
            await until(pilot, lambda: backend.requests)

    asyncio.run(flow())
    sent = str(backend.requests[0].messages[-1]["content"])
    assert "Storm? Today" in sent and "wind 7" in sent, "files that the text does not name stay with it"
