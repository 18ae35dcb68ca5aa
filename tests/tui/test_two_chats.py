"""Several programs use one file of chats at once, and one of them is killed: nothing is lost."""

import asyncio
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.chats import Message, Role, SessionStore
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, loaded, say, until
from tests.tui.conftest import MakeApp

# Writes answers piece by piece, like a chat, and says after each change what it has stored.
WRITER = """
import json, sys
from pathlib import Path
from localllm.chats import Message, Role, SessionStore
store = SessionStore(Path(sys.argv[1]))
session = int(sys.argv[2]) or store.create("m", {})
parent, count = None, int(sys.argv[3])
number = 0
while number < count:
    message = store.add(Message(0, session, parent, Role.USER, f"{sys.argv[4]} asks {number}"))
    answer = store.add(Message(0, session, message.id, Role.ASSISTANT))
    for piece in range(5):
        answer.content += f"{sys.argv[4]} says {piece}. "
        store.update(answer, lasting=False)
        print(json.dumps([answer.id, answer.content]), flush=True)
    answer.finish_reason, parent, number = "stop", answer.id, number + 1
    store.update(answer)
store.close()
assert not store.unsaved, store.unsaved
"""


def writer(file: Path, session: int, answers: int, name: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(file), str(session), str(answers), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stored(file: Path) -> dict[int, str]:
    store = SessionStore(file)
    found = {each.id: each.content for session in store.sessions() for each in store.all_messages(session.id)}
    store.close()
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["in two chats", "in one chat"])
def test_what_two_programs_write_at_once_is_all_there(shared: bool, tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"
    store = SessionStore(file)
    session = store.create("m", {}) if shared else 0
    with writer(file, session, 20, "one") as one, writer(file, session, 20, "two") as two:
        said_by = [output.communicate()[0] for output in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0)
    contents = stored(file)
    for name, lines in zip(("one", "two"), said_by, strict=True):
        written = dict(json.loads(line) for line in lines.splitlines())
        assert len(written) == 20 and all(contents[int(key)] == text for key, text in written.items())
        assert {f"{name} asks {number}" for number in range(20)} <= set(contents.values())
    store.close()


def test_what_a_killed_program_has_written_is_there(tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"
    with writer(file, 0, 10**6, "one") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(23)]  # in the middle of an answer
        process.kill()
        process.wait()
    contents = stored(file)
    for line in lines:
        key, text = json.loads(line)
        assert contents[key].startswith(text)


def test_ids_do_not_collide_if_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that write at the same time see the same last id, so the next one is above it by chance."""
    store = SessionStore(tmp_path / "sessions.db")
    store.create("m", {})
    monkeypatch.setattr("localllm.chats.store.time.time_ns", lambda: 0)
    ids = [store.create("m", {}) for _ in range(5)]
    store.close()
    steps = [after - before for before, after in itertools.pairwise(ids)]
    assert min(steps) > 0 and len(set(steps)) > 1


def test_an_answer_that_another_chat_has_written_on_is_read_again(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("Half"), ended("cancelled")])  # type: ignore[arg-type]

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "Go")
            message = chat.conversation.messages[-1]
            other = SessionStore(store.file)
            (theirs,) = [each for each in other.path(message.session_id) if each.id == message.id]
            theirs.content = "Half, and the rest"
            other.update(theirs)
            other.close()
            await say(pilot, "/continue")
            await until(pilot, lambda: chat.query(".failure"))
            assert chat.conversation.messages[-1].content == "Half, and the rest"
            assert len(backend.requests) == 1

    asyncio.run(flow())
    assert store.path(store.sessions()[0].id)[-1].content == "Half, and the rest"


def test_a_summary_changes_nothing_else_of_its_message(store: SessionStore) -> None:
    session = store.create("m", {})
    message = store.add(Message(0, session, None, Role.ASSISTANT, "Old"))
    other = SessionStore(store.file)
    (theirs,) = other.path(session)
    theirs.content = "New"
    other.update(theirs)
    other.close()
    message.summary = "In short."
    store.summarise(message)
    (found,) = store.path(session)
    assert (found.content, found.summary) == ("New", "In short.")
