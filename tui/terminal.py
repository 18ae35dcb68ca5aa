"""The chat's terminal: restores it however the chat ends, and asks what it can do.

Imports nothing heavy: it is the first module of the chat to be loaded.
"""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf_io.system import terminal_restorer, unbuffered_keys
from localllm.front.terminal import fail

if TYPE_CHECKING:
    from types import FrameType

    from textual.driver import Driver

# Undoes what Textual's driver may have set, in its order: bracketed paste, line wrapping, reports of resizing, mouse
# and focus, kitty's keys, synchronised output, the alternate screen, colours, the hidden cursor.
_RESET = (
    "\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1004l\x1b[<u\x1b[?2026l"
    "\x1b[?1049l\x1b[0m\x1b[?25h"
)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


# Background colour (xterm's OSC 11), kitty's graphics, the terminal's name (xterm's XTVERSION), then device attributes,
# which every terminal answers. Attribute 4 is sixel graphics.
_QUESTIONS = b"\x1b]11;?\x1b\\\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\\x1b[>0q\x1b[c"
_BACKGROUND = re.compile(
    rb"\x1b\]11;rgba?:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)(?:/[0-9a-fA-F]+)?(?:\x1b\\|\x07)"
)
_GRAPHICS = re.compile(rb"\x1b_G[^\x1b]*\x1b\\")
_NAME = re.compile(rb"\x1bP>\|([^\x1b]*)\x1b\\")
_ATTRIBUTES = re.compile(rb"\x1b\[\?([\d;]*)c")
# Terminals with iTerm2's inline images, by the names that they answer or set as TERM_PROGRAM.
_INLINE = ("iterm", "wezterm")
_ANSWER_S = 0.3


def in_browser() -> bool:
    """Whether this process draws for textual-serve instead of a terminal."""
    return os.environ.get("TEXTUAL_DRIVER", "").endswith(":WebDriver")


def go_on_watched() -> None:
    """Continue in a child process; the parent waits for it and never returns.

    If the child is killed (a crash in native code, out of memory, kill -9), the parent restores the terminal and prints
    what happened. It exits with the child's exit code, or 128 plus the signal. Call this while there is one thread,
    before large imports. Does nothing on Windows, which restores the console when a program ends.
    """
    if sys.platform == "win32":
        return
    restore = terminal_restorer(sys.stdin.fileno())
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _leave_with_parent()
        return

    def pass_on(number: int, _frame: "FrameType | None") -> None:
        os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child too
    killed_by = _wait(child)
    restore()
    sys.stdout.write(_RESET)
    sys.stdout.flush()

    name = signal.Signals(killed_by).name
    fail(f"The chat was ended by {name}. It is saved: F3 lists it after the next start.")
    sys.stderr.flush()
    os._exit(128 + killed_by)


def _leave_with_parent() -> None:
    """Have the kernel send SIGHUP to this process if its parent is killed, because the shell then owns the terminal."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)


def _wait(child: int) -> int:
    """Wait for the child and return the signal that killed it; if the child exits, exit with its code."""
    if sys.platform == "win32":
        raise NotImplementedError
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)  # the shell waits for this process, and resumes both
        elif os.WIFEXITED(status):
            os._exit(os.WEXITSTATUS(status))  # the child has already done the interpreter's cleanup
        else:
            return os.WTERMSIG(status)


@dataclass(frozen=True, slots=True)
class Abilities:
    """light: the background is light. draws: the terminal may draw pictures. typed: by the user, during the query.

    inline: it draws by iTerm2's protocol.
    """

    light: bool = False
    draws: bool = False
    typed: str = ""
    inline: bool = False


def ask_terminal() -> Abilities:
    """Ask the terminal what it can do. One that does not answer within _ANSWER_S counts as dark and without pictures.

    Not asked on Windows, where only textual-image can tell whether pictures are drawn.
    """
    if sys.platform == "win32":
        return Abilities(draws=True)
    terminal = sys.stdin.fileno()
    answer, end = b"", time.monotonic() + _ANSWER_S
    with unbuffered_keys(terminal):
        os.write(sys.stdout.fileno(), _QUESTIONS)
        while not _ATTRIBUTES.search(answer) and select.select([terminal], [], [], max(end - time.monotonic(), 0))[0]:
            if not (read := os.read(terminal, 1024)):
                break  # the terminal has gone
            answer += read
    forms = (_BACKGROUND, _GRAPHICS, _NAME, _ATTRIBUTES)
    colour, graphics, name, attributes = (found.search(answer) for found in forms)
    rest = answer
    for found in forms:
        rest = found.sub(b"", rest)
    typed = "".join(letter for letter in rest.decode(errors="replace").partition("\x1b")[0] if letter.isprintable())
    draws = bool(graphics and b";OK" in graphics[0]) or bool(attributes and b"4" in attributes[1].split(b";"))
    # Within tmux, TERM_PROGRAM may be that of the terminal around it, which does not get the pictures.
    told = "" if "TMUX" in os.environ else os.environ.get("TERM_PROGRAM", "")
    program = name[1].decode(errors="replace") if name else told
    inline = program.lower().startswith(_INLINE)
    return Abilities(_is_light(colour), draws or inline, typed, inline)


def _is_light(colour: re.Match[bytes] | None) -> bool:
    """Whether the background is light, by COLORFGBG or the terminal's answer."""
    if colours := os.environ.get("COLORFGBG", ""):
        return colours.rpartition(";")[2] in ("7", "15")
    if colour is None:
        return False
    red, green, blue = (int(part, 16) / (16.0 ** len(part) - 1) for part in colour.groups())
    return 0.299 * red + 0.587 * green + 0.114 * blue > 0.5


class TerminalOutput:
    """A terminal's stream that ignores writes after the terminal is gone.

    Otherwise Textual's writer thread would die, and its application would wait for that thread forever. on_gone is
    called once, on the thread that detects the loss.
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
    """A driver that draws on stdout and makes the application exit if its terminal disappears without a signal.

    Textual draws on stderr, which may be redirected (2>/dev/null). Windows drivers are returned unchanged: there, the
    program ends with its console.
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
            # SIGCONT also accompanies a hang-up; resuming then would start a second input thread that never ends.
            if self._suspended:
                self._suspended = False
                super().resume_application_mode()

    return SurvivingDriver
