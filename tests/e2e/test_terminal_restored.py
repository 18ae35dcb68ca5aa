"""However the chat ends, the terminal is restored and the answer is kept."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from localllm.chats import SessionStore
from tests.waiting import PATIENCE_S, eventually

pty = pytest.importorskip("pty", reason="Windows has no such module")
termios = pytest.importorskip("termios", reason="Windows has no such module")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

OTHER_SCREEN, OWN_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
CURSOR = "\x1b[?25h"
NO_MOUSE = "\x1b[?1000l"


class Chat:
    """The chat on a pseudo terminal, which is its session's controlling terminal."""

    def __init__(self, database: Path, how: str, home: Path) -> None:
        self.database = database
        self.master, slave = pty.openpty()
        self._slave = slave
        termios.tcsetwinsize(slave, (24, 80))
        self.before = termios.tcgetattr(slave)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home), "TERM": "xterm-256color"}
        for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
            environment.pop(variable, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.chat_child", str(database), how],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self.seen = ""

    def read_until(self, text: str) -> None:
        """Read output until the text appears."""
        end = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in:\n{self.seen[-3000:]}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 1 << 16).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait(self) -> int:
        """Read the remaining output and return the exit code."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, "it does not end"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 1 << 16).decode(errors="replace")
        while select.select([self.master], [], [], 0.1)[0]:
            self.seen += os.read(self.master, 1 << 16).decode(errors="replace")
        return self.process.returncode

    def assert_restored(self) -> None:
        assert termios.tcgetattr(self._slave) == self.before
        for sequence in (OWN_SCREEN, CURSOR, NO_MOUSE):
            assert sequence in self.seen[self.seen.rindex(OTHER_SCREEN) :]

    def stored(self) -> list[tuple[str, str | None]]:
        """The stored messages, and how each ended."""
        store = SessionStore(self.database)
        try:
            return [(message.content, message.finish_reason) for message in store.path(store.sessions()[0].id)]
        finally:
            store.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for end in (self.master, self._slave):
            if end >= 0:
                os.close(end)

    def hang_up(self) -> None:
        os.close(self._slave)
        os.close(self.master)
        self.master = self._slave = -1


@pytest.fixture
def start(tmp_path: Path) -> Iterator["StartChat"]:
    starter = StartChat(tmp_path)
    yield starter
    starter.close()


class StartChat:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chats: list[Chat] = []

    def __call__(self, how: str) -> Chat:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        self.chats.append(Chat(self.folder / "sessions.db", how, home))
        return self.chats[-1]

    def close(self) -> None:
        for chat in self.chats:
            chat.close()


def test_sigterm_keeps_the_answer_and_restores_the_terminal(start: StartChat) -> None:
    chat = start("answers")
    chat.read_until("Ask anything")
    chat.type("Go on\r")
    chat.read_until("Half an answer")
    chat.process.send_signal(signal.SIGTERM)
    assert chat.wait() == 128 + signal.SIGTERM
    chat.assert_restored()
    assert chat.stored() == [("Go on", None), ("Half an answer", "cancelled")]


@pytest.mark.parametrize("how", ["answers", "is told of no hang-up"])
def test_a_terminal_that_goes_away_keeps_the_answer(start: StartChat, how: str) -> None:
    chat = start(how)
    chat.read_until("Ask anything")
    chat.type("Go on\r")
    chat.read_until("Half an answer")
    chat.hang_up()
    chat.process.wait(PATIENCE_S)
    assert chat.stored() == [("Go on", None), ("Half an answer", "cancelled")]


def test_an_unexpected_continue_signal_changes_nothing(start: StartChat) -> None:
    chat = start("answers")
    chat.read_until("Ask anything")
    chat.process.send_signal(signal.SIGCONT)  # caused by the hang-up
    chat.type("Go on\r")
    chat.read_until("Half an answer")
    chat.process.send_signal(signal.SIGTERM)
    assert chat.wait() == 128 + signal.SIGTERM
    chat.assert_restored()
    assert chat.seen.count(OTHER_SCREEN) == 1


def test_a_crash_restores_the_terminal_and_tells_of_the_defect(start: StartChat) -> None:
    chat = start("crashes")
    chat.read_until("Ask anything")
    chat.type("Go on\r")
    assert chat.wait() == 1
    chat.assert_restored()
    assert "a defect" in chat.seen[chat.seen.rindex(OWN_SCREEN) :]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_however_it_is_killed_the_terminal_is_put_back(number: signal.Signals, start: StartChat) -> None:
    chat = start("is watched")
    chat.read_until("Ask anything")
    chat.type("Go on\r")
    chat.read_until("Half an answer")
    (child,) = psutil.Process(chat.process.pid).children()
    child.send_signal(number)
    assert chat.wait() == 128 + number
    chat.assert_restored()
    assert f"ended by {number.name}" in chat.seen[chat.seen.rindex(OWN_SCREEN) :]
    assert chat.stored()[0] == ("Go on", None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_one_who_watches_ends_the_chat_in_order(number: signal.Signals, start: StartChat) -> None:
    chat = start("is watched")
    chat.read_until("Ask anything")
    chat.type("Go on\r")
    chat.read_until("Half an answer")
    chat.process.send_signal(number)
    assert chat.wait() == 128 + number
    chat.assert_restored()
    assert chat.stored() == [("Go on", None), ("Half an answer", "cancelled")]


def test_a_chat_that_is_suspended_suspends_the_one_who_watches(start: StartChat) -> None:
    chat = start("is watched")
    chat.read_until("Ask anything")
    watcher = psutil.Process(chat.process.pid)
    (child,) = watcher.children()
    child.send_signal(signal.SIGSTOP)
    eventually(lambda: watcher.status() == psutil.STATUS_STOPPED)
    for process in (watcher, child):
        process.send_signal(signal.SIGCONT)
    chat.type("Go on\r")
    chat.read_until("Half an answer")
    chat.type("\x11")
    assert chat.wait() == 0
    chat.assert_restored()


def test_leaving_while_a_model_loads_does_not_wait_for_it(start: StartChat) -> None:
    chat = start("loads for ever")
    chat.read_until("loading weights")
    chat.type("\x11")  # Ctrl+Q
    assert chat.wait() == 0
    chat.assert_restored()


def test_a_second_chat_on_the_same_sessions(start: StartChat) -> None:
    first, second = start("answers"), start("answers")
    for number, chat in enumerate((first, second)):
        chat.read_until("Ask anything")
        chat.type(f"Question {number}\r")
        chat.read_until("Half an answer")
    for chat in (first, second):
        chat.process.send_signal(signal.SIGTERM)
        chat.wait()
    store = SessionStore(first.database)
    assert sorted(session.title for session in store.sessions()) == ["Question 0", "Question 1"]
    store.close()
