"""The terminal that the chat draws on: restored however the chat ends, and what colours its background calls for.

Imports nothing heavy: it is the first of the chat that is loaded.
"""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from textual.driver import Driver

# Switches off whatever Textual's driver may have switched on, in its order: bracketed paste, line wrapping, reports of
# resizing, mouse and focus, kitty's keys, synchronised output, the alternate screen, colours, the hidden cursor.
_RESET = (
    "\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1004l\x1b[<u\x1b[?2026l"
    "\x1b[?1049l\x1b[0m\x1b[?25h"
)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


# xterm's questions: the background's colour (OSC 11), and what every terminal answers (device attributes).
_QUESTIONS = b"\x1b]11;?\x1b\\\x1b[c"
_BACKGROUND = re.compile(
    rb"\x1b\]11;rgba?:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)(?:/[0-9a-fA-F]+)?(?:\x1b\\|\x07)"
)
_ATTRIBUTES = re.compile(rb"\x1b\[\?[\d;]*c")
_ANSWER_S = 0.3


def go_on_watched() -> None:
    """Continue in a child process, while this one waits for it and never returns.

    If the child is killed (a crash in native code, out of memory, kill -9), the terminal is restored and a sentence
    says what happened; the exit code is the child's, or 128 plus the signal. Call it while there is one thread, before
    anything large is imported. Windows restores the console of a program that ends by itself.
    """
    if sys.platform == "win32":
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _leave_with_parent()
        return

    def pass_on(number: int, _frame: "FrameType | None") -> None:
        os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child has it from the terminal too
    killed_by = _wait(child)
    termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
    sys.stdout.write(_RESET)
    sys.stdout.flush()
    from localllm.cli.terminal import fail

    name = signal.Signals(killed_by).name
    fail(f"The chat was ended by {name}. It is saved: F3 lists it after the next start.")
    sys.stderr.flush()
    os._exit(128 + killed_by)


def _leave_with_parent() -> None:
    """Have the system send SIGHUP to this process if its watcher is killed: the shell draws again by then."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)


def _wait(child: int) -> int:
    """The signal that killed the child; if the child exits by itself, so does this process."""
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)  # the shell waits for this one; it wakes both
        elif os.WIFEXITED(status):
            os._exit(os.WEXITSTATUS(status))  # what an interpreter does at its end is the child's
        else:
            return os.WTERMSIG(status)


def light_background() -> tuple[bool, str]:
    """Whether the terminal's background is light, and what the user typed while it was asked.

    A terminal that does not say counts as dark. Waits for an answer at most _ANSWER_S.
    """
    if (colours := os.environ.get("COLORFGBG", "")).rpartition(";")[2] in ("7", "15"):
        return True, ""
    if colours or sys.platform == "win32":
        return False, ""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    answer, end = b"", time.monotonic() + _ANSWER_S
    try:
        tty.setcbreak(terminal, termios.TCSANOW)
        os.write(sys.stdout.fileno(), _QUESTIONS)
        while not _ATTRIBUTES.search(answer) and select.select([terminal], [], [], max(end - time.monotonic(), 0))[0]:
            if not (read := os.read(terminal, 1024)):
                break  # the terminal has gone
            answer += read
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
    found = _BACKGROUND.search(answer)
    rest = _ATTRIBUTES.sub(b"", _BACKGROUND.sub(b"", answer)).decode(errors="replace")
    typed = "".join(letter for letter in rest.partition("\x1b")[0] if letter.isprintable())
    if found is None:
        return False, typed
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    return 0.299 * red + 0.587 * green + 0.114 * blue > 0.5, typed


class TerminalOutput:
    """A terminal's stream that can still be written to when the terminal has gone.

    Textual's writing thread would end with an error, and its application wait for that thread for ever. on_gone is
    called once, by the thread that notices.
    """

    def __init__(self, stream: Any, on_gone: Callable[[], object]) -> None:
        self._stream = stream
        self._on_gone = on_gone
        self._gone = False

    def write(self, text: str) -> int:
        self._unless_gone(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_gone(self._stream.flush)

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def _unless_gone(self, action: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError:
            self._gone = True
            self._on_gone()


def surviving(driver: "type[Driver]") -> "type[Driver]":
    """A driver that draws on stdout and has the application leave when its terminal goes away without a signal.

    Textual draws on stderr, which may lead elsewhere (2>/dev/null). Windows' drivers are returned as they are: there,
    the program ends with its console.
    """
    if sys.platform == "win32":
        return driver

    class SurvivingDriver(driver):  # type: ignore[valid-type,misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._file = TerminalOutput(sys.__stdout__, lambda: self._app.call_later(self._app.leave_without_terminal))
            self._suspended = False

        def suspend_application_mode(self) -> None:
            self._suspended = True
            super().suspend_application_mode()

        def resume_application_mode(self) -> None:
            # A hang-up brings SIGCONT too, and a second thread that reads the keys would never end.
            if self._suspended:
                self._suspended = False
                super().resume_application_mode()

    return SurvivingDriver
