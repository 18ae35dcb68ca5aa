"""Damaged chat databases: whatever was changed, each operation returns a result or raises a SessionError."""

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import Static

from localllm.chats import Attachment, Message, Role, SessionStore
from localllm.chats.conversation import Conversation
from localllm.chats.database import SessionError
from localllm.chats.parameters import Parameters
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, loaded, until
from tests.tui.conftest import MakeApp
from tui.screens.sessions import SessionsScreen

COLUMNS = {
    "session": ("title", "titled", "model", "parameters", "leaf", "created", "updated", "deleted"),
    "message": (
        *("session_id", "parent_id", "role", "content", "reasoning", "finish_reason", "error", "model", "stats"),
        *("attachments", "created", "calls"),
    ),
    "remembered": ("value",),
    "prompt": ("text",),
    "migration": ("name",),
}
# As SQL: SQLite stores any value in any column.
VALUES = (
    *("NULL", "-1", "9e999", "''", "'x'", "x'ff'", "CAST(x'41ff42' AS TEXT)", "'[1]'", "'{\"a\": [1]}'", "'[{}]'"),
    *('\'{"generated": "x"}\'', "'{\"temperature\": {}}'", '\'[{"name": 1, "text": 2}]\'', "'[{\"name\": 5}]'"),
    *('\'[{"name": "a", "text": "", "picture": "x"}]\'', "replace(hex(zeroblob(50000)), '00', '[')", "1", "2"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "s.db"
    store = SessionStore(path)
    conversation = Conversation(store, "m", Parameters(system="Be brief."))
    for number in range(3):
        conversation.ask(f"Question {number}", (Attachment("a.txt", "text", 3), Attachment("b.png", "", 2, "aGk=")))
        answer = conversation.begin_answer()
        answer.content, answer.finish_reason, answer.stats = "Answer", "stop", {"generated": 3, "unseen": ["b.png"]}
        conversation.save(answer)
    store.remember("theme", "localllm")
    store.add_prompt("Question")
    store.close()
    return path.read_bytes()


def use(path: Path) -> None:
    """The chat's operations on a database: every outcome but a SessionError is one of the store's own types."""
    try:
        store = SessionStore(path, must_save=False)
    except SessionError:
        return

    def tried(work: Callable[[], object]) -> None:
        with contextlib.suppress(SessionError):
            work()

    tried(lambda: [f"{prompt} {store.remembered('theme')}" for prompt in store.prompts()])
    tried(lambda: [f"{each.title} {each.updated:.0f} {each.messages}" for each in store.sessions("e")])
    conversation = Conversation(store, "m", Parameters())
    for identity in _sessions(path):
        tried(lambda identity=identity: conversation.open(identity))
        for message in conversation.messages:
            f"{message.content + message.reasoning} {message.stats.get('generated', 0) + 1}"
            message.for_model(), message.pictures()
            tried(lambda message=message: conversation.variant(message))
            tried(lambda message=message: store.select(message.session_id, message.id))
        tried(lambda: conversation.request().sampling)
        tried(lambda: conversation.ask("more"))
        tried(
            lambda identity=identity: store.fork(identity, conversation.messages[0].id if conversation.messages else 0)
        )
    store.close()


def _sessions(path: Path) -> list[int]:
    try:
        with contextlib.closing(sqlite3.connect(path)) as db:
            return [row[0] for row in db.execute("SELECT id FROM session")]
    except sqlite3.Error:
        return [1]


@pytest.mark.slow
@pytest.mark.parametrize("table", COLUMNS)
def test_any_value_in_any_column(whole: bytes, tmp_path: Path, table: str) -> None:
    for number, column in enumerate(COLUMNS[table]):
        for other, value in enumerate(VALUES):
            path = tmp_path / f"{number}-{other}.db"
            path.write_bytes(whole)
            db = sqlite3.connect(path)
            try:
                db.execute(f"UPDATE {table} SET {column} = {value}")
                db.commit()
            except sqlite3.IntegrityError:
                continue  # SQLite itself refuses
            finally:
                db.close()
            use(path)


def test_messages_in_a_circle_end(whole: bytes, tmp_path: Path) -> None:
    for sql in ("parent_id = id", "parent_id = (SELECT max(id) FROM message)"):
        path = tmp_path / "s.db"
        path.write_bytes(whole)
        db = sqlite3.connect(path)
        db.execute(f"UPDATE message SET {sql}")
        db.commit()
        db.close()
        use(path)


def test_damaged_bytes(whole: bytes, tmp_path: Path) -> None:
    chance = random.Random(1)
    for number in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 1, 4, 50))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.2:
            del damaged[chance.randrange(len(damaged)) :]
        path = tmp_path / f"{number}.db"
        path.write_bytes(damaged)
        use(path)


def test_one_damaged_letter_hides_no_chat(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(whole.replace(b"Question 1", b"Question \xff"))
    store = SessionStore(path)
    (session,) = store.sessions()
    assert [message.content for message in store.path(session.id)][2] == "Question \ufffd"
    store.close()


def test_names_that_are_not_text_are_stored(tmp_path: Path) -> None:
    """A model's path may contain bytes that are not UTF-8."""
    store = SessionStore(tmp_path / "s.db")
    session = store.create("model\udcff.gguf", {})
    store.add(Message(0, session, None, Role.USER, "\ud800"))
    assert store.path(session)[0].content == "?"
    store.close()


def test_a_damaged_chat_in_the_list_is_an_error_in_the_open_one(make_app: MakeApp, store: SessionStore) -> None:
    session = store.create("tiny", {})
    store.add(Message(0, session, None, Role.USER, "Question"))
    with contextlib.closing(sqlite3.connect(store.file)) as db:
        db.execute("UPDATE message SET stats = 'damaged'")
        db.commit()

    async def flow() -> None:
        async with make_app(FakeBackend([said("One."), ended()])).run_test() as pilot:
            chat = await loaded(pilot)
            await pilot.press("f3")
            await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen) and pilot.app.screen.sessions)
            await pilot.press("enter")
            await until(pilot, lambda: chat.query(".failure"))
            assert "a chat is damaged" in str(chat.query_one(".failure", Static).content)
            assert (await ask(pilot, "Hello")).content == "One."
            assert chat.conversation.session_id != session

    asyncio.run(flow())
